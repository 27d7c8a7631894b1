"""Waiting for jobs, and leaving them."""

import itertools
import subprocess
import threading
import time

import pytest
from job_lab import claimed, earlier, recorded, started

from relax.flags import load_config
from slurm import jobs as slurm_jobs
from slurm import records
from slurm.errors import JobError
from slurm.jobs import Job, unfinished
from slurm.outcome import Done, Failed, Queued, Requeued, Running
from slurm.watch import Seen
from tasks import cancel, jobs
from tasks.session import Stopped


def test_wait_ends_with_the_manifest(session):
    job = Job.load(earlier(session))
    session.answers["77"] = Seen("RUNNING")
    manifest = object()
    threading.Timer(0.3, lambda: setattr(session.run, "found", manifest)).start()
    assert jobs.wait(session, 3, "reward", job) is manifest
    assert session.served_jobs == [job]


def test_wait_raises_the_traceback_of_the_node_at_once(session):
    folder = earlier(session)
    error = "Traceback (most recent call last):\n  ...\nValueError: of the user"
    failed = {"restart": 0, "element": None, "state": "FAILED", "started": 1.0, "hosts": ["n4"]}
    records.write(folder / "node-0.json", {**failed, "error": error})
    with pytest.raises(JobError) as raised:
        jobs.wait(session, 3, "reward", Job.load(folder))
    first, rest = str(raised.value).split("\n", 1)
    assert first == f"000003-reward: job 77 is FAILED: it failed; all of it in {folder}"
    assert rest == error
    assert records.read(folder / records.OUTCOME)["state"] == "FAILED"


def test_wait_raises_the_end_of_the_log_when_the_node_said_nothing(session):
    folder = earlier(session)
    (folder / "job.log").write_text("one\ntwo\nslurmstepd: error: oom-kill\n")
    session.answers["77"] = Seen("OUT_OF_MEMORY", since=-100.0)
    session.watch.now("77")
    session.watch._seen["77"] = Seen("OUT_OF_MEMORY", since=time.monotonic() - 100)
    with pytest.raises(JobError, match="raise mem_gb of its allocation") as raised:
        jobs.wait(session, 3, "reward", Job.load(folder))
    assert str(raised.value).endswith("one\ntwo\nslurmstepd: error: oom-kill")
    assert session.relayed == ["one", "two", "slurmstepd: error: oom-kill"]


def test_job_that_commits_as_it_ends_is_done(session, monkeypatch):
    """The manifest is looked for after the job's end was seen, not before."""
    folder, order = earlier(session), []
    session.answers["77"] = Seen("COMPLETED")
    monkeypatch.setattr("slurm.outcome.COMMIT_GRACE_S", 0.0)
    session.watch.now("77")
    job, ask = Job.load(folder), session.watch.seen
    monkeypatch.setattr(session.watch, "seen", lambda job_id: order.append("asked") or ask(job_id))
    assert job.outcome(session.watch, lambda: not order.append("looked")) == Done()
    assert order == ["asked", "looked"]
    assert job.outcome(session.watch, lambda: False).state == "COMPLETED"
    started(folder, "FAILED")
    assert job.outcome(session.watch, lambda: True) == Done()
    assert job.outcome(session.watch, lambda: False) == Failed("FAILED", "it failed")


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED"])
def test_what_a_stopped_job_left_goes_out_again(session, monkeypatch, capsys, state):
    """One that could not queue itself again, that is: one that the user cancelled is missed."""
    folder = earlier(session)
    started(folder, "STOPPED")
    session.answers["77"] = Seen(state)
    monkeypatch.setattr("slurm.outcome.COMMIT_GRACE_S", 0.0)
    session.watch.now("77")
    job = Job.load(folder)
    if state == "CANCELLED":
        with pytest.raises(JobError, match="job 77 is CANCELLED: it was cancelled"):
            jobs.wait(session, 3, "reward", job)
        return
    assert jobs.wait(session, 3, "reward", job) is None
    said = "000003-reward: job 77 was stopped: what it left goes out again\n"
    assert capsys.readouterr().err == said
    assert records.accounting(folder)["state"] == "STOPPED"


