"""Finding, claiming and waiting for jobs, with local processes in the place of a cluster."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest

from relax.flags import load_config
from slurm import records
from slurm.errors import JobError
from slurm.resources import Resources
from slurm.submit import Order, submit
from slurm.watch import Seen, Watch
from tasks import jobs
from tasks.session import Stopped


class Store:
    """Of a run, what waiting needs: a manifest that appears."""

    def __init__(self, root):
        self.root, self.found = root, None

    def manifest(self, step, stage):
        return self.found


@pytest.fixture
def session(tmp_path):
    answers = {}
    made = SimpleNamespace(
        config=load_config(None, {"placement": "job", "executor": "slurm"}),
        run=Store(tmp_path),
        jobs=tmp_path / "jobs",
        code=tmp_path / "code",
        plan={},
        making=set(),
        lease=SimpleNamespace(check=lambda: None),
        relayed=[],
        stopping=threading.Event(),
        answers=answers,
        watch=Watch(
            lambda ids: {i: answers.get(i, Seen("UNKNOWN")) for i in ids} if answers else None
        ),
        served_jobs=[],
    )
    made.served = made.served_jobs.append
    made.relay = made.relayed.append
    made.jobs.mkdir()
    return made


@pytest.fixture
def submitted(session, monkeypatch):
    """What would have been submitted; each gets the next job id."""
    orders = []

    def submit(folder, order):
        orders.append(order)
        job_id = str(100 + len(orders))
        session.answers[job_id] = Seen("RUNNING")
        return recorded(folder, job_id)

    monkeypatch.setattr(jobs, "submit", submit)
    return orders


def recorded(folder, job_id):
    claim = records.read(folder / records.CLAIM) or {}
    told = {"executor": "slurm", "job_id": job_id, "start": None, "claimed": claim["claimed"]}
    told |= {"step": 3, "stages": ["reward"], "submitted": time.time(), "elements": 1, "gpus": 0}
    records.write(folder / records.JOB, told)
    return jobs.Job.load(folder)


def earlier(session, number=1, job_id="77"):
    folder = session.jobs / f"000003-reward-{number}"
    records.claim(folder, {"step": 3, "stages": ["reward"]})
    if job_id:
        recorded(folder, job_id)
    return folder


def names(session):
    return sorted(p.name for p in session.jobs.iterdir())


def test_first_submission_is_attempt_one(session, submitted):
    session.answers["-"] = Seen("UNKNOWN")
    assert jobs.obtain(session, 3, "reward").job_id == "101"
    assert names(session) == ["000003-reward-1"]
    assert session.making == {(3, "reward")}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "NODE_FAIL"])
def test_job_that_may_still_run_is_waited_for(session, submitted, state):
    earlier(session)
    session.answers["77"] = Seen(state)
    assert jobs.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"])
def test_after_a_job_that_is_over_comes_the_next_attempt(session, submitted, state):
    earlier(session)
    session.answers["77"] = Seen(state)
    assert jobs.obtain(session, 3, "reward").job_id == "101"
    assert names(session) == ["000003-reward-1", "000003-reward-2"]


def test_nothing_is_submitted_while_the_cluster_does_not_answer(session, submitted):
    earlier(session)
    timer = threading.Timer(0.5, lambda: session.answers.update({"77": Seen("PENDING")}))
    timer.start()
    assert jobs.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


def test_claim_of_a_living_process_is_waited_for(session, submitted):
    folder = earlier(session, job_id="")
    session.answers["88"] = Seen("RUNNING")
    threading.Timer(0.4, lambda: recorded(folder, "88")).start()
    assert jobs.obtain(session, 3, "reward").job_id == "88"
    assert submitted == []


def test_claim_of_a_dead_process_is_passed_over(session, submitted):
    folder = earlier(session, job_id="")
    claim = json.loads((folder / records.CLAIM).read_text())
    records.write(folder / records.CLAIM, {**claim, "start": 1})
    session.answers["-"] = Seen("UNKNOWN")
    assert jobs.obtain(session, 3, "reward").job_id == "101"
    assert names(session)[-1] == "000003-reward-2"


def test_submission_whose_recording_was_cut_off_is_found_by_submitits_file(session, submitted):
    folder = earlier(session, job_id="")
    (folder / "55_submitted.pkl").touch()
    session.answers["55"] = Seen("PENDING")
    assert jobs.obtain(session, 3, "reward").job_id == "55"


def test_claim_between_the_look_and_ones_own_is_not_stepped_over(session, submitted, monkeypatch):
    look, looks = jobs._living, []

    def look_and_be_overtaken(*of):
        seen = look(*of)
        if not looks:
            earlier(session)
        looks.append(seen)
        return seen

    session.answers["77"] = Seen("PENDING")
    monkeypatch.setattr(jobs, "_living", look_and_be_overtaken)
    assert jobs.obtain(session, 3, "reward").job_id == "77"
    assert looks[0] == (None, "")
    assert names(session) == ["000003-reward-1"]
    assert submitted == []


def test_job_recorded_by_a_claimant_that_then_leaves_is_seen(session, submitted, monkeypatch):
    folder = earlier(session, job_id="")

    def submit_and_leave(claim):
        recorded(folder, "77")
        return False

    session.answers["77"] = Seen("PENDING")
    monkeypatch.setattr(records, "claimant_alive", submit_and_leave)
    assert jobs.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


def test_local_job_whose_recording_was_cut_off_is_waited_for(session, tmp_path):
    session.config = load_config(None, {"placement": "job", "executor": "local"})
    (tmp_path / "code").mkdir()
    (tmp_path / "code/target_that_sleeps.py").write_text(
        "import time\ndef run(attempt, stop): time.sleep(60)\n"
    )
    folder = session.jobs / "000003-reward-1"
    records.claim(folder, {"step": 3, "stages": ["reward"], "executor": "local"})
    order = Order("local", "r/3/reward", "target_that_sleeps:run", ({}, {}), "job-1", Resources(),
                  code=tmp_path / "code")  # fmt: skip
    sent = submit(folder, order)
    (folder / records.JOB).unlink()
    claim = json.loads((folder / records.CLAIM).read_text())
    records.write(folder / records.CLAIM, {**claim, "start": 1})
    found = jobs.obtain(session, 3, "reward")
    assert sorted(found.job_id.split(",")) == sorted(sent.job_id.split(","))
    assert sorted(found.start) == sorted(sent.start)
    assert found.alive(session.watch)
    found.cancel()
    deadline = time.monotonic() + 20
    while found.alive(session.watch) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not jobs.Job.load(folder).alive(session.watch)


def test_failed_job_that_lingers_on_its_nodes_is_not_waited_for_again(session, submitted):
    folder = earlier(session)
    failed = {"restart": 0, "element": None, "state": "FAILED", "started": 1.0, "hosts": []}
    records.write(folder / "node-0.json", failed)
    session.answers["77"] = Seen("COMPLETING")
    timer = threading.Timer(0.4, lambda: session.answers.update({"77": Seen("FAILED")}))
    timer.start()
    assert jobs.obtain(session, 3, "reward").job_id == "101"


def test_committed_meanwhile_needs_no_job(session, submitted):
    session.run.found = object()
    assert jobs.obtain(session, 3, "reward") is None
    assert submitted == []


def test_wait_ends_with_the_manifest(session):
    job = jobs.Job.load(earlier(session))
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
        jobs.wait(session, 3, "reward", jobs.Job.load(folder))
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
        jobs.wait(session, 3, "reward", jobs.Job.load(folder))
    assert str(raised.value).endswith("one\ntwo\nslurmstepd: error: oom-kill")
    assert session.relayed == ["one", "two", "slurmstepd: error: oom-kill"]


@pytest.mark.parametrize(("detach", "cancelled"), [(False, ["77"]), (True, [])])
def test_stop_cancels_the_job_unless_detached(session, monkeypatch, detach, cancelled):
    job, seen = jobs.Job.load(earlier(session)), []
    monkeypatch.setattr(jobs.Job, "cancel", lambda self: seen.append(self.job_id))
    session.config = load_config(None, {"placement": "job", "detach": detach})
    session.stopping.set()
    with pytest.raises(Stopped):
        jobs.wait(session, 3, "reward", job)
    assert seen == cancelled


def test_refused_submission_is_an_attempt_that_is_over(session, monkeypatch):
    def refuse(folder, order):
        raise JobError("sbatch refused")

    monkeypatch.setattr(jobs, "submit", refuse)
    with pytest.raises(JobError, match="sbatch refused"):
        jobs.obtain(session, 3, "reward")
    outcome = records.read(session.jobs / "000003-reward-1" / records.OUTCOME)
    assert outcome["state"] == "REFUSED"
    assert session.making == set()
    claim = records.read(session.jobs / "000003-reward-1" / records.CLAIM)
    assert claim["pid"] == os.getpid()
