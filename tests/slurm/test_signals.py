"""The wish to stop reaches a job's ranks, and ends nothing that they started."""

import os
import signal
import subprocess
import sys
from subprocess import TimeoutExpired

import pytest

from slurm import entry
from slurm.ranks import Place

RANK = """
import subprocess, sys, time
from slurm import signals

signals.listen()
child = subprocess.Popen(["sleep", "100"])
print("ready", flush=True)
while not signals.asked():
    time.sleep(0.01)
time.sleep(0.2)
print("child", child.poll(), flush=True)
time.sleep(100)
"""


def test_usr2_to_every_process_of_a_job_ends_none():
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert rank.stdout.readline() == "ready\n"
        os.killpg(rank.pid, signal.SIGUSR2)
        said = [rank.stdout.readline() for _ in range(2)]
        assert said == ["asked to stop: the rest is left at the next boundary\n", "child None\n"]
        os.killpg(rank.pid, signal.SIGUSR2)  # again: said again, and nothing ends
        assert rank.stdout.readline().startswith("asked to stop")
        rank.terminate()
        assert rank.wait(timeout=30) == -signal.SIGTERM
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


@pytest.mark.parametrize("fault", [FileNotFoundError("scontrol"), TimeoutExpired("scontrol", 60)])
def test_a_job_that_cannot_be_queued_again_ends_in_peace(monkeypatch, capsys, fault):
    def absent(words, **_):
        raise fault

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(entry.subprocess, "run", absent)
    entry.requeue(Place(0, 2, 0, 2, ("n1",), "7", 0))
    assert capsys.readouterr().out.startswith("scontrol requeue 7: ")
    entry.requeue(Place(1, 2, 1, 2, ("n1",), "7", 0))
    assert capsys.readouterr().out == ""


def test_a_half_result_of_an_earlier_start_is_no_hindrance(tmp_path, monkeypatch):
    """The job was queued again while submitit wrote: rank 1's file goes, that of another stays."""
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    for name, value in {**job, "SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_FOLDER": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    for rank in (0, 1):
        (tmp_path / f"7_{rank}_result.pkl.save_tmp").write_bytes(b"half")
    entry.forget_half_result()
    assert [path.name for path in tmp_path.iterdir()] == ["7_0_result.pkl.save_tmp"]
    entry.forget_half_result()