class Clock:
    """A clock that goes on by sleeping alone."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_looks_grow_rarer_with_the_time_waited(session, monkeypatch):
    """At once for minutes, every two seconds after half an hour: a shared file system is spared."""
    clock, looks, found = Clock(), [], object()
    monkeypatch.setattr(jobs, "time", clock)
    monkeypatch.setattr(jobs, "_checked", lambda *_: Running())

    def manifest(step, stage):
        looks.append(clock.now - 1000.0)
        return found if looks[-1] > 3600 else None

    monkeypatch.setattr(session.run, "manifest", manifest)
    assert jobs.wait(session, 3, "reward", Job.load(earlier(session))) is found
    gaps = [(one, other - one) for one, other in itertools.pairwise(looks)]
    assert max(gap for at, gap in gaps if at < 180) <= 0.2
    assert max(gap / max(at, 150) for at, gap in gaps) <= 0.0011
    assert {round(gap, 1) for at, gap in gaps if at > 2100} == {2.0}
    assert len(looks) < 5000


def test_a_wish_to_stop_is_not_slept_over(session, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(jobs, "time", clock)
    monkeypatch.setattr(clock, "sleep", lambda s: session.stopping.set() or Clock.sleep(clock, s))
    jobs._pause(session, 2.0)
    assert clock.now == 1000.0 + jobs.SOON_S


def test_why_a_job_does_not_run_is_told_once(session, monkeypatch, capsys):
    clock, job = Clock(), Job.load(earlier(session))
    monkeypatch.setattr(jobs, "time", clock)
    seen = [Queued(), *[Queued("Priority")] * 3, Queued("Resources"), Running()]
    seen += [Requeued("BeginTime"), Requeued("BeginTime"), Requeued()]

    def checked(*_):
        if len(seen) == 1:
            session.run.found = object()
        return seen.pop(0)

    monkeypatch.setattr(jobs, "_checked", checked)
    jobs.wait(session, 3, "reward", job)
    assert capsys.readouterr().err.splitlines() == [
        "000003-reward: its job 77 is queued (Priority); waiting",
        "000003-reward: its job 77 is queued (Resources); waiting",
        "000003-reward: its job 77 was requeued (BeginTime); waiting",
        "000003-reward: its job 77 was requeued; waiting",
    ]


@pytest.fixture
def scancel(monkeypatch):
    """What was asked of the cluster; it answers as long as `answers` is not emptied."""
    asked, answers = [], [subprocess.CompletedProcess([], 0, "", "")]
    monkeypatch.setattr(
        slurm_jobs, "run_command", lambda words: asked.append(words) or (answers or [None])[0]
    )
    return asked, answers


@pytest.mark.parametrize(
    ("detach", "answered", "words"),
    [
        (False, True, "stopped, job 77 cancelled; run the same command to continue"),
        (False, False, "stopped, but job 77 may go on: scancel failed or was not answered"),
        (True, True, "stopped; job 77 goes on, run the same command to wait for it"),
    ],
)
def test_stop_cancels_the_job_unless_detached(session, scancel, detach, answered, words):
    folder, (asked, answers) = earlier(session), scancel
    del answers[int(answered) :]
    session.config = load_config(None, {"placement": "job", "detach": detach})
    session.stopping.set()
    with pytest.raises(Stopped, match=words):
        jobs.wait(session, 3, "reward", Job.load(folder))
    assert asked == ([] if detach else [["scancel", "77"]])
    given_up = records.read(folder / records.OUTCOME)
    assert (given_up is None) is detach


def test_directory_without_a_manifest_is_no_result(session):
    folder, stage = earlier(session), session.run.root / "steps/000003/reward"
    stage.mkdir(parents=True)
    started(folder, "FAILED", error="in the way of a commit")
    with pytest.raises(JobError, match="in the way of a commit"):
        jobs.wait(session, 3, "reward", Job.load(folder))


def test_failure_before_a_restart_counts_no_more(session):
    folder = earlier(session)
    session.answers["77"] = Seen("RUNNING")
    started(folder, "FAILED", error="a node was lost")
    started(folder, "RUNNING", restart=1)
    (folder / "job.log").write_text("going on\n")
    job = Job.load(folder)
    assert job.outcome(session.watch, lambda: False) == Running()
    assert job.last_words() == "going on"


def test_pending_from_before_a_jobs_start_is_no_requeue(session):
    """The cluster is asked now and then; the job's own records are looked at more often."""
    folder = earlier(session)
    job = Job.load(folder)
    session.answers["77"] = Seen("PENDING")
    session.watch.now("77")
    begun = {"restart": 0, "element": None, "state": "RUNNING", "hosts": []}
    records.write(folder / "node-0.json", {**begun, "started": time.time() + 1})
    assert job.outcome(session.watch, lambda: False) == Queued()
    records.write(folder / "node-0.json", {**begun, "started": time.time() - 60})
    assert job.outcome(session.watch, lambda: False) == Requeued()


