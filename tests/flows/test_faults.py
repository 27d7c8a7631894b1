"""Faults of input, disk and user: one clear line, an exit code, nothing lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from crash_lab import NUM_STEPS, Ended, Lab, committed, first_of

from relax.store import Run

pytestmark = pytest.mark.integration


def said(ended: Ended, code: int, *texts: str) -> str:
    """The one line that the command said, after checking that it is what a user should see."""
    assert "Traceback" not in ended.output
    assert ended.code == code, ended.output
    line = ended.output.splitlines()[-1]
    assert line.startswith("relax train: "), ended.output
    for text in texts:
        assert text in line
    return line


@pytest.fixture(scope="module")
def whole(lab: Lab):
    """What a run holds that nothing happened to."""
    run_dir = lab.folder / "whole"
    ended = lab.run(run_dir)
    assert ended.code == 0, ended.output
    return run_dir, lab.inspect(run_dir), ended


@pytest.fixture
def run_dir(lab: Lab):
    """A new run directory."""
    folder = lab.folder / "faulty"
    lab.clear(folder)
    return folder


# --- input ---------------------------------------------------------------------------------------


def test_a_missing_prompt_file_is_told_before_anything_is_made(lab, run_dir):
    ended = lab.train(run_dir, prompt_data=str(lab.folder / "none.jsonl"))
    said(ended, 1, "none.jsonl", "no such file")
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("", ["prompts.jsonl: the file is empty"]),
        ('{"input": "1=", "label": "1"}\n{"input": \n', ["prompts.jsonl:2: "]),
        ('{"input": "1=", "label": "1"}\n[1]\n', ["prompts.jsonl:2: "]),
    ],
    ids=["empty", "malformed", "no-object"],
)
def test_a_faulty_prompt_file_is_told_and_may_be_mended(lab, run_dir, text, texts):
    """The mended file is other content: a run with nothing committed takes it."""
    path = lab.folder / "prompts.jsonl"
    path.write_text(text)
    said(lab.train(run_dir, prompt_data=str(path), num_rollout=1), 1, *texts)
    assert committed(run_dir) == set()
    shutil.copyfile(lab.folder / "task" / "train.jsonl", path)
    assert lab.train(run_dir, prompt_data=str(path), num_rollout=1).code == 0


@pytest.mark.parametrize("key", ["input", "label"])
def test_a_missing_key_is_told_with_those_present(lab, run_dir, key):
    path = lab.folder / "prompts.jsonl"
    path.write_text('{"question": "1=", "answer": "1"}\n')
    given = {"input_key": "question", "label_key": "answer", f"{key}_key": key}
    ended = lab.train(run_dir, prompt_data=str(path), **given)
    said(ended, 2, f"{path}: row 0: no {key}_key = '{key}'; keys: question, answer")
    given = {"input_key": "question", "label_key": "answer"}
    ended = lab.train(run_dir, prompt_data=str(path), num_rollout=1, **given)
    assert ended.code == 0, ended.output


def long_and_short(lab: Lab) -> str:
    path = lab.folder / "long.jsonl"
    rows = ['{"input": "%s", "label": "1"}\n' % ("1" * n) for n in (3, 50, 3, 60)]
    path.write_text("".join(rows))
    return str(path)


def test_a_prompt_over_the_limit_is_dropped_and_counted(lab, run_dir):
    settings = {"prompt_data": long_and_short(lab), "rollout_max_prompt_len": 10}
    assert lab.train(run_dir, num_rollout=1, **settings).code == 0
    sql = "SELECT value FROM metrics WHERE metric = 'rollout/dropped_prompts'"
    ended = lab.relax("sql", str(run_dir), sql)
    assert ended.code == 0, ended.output
    assert "2" in ended.output


def test_a_prompt_over_the_limit_is_an_error_by_choice(lab, run_dir):
    settings = {"prompt_data": long_and_short(lab), "rollout_max_prompt_len": 10}
    ended = lab.train(run_dir, num_rollout=1, overlong_prompt="error", **settings)
    said(ended, 2, "long.jsonl: row 1: prompt length = 50 tokens; --rollout-max-prompt-len = 10")
    assert committed(run_dir) == set()


def test_a_model_directory_without_tokenizer_is_told(lab, run_dir):
    bare = lab.folder / "bare"
    shutil.copytree(lab.folder / "base", bare, dirs_exist_ok=True)
    for path in bare.glob("*token*"):
        path.unlink()
    said(lab.train(run_dir, hf_checkpoint=str(bare)), 1, f"{bare}: no tokenizer", "copy")
    assert not run_dir.exists()


# --- the run directory ---------------------------------------------------------------------------


def test_the_directory_of_another_run_is_refused_and_left_alone(lab, whole):
    run_dir, holds, _ = whole
    ended = lab.train(run_dir, lr=2e-3)
    said(ended, 2, f"{run_dir}: a run with other settings: update.lr: 0.001 -> 0.002; give the set")
    assert lab.inspect(run_dir) == holds


def test_a_finished_run_computes_nothing_and_says_so(lab, whole):
    run_dir, holds, _ = whole
    before = {p: p.stat().st_mtime_ns for p in run_dir.glob("steps/**/*")}
    ended = lab.train(run_dir)
    assert ended.code == 0
    line = f"{run_dir}: finished already; nothing computed ({4 * NUM_STEPS} stages)"
    assert ended.output.splitlines()[-1] == line
    assert not ended.calls
    assert lab.inspect(run_dir) == holds
    assert {p: p.stat().st_mtime_ns for p in run_dir.glob("steps/**/*")} == before


def at_last_step(lab: Lab, run_dir: Path, whole, **settings) -> Path:
    """As a flow leaves it that was killed when it began the last step."""
    events = lab.run(run_dir, **settings).events
    lab.clear(run_dir)
    lab.run(run_dir, die_at=first_of(events, NUM_STEPS - 1), **settings)
    return run_dir


def test_a_truncated_artifact_is_told_and_restoring_it_suffices(lab, run_dir, whole):
    at_last_step(lab, run_dir, whole)
    path = run_dir / "steps/000001/advantage/advantages.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    line = said(lab.train(run_dir), 1, str(path), f"{len(data) - 100} bytes", "restore the file")
    assert len(line) < 400
    path.write_bytes(data)
    assert lab.train(run_dir).code == 0
    assert lab.inspect(run_dir) == whole[1]


@pytest.mark.parametrize("cut", [True, False], ids=["truncated", "same-size"])
def test_a_damaged_policy_is_told(lab, run_dir, whole, cut):
    at_last_step(lab, run_dir, whole)
    (path,) = run_dir.glob("policies/000002.*/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data[:-8] if cut else data)
    said(lab.train(run_dir), 1, str(path.parent), "manifest")


@pytest.mark.parametrize("damage", ["truncated", "same-size", "emptied"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(lab, run_dir, whole, damage):
    at_last_step(lab, run_dir, whole, max_actor_ckpt_to_keep=2)
    (path,) = run_dir.glob("checkpoints/000002.*")
    harm(path, damage)
    ended = lab.run(run_dir, max_actor_ckpt_to_keep=2)
    assert ended.code == 0, ended.output
    assert f"{path}: damaged: actor/" in ended.output
    assert "; going back to the one before it" in ended.output
    found, (_, holds, _) = lab.inspect(run_dir), whole
    stages = [name for name in holds if "-" in name]
    assert {n: found[n] for n in stages} == {n: holds[n] for n in stages}
    assert found["checkpoints"]["3"] == holds["checkpoints"]["3"]


def harm(checkpoint: Path, damage: str) -> None:
    (data,) = checkpoint.rglob("__0_0.distcp")
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif damage == "same-size":
        flipped = bytearray(data.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        data.write_bytes(flipped)
    else:
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()


def test_a_redo_that_gives_another_policy_stops_and_names_the_tensor(lab, run_dir, whole):
    """As on another kind of machine: what a checkpoint restores is a little different."""
    at_last_step(lab, run_dir, whole, max_actor_ckpt_to_keep=2)
    (path,) = run_dir.glob("checkpoints/000002.*")
    harm(path, "truncated")
    ended = lab.run(run_dir, drift=True, max_actor_ckpt_to_keep=2)
    said(ended, 1, "redoing update 1 gave another policy 2", "differs first, by")
    said(ended, 1, "give --accept-drift to go on from what the redo gave; or `relax fork`")
    assert (NUM_STEPS - 1, "update") not in committed(run_dir)
    hashes = [Run.open(run_dir).policy_hash(version) for version in range(NUM_STEPS)]
    ended = lab.run(run_dir, drift=True, max_actor_ckpt_to_keep=2, accept_drift=True)
    assert ended.code == 0
    told = r"redoing update 1 gave another policy 2 than was published: \S+ differs first, by \S+"
    assert re.search(f"{run_dir}: {told}; accepted", ended.output)
    run = Run.open(run_dir)
    assert [run.policy_hash(version) for version in range(NUM_STEPS)] == hashes
    assert re.fullmatch(told, run.committed(NUM_STEPS - 1, "update").notes["drift"])
    assert "drift" not in run.committed(0, "update").notes


# --- a full disk -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(lab: Lab):
    """A file system of its own, 0 bytes in size until resized."""
    folder = lab.folder / "small"
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def resize(folder: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(folder)], check=True)


def test_a_full_disk_is_one_line_wherever_it_fills_and_nothing_is_lost(lab, small_disk, whole):
    """From the first record to the last checkpoint: grow the disk until the run is whole."""
    run_dir = small_disk / "run"
    places, done = [], set()
    for kib in range(8, 4096, 32):
        resize(small_disk, kib)
        ended = lab.train(run_dir)
        assert committed(run_dir) >= done
        done = committed(run_dir)
        if ended.code == 0:
            break
        line = said(ended, 1, "No space left on device: nothing committed is lost; free some")
        places.append(line.split(": ")[1].removeprefix(f"{run_dir}/").split("/")[0])
    assert ended.code == 0
    assert {"code", "steps", "policies", "checkpoints"} <= set(places)
    assert lab.inspect(run_dir) == whole[1]


# --- Ctrl-C ----------------------------------------------------------------------------------


def test_ctrl_c_stops_after_the_stage_and_the_rerun_continues(lab, run_dir, whole, tmp_path):
    process = lab.start(run_dir, tmp_path / "gate")
    process.send_signal(signal.SIGINT)
    (tmp_path / "gate").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    lines = output.strip().splitlines()
    assert "stopping after this stage; Ctrl-C again: at once" in lines
    assert lines[-1] == f"stopped; run the same command again to continue {run_dir}"
    assert committed(run_dir) == {(0, "rollout"), (0, "reward")}
    continues(lab, run_dir, whole, rewards=2)


def test_a_second_ctrl_c_is_immediate(lab, run_dir, whole, tmp_path):
    process = lab.start(run_dir, tmp_path / "gate-that-never-opens")
    process.send_signal(signal.SIGINT)
    while "stopping" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in output
    assert committed(run_dir) == {(0, "rollout")}
    continues(lab, run_dir, whole, rewards=3)


def continues(lab: Lab, run_dir: Path, whole, *, rewards: int) -> None:
    """The rest, once, and the same bits."""
    again = lab.run(run_dir)
    assert again.code == 0, again.output
    assert again.calls["reward"] == rewards * 4
    assert sum(n for call, n in again.calls.items() if call.startswith("sample")) == 2 * 4
    assert lab.inspect(run_dir) == whole[1]


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_operation_is_one_line(lab, run_dir, whole, count):
    """At creation, between stages and in the middle of a commit."""
    events = whole[2].events
    faults = []
    for event in range(3, len(events), len(events) // count):
        lab.clear(run_dir)
        ended = lab.run(run_dir, die_at=event, by=signal.SIGINT)
        where = f"{event}: {events[event]}: {ended.code}: {ended.output}"
        if "Traceback" in ended.output or ended.code not in (130, 0):
            faults.append(where)
        if ended.code == 130 and "to continue" not in ended.output.splitlines()[-1]:
            faults.append(where)
        again = lab.run(run_dir)
        if again.code != 0 or lab.inspect(run_dir) != whole[1]:
            faults.append(f"{where}; again: {again.output}")
    assert not faults, "\n".join(faults)


# --- two flows -------------------------------------------------------------------------------


def test_of_two_flows_the_second_is_refused_and_the_first_goes_on(lab, run_dir, whole, tmp_path):
    process = lab.start(run_dir, tmp_path / "gate")
    said(lab.train(run_dir), 2, f"{run_dir}: in use by process {process.pid} on ", "wait for it")
    (tmp_path / "gate").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert lab.inspect(run_dir) == whole[1]
    assert [path.read_text() for path in (run_dir / "lease").iterdir()] == [""]


def test_a_flow_whose_run_was_taken_over_leaves(lab, run_dir, whole, tmp_path):
    """As if its host had been silent for too long."""
    process = lab.start(run_dir, tmp_path / "gate")
    shutil.rmtree(run_dir / "lease")
    assert lab.train(run_dir).code == 0
    stranger = '{"host": "far-away", "boot": "", "pid": 7, "start": 1}'
    (run_dir / "lease/000002.json").write_text(stranger)
    (tmp_path / "gate").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert output.strip().splitlines()[-1] == (
        f"relax train: {run_dir}: taken over by process 7 on far-away; this flow ends here"
    )
    assert lab.inspect(run_dir) == whole[1]
