"""Jobs that are processes of a machine, found by another process, another boot, another host."""

import os

import pytest
from job_lab import DEAD, claimed, meanwhile, reclaimed, recorded

from slurm import records
from slurm.jobs import Job
from slurm.outcome import Phase
from slurm.resources import Resources
from slurm.submit import Order, submit
from tasks import claims


def local(session, number=1, **more):
    return claimed(session, number=number, executor="local", **more)


def test_local_job_whose_recording_was_cut_off_is_waited_for(session, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/target_that_sleeps.py").write_text(
        "import time\ndef run(attempt, stop): time.sleep(60)\n"
    )
    folder = local(session)
    order = Order("local", "r/3/reward", "target_that_sleeps:run", ({}, {}), "job-1", Resources(),
                  code=tmp_path / "code")  # fmt: skip
    sent = submit(folder, order)
    (folder / records.JOB).unlink()
    reclaimed(folder, **DEAD)
    found = claims.obtain(session, 3, "reward")
    assert sorted(found.job_id.split(",")) == sorted(sent.job_id.split(","))
    assert sorted(found.start) == sorted(sent.start)
    assert found.phase(session.watch) is Phase.LIVING
    assert found.cancel()
    for pid in map(int, found.job_id.split(",")):
        os.waitpid(pid, 0)
    assert Job.load(folder).phase(session.watch) is Phase.OVER


def test_local_job_of_another_host_is_neither_replaced_nor_touched(
    session, submitted, sleepers, capsys
):
    processes, told = sleepers
    folder = local(session)
    recorded(folder, **told, host="far-away")
    meanwhile(session, session.stopping.set)
    with pytest.raises(KeyboardInterrupt):
        claims.obtain(session, 3, "reward")
    assert submitted == []
    assert not Job.load(folder).cancel()
    assert [process.poll() for process in processes] == [None, None]
    assert capsys.readouterr().err == (
        f"000003-reward: waiting for job {told['job_id']} on far-away, which cannot be seen from "
        f"here; if it is over, remove {folder}\n"
    )


def test_local_job_of_another_boot_is_over(session, submitted, sleepers):
    processes, told = sleepers
    folder = local(session)
    recorded(folder, **told, boot="before")
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert [process.poll() for process in processes] == [None, None]


def test_unrecorded_local_job_of_another_host_is_left_to_that_host(session):
    folder = local(session)
    (folder / "4242_submitted.pkl").touch()
    reclaimed(folder, host="far-away")
    assert Job.load(folder).elsewhere == "far-away"
    assert records.read(folder / records.JOB) is None
