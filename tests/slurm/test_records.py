"""A job's folder: one claimant, one row of accounting, one file once it is over."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm import records
from slurm.jobs import attempts

CLAIMANT = """
import sys
from pathlib import Path
from slurm import records
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(records.claim(folder, {"step": 1}))
"""


def test_exactly_one_of_many_gets_a_claim(tmp_path):
    folder = tmp_path / "jobs" / "000001-update-1"
    folder.parent.mkdir()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMANT, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 6
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert sorted(said) == ["False"] * 5 + ["True"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_claim_whose_rename_only_says_that_it_failed_is_ones_own(tmp_path, monkeypatch):
    """NFS sends a rename again whose answer was lost, and the second finds nothing to rename."""
    rename = Path.rename

    def repeated(self, target):
        rename(self, target)
        if target.name == "job":
            rename(self, target)

    monkeypatch.setattr(Path, "rename", repeated)
    assert records.claim(tmp_path / "job", {"step": 1})
    assert not records.claim(tmp_path / "job", {"step": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["job"]


def test_claimant_is_alive_only_as_the_same_process(tmp_path):
    folder = tmp_path / "a"
    records.claim(folder, {})
    mine = records.read(folder / records.CLAIM)
    assert mine is not None
    assert records.claimant_alive(folder, mine)
    assert not records.claimant_alive(folder, {**mine, "start": mine["start"] - 1})
    assert not records.claimant_alive(folder, {**mine, "boot": "before"})
    assert not records.claimant_alive(folder, {**mine, "pid": 2**22 + 1})


def test_claimant_on_another_host_is_judged_by_the_file_systems_clock_alone(tmp_path):
    folder = tmp_path / "a"
    records.claim(folder, {})
    elsewhere = {"host": "elsewhere", "claimed": time.time() - 3600}  # its clock is slow
    assert records.claimant_alive(folder, elsewhere)
    now = folder.stat().st_mtime
    os.utime(folder, (now - 100, now - 100))
    assert records.claimant_alive(folder, elsewhere)
    os.utime(folder, (now - 121, now - 121))
    assert not records.claimant_alive(folder, {**elsewhere, "claimed": time.time() + 3600})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    did = []
    monkeypatch.setattr(records.os, "fsync", lambda _: did.append("fsync"))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *of: did.append("rename") or rename(*of))
    records.write(tmp_path / "a.json", {})
    assert did == ["fsync", "rename"]


def test_two_hosts_with_one_pid_write_one_record(tmp_path, monkeypatch):
    rename, renamed = Path.rename, []

    def overtaken(self, target):
        renamed.append(self.name)
        if len(renamed) == 1:
            monkeypatch.setattr(records.socket, "gethostname", lambda: "second")
            records.write(target, {"by": 2})
        return rename(self, target)

    monkeypatch.setattr(records.socket, "gethostname", lambda: "first")
    monkeypatch.setattr(Path, "rename", overtaken)
    records.write(tmp_path / "a.json", {"by": 1})
    assert records.read(tmp_path / "a.json") == {"by": 1}


@pytest.mark.parametrize("text", ["", '{"state": "FAI', "\0\0\0"])
def test_damaged_record_is_none(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert records.read(tmp_path / "a.json") is None


def test_record_replaced_while_it_is_read_over_nfs_is_read_again(tmp_path, monkeypatch):
    records.write(tmp_path / "a.json", {"by": 1})
    read_text, reads = Path.read_text, []

    def stale(self):
        reads.append(self)
        if len(reads) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_text(self)

    monkeypatch.setattr(Path, "read_text", stale)
    assert records.read(tmp_path / "a.json") == {"by": 1}


def test_id_of_a_job_whose_submitter_died_before_recording_it(tmp_path):
    assert records.submitted_ids(tmp_path) == []
    (tmp_path / "0123456789abcdef.pkl").touch()  # sbatch was not done: this job never runs
    assert records.submitted_ids(tmp_path) == []
    (tmp_path / "4711_0_submitted.pkl").touch()
    (tmp_path / "4711_1_submitted.pkl").touch()
    assert records.submitted_ids(tmp_path) == ["4711"]


JOB = {
    "step": 3,
    "stages": ["advantage", "update"],
    "job_id": "9",
    "claimed": 99.0,
    "submitted": 100.0,
    "elements": 1,
    "gpus": 8,
}


def node(restart, **more):
    given = {"restart": restart, "element": None, "hosts": ["n1", "n2"], "state": "RUNNING"}
    return {**given, **more}


def test_accounting_adds_up_all_starts(tmp_path):
    records.write(tmp_path / records.JOB, JOB)
    records.write(tmp_path / "node-0.json", node(0, started=110.0, ended=120.0, state="STOPPED"))
    done = node(1, started=150.0, ended=180.0, state="COMPLETED", hosts=["n3", "n2"])
    records.write(tmp_path / "node-1.json", done)
    row = records.accounting(tmp_path)
    assert row == JOB | {
        "started": 110.0,
        "ended": 180.0,
        "queue_s": 10.0,
        "run_s": 40.0,
        "gpu_s": 320.0,
        "restarts": 1,
        "hosts": ["n1", "n2", "n3"],
        "state": "COMPLETED",
        "reason": "",
    }


def test_job_that_never_started_waited_until_it_was_given_up(tmp_path):
    assert records.accounting(tmp_path) is None
    records.write(tmp_path / records.JOB, JOB)
    outcome = {"state": "CANCELLED", "reason": "it was cancelled", "seen": 160.0}
    records.write(tmp_path / records.OUTCOME, outcome)
    row = records.accounting(tmp_path)
    assert row is not None
    assert (row["queue_s"], row["run_s"], row["state"]) == (60.0, 0, "CANCELLED")


def test_what_a_job_cost_that_was_given_up_stands_in_its_outcome(tmp_path):
    records.write(tmp_path / records.JOB, JOB)
    ran = node(0, started=110.0, ended=120.0, state="FAILED")
    records.write(tmp_path / "node-0.json", ran)
    records.give_up(tmp_path, "FAILED", "it failed")
    outcome = records.read(tmp_path / records.OUTCOME)
    assert outcome is not None
    assert 0 <= time.time() - outcome.pop("seen") < 60
    assert outcome == {
        "state": "FAILED", "reason": "it failed", "queue_s": 10.0, "run_s": 10.0, "gpu_s": 80.0,
        "restarts": 0,
    }  # fmt: skip
    (tmp_path / "never").mkdir()
    records.give_up(tmp_path / "never", "REFUSED", "invalid partition")
    row = records.read(tmp_path / "never" / records.OUTCOME)
    assert row is not None and "gpu_s" not in row


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["COMPLETED", "COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "FAILED", "RUNNING"], "FAILED"),
        ([], "PENDING"),
    ],
)
def test_state_of_an_array(tmp_path, states, expected):
    records.write(tmp_path / records.JOB, {**JOB, "elements": 3})
    for place, state in enumerate(states):
        record = node(0, element=place, started=1.0, ended=2.0, state=state)
        records.write(tmp_path / f"node-0.{place}.json", record)
    row = records.accounting(tmp_path)
    assert row is not None
    assert row["state"] == expected


def test_last_start_of_each_element_decides(tmp_path):
    records.write(tmp_path / records.JOB, JOB)
    records.write(tmp_path / "node-0.json", node(0, started=1.0, ended=2.0, state="FAILED"))
    done = node(1, started=3.0, ended=4.0, state="COMPLETED")
    records.write(tmp_path / "node-1.json", done)
    assert records.last_starts(tmp_path) == [done]
    row = records.accounting(tmp_path)
    assert row is not None
    assert row["state"] == "COMPLETED"


def test_settling_leaves_one_file_with_the_log_in_it(tmp_path):
    records.write(tmp_path / records.JOB, JOB)
    records.write(tmp_path / records.CLAIM, {})
    done = node(0, started=1.0, ended=2.0, state="COMPLETED")
    records.write(tmp_path / "node-0.json", done)
    (tmp_path / "9_submitted.pkl").touch()
    (tmp_path / "job.log").write_text("first\nlast\n")
    assert records.settle(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["job.json"]
    row = json.loads((tmp_path / "job.json").read_text())
    assert (row["log"], row["run_s"]) == (["first", "last"], 1.0)
    assert records.accounting(tmp_path) == row


def test_settled_by_two_at_once_it_keeps_its_log(tmp_path, monkeypatch):
    """The faster one packs the folder when the slower one is about to read the log."""
    records.write(tmp_path / records.JOB, JOB)
    done = node(0, started=1.0, ended=2.0, state="COMPLETED")
    records.write(tmp_path / "node-0.json", done)
    (tmp_path / "job.log").write_text("first\nlast\n")
    read_text, faster = Path.read_text, []

    def overtaken(self, **how):
        if self.name == "job.log" and not faster:
            faster.append("began")
            faster.append(records.settle(tmp_path))
        return read_text(self, **how)

    monkeypatch.setattr(Path, "read_text", overtaken)
    assert records.settle(tmp_path)
    assert faster == ["began", True]
    assert records.settle(tmp_path)  # and again, when all is packed
    assert [p.name for p in tmp_path.iterdir()] == ["job.json"]
    row = records.accounting(tmp_path)
    assert row is not None
    assert row["log"] == ["first", "last"]


def test_job_that_may_still_write_or_failed_keeps_its_files(tmp_path):
    records.write(tmp_path / records.JOB, JOB)
    fresh = node(0, started=1.0, ended=time.time(), state="COMPLETED")
    records.write(tmp_path / "node-0.json", fresh)
    assert not records.settle(tmp_path)
    records.write(tmp_path / "node-0.json", {**fresh, "ended": 2.0, "state": "FAILED"})
    assert not records.settle(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_attempts_are_found_by_any_of_their_stages(tmp_path):
    for name, stages in (("000003-advantage-1", ["advantage", "update"]), ("000003-reward-1", [])):
        (tmp_path / name).mkdir()
        record = {"step": 3, "stages": stages, "claimed": 1.0}
        records.write(tmp_path / name / records.CLAIM, record)
    (tmp_path / "000003-update-1").mkdir()  # no record: never claimed by us
    found = attempts(tmp_path, "000003-*", {"step": 3, "stages": ["update", "sft"]})
    assert [p.name for p in found] == ["000003-advantage-1"]
    assert attempts(tmp_path, "0*", {"step": 4, "stages": ["update"]}) == []
