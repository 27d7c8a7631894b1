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
