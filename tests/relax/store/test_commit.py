"""One attempt, several attempts, and attempts whose operations fail."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_cases import attempt, metrics, names, update, write_text

from relax.errors import ArtifactError
from relax.schema import TABLES
from relax.store import disk, read_table
from relax.store.commit import CHECKPOINTS, POLICIES, sweep
from relax.store.manifest import read_manifest

FINAL = "steps/000000/rollout"


def test_a_commit_makes_everything_exist_at_once(tmp_path):
    output = attempt(tmp_path, "a", value=3.0)
    assert read_manifest(tmp_path / FINAL) is None
    manifest = output.commit()
    assert read_manifest(tmp_path / FINAL) == manifest
    assert read_table(tmp_path / FINAL / "metrics.arrow", TABLES["metrics"]).equals(metrics(3.0))
    assert names(tmp_path / "steps/000000") == ["rollout"]


def test_an_update_names_what_it_published(tmp_path):
    manifest = update(tmp_path, 4)
    assert manifest.policy.name == "policies/000005.a"
    assert manifest.policy.hash == "hash of policy 5"
    assert manifest.policy.bytes == len("policy 5")
    assert manifest.checkpoint.name == "checkpoints/000005.a"
    assert (tmp_path / manifest.policy.name / "weights").read_text() == "policy 5"


def race(tmp_path, number, barrier, won):
    output = attempt(tmp_path, f"t{number}", stage="update", value=number)
    output.publish(POLICIES, 1, write_text(f"by t{number}"))
    barrier.wait()
    won[number] = output.commit()


def test_of_many_threads_the_first_commits_and_all_see_it(tmp_path):
    count = 12
    barrier, won = threading.Barrier(count), {}
    threads = [
        threading.Thread(target=race, args=(tmp_path, i, barrier, won)) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = {manifest.attempt for manifest in won.values()}
    assert len(won) == count
    table = read_table(tmp_path / "steps/000000/update/metrics.arrow", TABLES["metrics"])
    assert table.equals(metrics(float(winner[1:])))
    assert names(tmp_path / "steps/000000") == ["update"]
    assert names(tmp_path / "policies") == [f"000001.{winner}"]
    assert (tmp_path / f"policies/000001.{winner}/weights").read_text() == f"by {winner}"


RACER = """
import sys, time
from pathlib import Path
from store_cases import attempt
root, name, value = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
output = attempt(root, name, value=value)
(root / f"ready-{name}").touch()
while not (root / "go").exists():
    pass
print(output.commit().attempt)
"""


@pytest.mark.integration
def test_of_several_processes_the_first_commits_and_all_see_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), f"p{i}", str(i)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(4)
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(racers):
        assert all(racer.poll() is None for racer in racers)
    (tmp_path / "go").touch()
    said = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert len(said) == 1
    winner = said.pop()
    assert read_manifest(tmp_path / FINAL).attempt == winner
    table = read_table(tmp_path / FINAL / "metrics.arrow", TABLES["metrics"])
    assert table.equals(metrics(float(winner[1:])))
    assert names(tmp_path / "steps/000000") == ["rollout"]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTEMPTY, errno.EIO, errno.ESTALE])
def test_a_rename_that_worked_but_reports_failure_is_a_success(tmp_path, monkeypatch, code):
    def rename(source, target):
        os.rename(source, target)
        raise OSError(code, os.strerror(code))

    output = attempt(tmp_path, "a", value=3.0)
    monkeypatch.setattr(disk, "rename", rename)
    manifest = output.commit()
    assert manifest.attempt == "a"
    assert read_manifest(tmp_path / FINAL) == manifest
    assert read_table(tmp_path / FINAL / "metrics.arrow", TABLES["metrics"]).equals(metrics(3.0))


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_rename_that_failed_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, code):
    def rename(source, target):
        raise OSError(code, os.strerror(code))

    output = attempt(tmp_path, "a")
    monkeypatch.setattr(disk, "rename", rename)
    with pytest.raises(OSError, match=os.strerror(code)):
        output.commit()
    assert names(tmp_path / "steps/000000") == []


def test_the_loser_gets_the_winners_manifest_and_removes_its_own(tmp_path):
    first, second = (attempt(tmp_path, n, stage="update", value=v) for n, v in (("a", 1), ("b", 2)))
    for output in (first, second):
        output.publish(POLICIES, 1, write_text(output.attempt))
    winner = second.commit()
    assert first.commit() == winner
    assert winner.attempt == "b"
    assert names(tmp_path / "policies") == ["000001.b"]
    assert names(tmp_path / "steps/000000") == ["update"]


def test_an_attempt_whose_files_the_winner_swept_yields(tmp_path):
    slow = attempt(tmp_path, "slow")
    winner = attempt(tmp_path, "fast", value=1.0).commit()
    sweep(tmp_path, winner)
    assert slow.commit() == winner
    assert names(tmp_path / "steps/000000") == ["rollout"]


def test_something_without_a_manifest_in_the_way_is_told(tmp_path):
    output = attempt(tmp_path, "a")
    (tmp_path / FINAL).mkdir()
    (tmp_path / FINAL / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"rollout: in the way .* move it aside"):
        output.commit()
    assert (tmp_path / FINAL / "notes.txt").read_text() == "mine"


def test_sweep_removes_the_leftovers_of_one_stage_alone(tmp_path):
    attempt(tmp_path, "dead", stage="update").publish(POLICIES, 1, write_text("dead"))
    attempt(tmp_path, "dead", stage="reward")
    attempt(tmp_path, "dead", step=1, stage="update").publish(POLICIES, 2, write_text("next"))
    (tmp_path / "policies/.staging-000001.killed").mkdir()
    (tmp_path / "checkpoints/000001.killed").mkdir(parents=True)
    winner = update(tmp_path, 0, "b", checkpoint=False)
    sweep(tmp_path, winner)
    assert names(tmp_path / "policies") == ["000001.b", "000002.dead"]
    assert names(tmp_path / "checkpoints") == []
    assert names(tmp_path / "steps/000000") == [".staging-reward-dead", "update"]


def test_discard_removes_what_an_attempt_published_and_was_publishing(tmp_path):
    kept = update(tmp_path, 0, "job-1")
    output = attempt(tmp_path, "job-1", step=1, stage="update")
    output.publish(POLICIES, 2, write_text("policy"))

    def fail(directory: Path) -> str:
        (directory / "half").write_text("half")
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        output.publish(CHECKPOINTS, 2, fail)
    output.discard()
    assert names(tmp_path / "policies") == [Path(kept.policy.name).name]
    assert names(tmp_path / "checkpoints") == [Path(kept.checkpoint.name).name]
    assert names(tmp_path / "steps/000001") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line(tmp_path, monkeypatch, code):
    def fsync(path):
        raise OSError(code, os.strerror(code))

    output = attempt(tmp_path, "a")
    monkeypatch.setattr(disk, "fsync_file", fsync)
    with pytest.raises(ArtifactError, match=f"{os.strerror(code)}: nothing committed is lost"):
        output.write("metrics", metrics(1.0))