def test_cancelling_goes_on_where_a_process_has_just_ended(session, sleepers, monkeypatch):
    processes, told = sleepers
    job, look = recorded(claimed(session, executor="local"), **told), Job._processes

    def look_and_one_ends(self):
        pids = look(self)
        processes[0].kill()
        processes[0].wait()
        return pids

    monkeypatch.setattr(Job, "_processes", look_and_one_ends)
    assert job.cancel()
    assert [process.wait() for process in processes] == [-9, -9]


def test_array_of_which_one_element_failed_is_cancelled(session, sleepers):
    processes, told = sleepers
    folder = claimed(session, executor="local", elements=2)
    recorded(folder, **told)
    started(folder, "FAILED", element=0)
    started(folder, "RUNNING", element=1)
    assert cancel.cancel_jobs(str(session.run.root)) == [folder.name]
    assert [process.wait() for process in processes] == [-9, -9]
    assert unfinished(session.jobs) == []


def test_job_that_was_given_up_and_goes_on_is_cancelled(session, sleepers):
    folder = claimed(session, executor="local")
    recorded(folder, **sleepers[1])
    records.give_up(folder, "CANCELLED", "the flow was stopped")
    assert cancel.cancel_jobs(str(session.run.root)) == [folder.name]


def test_submission_in_progress_is_waited_for_and_cancelled(session, sleepers, monkeypatch):
    folder = claimed(session, executor="local")
    monkeypatch.setattr(cancel.time, "sleep", lambda _: recorded(folder, **sleepers[1]))
    assert cancel.cancel_jobs(str(session.run.root)) == [folder.name]
    assert [process.wait() for process in sleepers[0]] == [-9, -9]


def test_cancellation_that_nobody_answered_is_not_claimed(session, scancel, monkeypatch, capsys):
    folder = earlier(session)
    scancel[1].clear()
    monkeypatch.setattr("slurm.watch.run_command", lambda _: None)
    assert cancel.cancel_jobs(str(session.run.root)) == []
    assert records.read(folder / records.OUTCOME)["state"] == "CANCELLED"
    assert capsys.readouterr().err == (
        "000003-reward-1: job 77 may go on: scancel failed or was not answered; repeat it, or "
        "start the run again, which does\n"
    )


def test_job_that_did_its_work_is_not_called_cancelled(session, sleepers):
    folder = claimed(session, executor="local")
    recorded(folder, **sleepers[1])
    started(folder, "COMPLETED")
    assert cancel.cancel_jobs(str(session.run.root)) == [folder.name]
    assert records.accounting(folder)["state"] == "COMPLETED"


def test_submission_that_takes_long_is_told(session, monkeypatch, capsys):
    folder, mine = claimed(session), records.identity()
    monkeypatch.setattr(cancel, "SUBMITTING_S", 0.0)
    assert cancel.cancel_jobs(str(session.run.root)) == []
    assert capsys.readouterr().err == (
        f"{folder.name}: process {mine['pid']} on {mine['host']} may yet submit its job; "
        "end that process, or cancel again\n"
    )
