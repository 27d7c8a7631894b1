"""Finding and claiming jobs: of an attempt that is not over there is never a second one."""

import os
import subprocess

import pytest
from job_lab import (
    DEAD,
    FACTS,
    claimed,
    earlier,
    meanwhile,
    names,
    reclaimed,
    recorded,
    session_in,
    started,
)

from relax.flags import load_config
from slurm import jobs as slurm_jobs
from slurm import outcome, records
from slurm.errors import JobError
from slurm.watch import Seen
from tasks import claims
from tasks.jobs import wait


def test_first_submission_is_attempt_one(session, submitted):
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert names(session) == ["000003-reward-1"]
    assert session.making == {(3, "reward")}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED"])
def test_job_that_may_still_run_is_waited_for(session, submitted, state):
    earlier(session)
    session.answers["77"] = Seen(state)
    assert claims.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"])
def test_after_a_job_that_is_over_comes_the_next_attempt(session, submitted, state):
    earlier(session)
    session.answers["77"] = Seen(state)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert names(session) == ["000003-reward-1", "000003-reward-2"]


@pytest.mark.parametrize("state", ["UNKNOWN", "NODE_FAIL", "PREEMPTED"])
def test_job_that_is_perhaps_over_is_replaced_once_it_is(
    session, submitted, monkeypatch, capsys, state
):
    earlier(session)
    session.answers["77"] = Seen(state)

    def grace_ends():
        monkeypatch.setattr(outcome, "UNKNOWN_GRACE_S", 0.0)
        monkeypatch.setattr(outcome, "REQUEUE_GRACE_S", 0.0)

    left = meanwhile(session, lambda: None, grace_ends)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert left == []
    said = "000003-reward: waiting for the cluster to say whether job 77 is over\n"
    assert capsys.readouterr().err == said


def test_job_that_is_perhaps_over_and_comes_back_is_waited_for(session, submitted):
    earlier(session)
    session.answers["77"] = Seen("NODE_FAIL")
    meanwhile(session, lambda: session.answers.update({"77": Seen("PENDING")}))
    assert claims.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


def test_records_of_other_steps_are_not_opened(session, submitted, monkeypatch):
    """Of a long run's folders the names alone are read: looking costs the same at every step."""
    for step in range(20):
        folder = session.jobs / f"{step:06d}-reward-1"
        assert records.claim(folder, {**FACTS, "step": step, "stages": ["reward"]})
        recorded(folder, str(step))
    session.answers["3"] = Seen("FAILED")
    read, opened = records.read, []
    monkeypatch.setattr(records, "read", lambda path: opened.append(path) or read(path))
    assert claims.obtain(session, 3, "reward").job_id == "101"
    names = {path.parent.name for path in opened if path.parent.parent == session.jobs}
    assert names == {"000003-reward-1", "000003-reward-2"}
    assert len(opened) < 20


def test_forgotten_attempts_do_not_hide_the_living_one(session, submitted):
    earlier(session, 1, "71")
    earlier(session, 2, "72")
    earlier(session, 3, "73")
    session.answers["73"] = Seen("RUNNING")
    meanwhile(session)
    assert claims.obtain(session, 3, "reward").job_id == "73"


def test_attempt_that_was_given_up_and_then_forgotten_is_over(session, submitted):
    records.give_up(earlier(session), "FAILED", "it failed")
    session.answers["-"] = Seen("UNKNOWN")
    meanwhile(session)
    assert claims.obtain(session, 3, "reward").job_id == "101"


def test_nothing_is_submitted_while_the_cluster_does_not_answer(session, submitted):
    earlier(session)
    meanwhile(session, lambda: None, lambda: session.answers.update({"77": Seen("PENDING")}))
    assert claims.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


def test_claim_of_a_living_process_is_waited_for(session, submitted, capsys):
    folder = claimed(session)
    session.answers["88"] = Seen("RUNNING")
    meanwhile(session, lambda: recorded(folder, "88"))
    assert claims.obtain(session, 3, "reward").job_id == "88"
    assert submitted == []
    mine = records.identity()
    said = f"000003-reward: waiting for process {mine['pid']} on {mine['host']} to submit it\n"
    assert capsys.readouterr().err.startswith(said)


def test_array_that_is_half_submitted_is_waited_for(session, submitted):
    folder = claimed(session, executor="local", elements=2)
    (folder / "4242_submitted.pkl").touch()
    started(folder, "FAILED", element=0)  # the first is over before the second is out

    def submit_the_second():
        assert records.read(folder / records.JOB) is None
        recorded(folder, "4242,4243", start=[0, 0])

    left = meanwhile(session, submit_the_second)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert left == []


def test_claim_of_a_dead_process_is_passed_over(session, submitted):
    reclaimed(claimed(session), **DEAD)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert names(session)[-1] == "000003-reward-2"


@pytest.mark.parametrize("damaged", ["claim.json", "job.json", "node-0.json"])
def test_damaged_record_stops_no_later_start(session, submitted, damaged):
    folder = earlier(session)
    reclaimed(folder, **DEAD)
    (folder / damaged).write_text("")
    session.answers["77"] = Seen("FAILED")
    meanwhile(session)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert names(session) == ["000003-reward-1", "000003-reward-2"]


def test_submission_whose_recording_was_cut_off_is_found_by_submitits_file(session, submitted):
    folder = claimed(session, shares=[[0, 2], [1]], elements=2)
    reclaimed(folder, **DEAD)
    (folder / "55_0_submitted.pkl").touch()
    session.answers["55"] = Seen("PENDING")
    assert claims.obtain(session, 3, "reward").job_id == "55"
    record = records.read(folder / records.JOB)
    assert (record["job_id"], record["shares"]) == ("55", [[0, 2], [1]])


def test_array_whose_recording_was_cut_off_is_packed(session, submitted):
    folder = claimed(session, elements=2)
    reclaimed(folder, **DEAD)
    (folder / "55_0_submitted.pkl").touch()
    session.answers["55"] = Seen("RUNNING")
    claims.obtain(session, 3, "reward")
    started(folder, "COMPLETED", element=0)
    started(folder, "COMPLETED", element=1)
    assert records.settle(folder)
    meanwhile(session)
    session.run.found = None
    assert claims.obtain(session, 3, "reward").job_id == "101"  # a packed attempt is over


def test_claim_says_all_that_the_record_of_the_job_will(session, submitted, monkeypatch):
    made = {"rollout_array": 2, "rollout_shard_groups": 1, "rollout_batch_size": 4}
    session.config = load_config(None, {"placement": "job", "executor": "slurm", **made})
    monkeypatch.setattr(claims, "finished_shards", lambda *_: {1})
    folder = claims.obtain(session, 3, "rollout").folder
    claim = records.read(folder / records.CLAIM)
    assert claim["shares"] == [[0, 2], [3]]
    assert {name: claim[name] for name in submitted[0].facts} == submitted[0].facts


def overtake(monkeypatch, happens):
    """Let something happen between a flow's first look and its claim."""
    look, looks = claims._looked, []

    def look_and_be_overtaken(*of):
        seen = look(*of)
        looks.append(seen)
        if len(looks) == 1:
            happens()
        return seen

    monkeypatch.setattr(claims, "_looked", look_and_be_overtaken)
    return looks


def test_claim_between_the_look_and_ones_own_is_not_stepped_over(session, submitted, monkeypatch):
    session.answers["77"] = Seen("PENDING")
    looks = overtake(monkeypatch, lambda: earlier(session))
    meanwhile(session, lambda: None)
    assert claims.obtain(session, 3, "reward").job_id == "77"
    assert looks[0] == []
    assert names(session) == ["000003-reward-1"]
    assert submitted == []


@pytest.fixture
def of_two_gangs(session, monkeypatch):
    """Flows that disagree on which stages share a job with the reward."""
    monkeypatch.setattr(
        claims, "_gang", lambda s, *_: ("reward",) if s is session else ("score", "reward")
    )


def test_of_two_gangs_one_job_is_submitted(session, submitted, of_two_gangs, monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    other = session_in(tmp_path / "other")
    other.jobs, other.answers, other.watch = session.jobs, session.answers, session.watch
    overtake(monkeypatch, lambda: claims.obtain(other, 3, "reward"))
    meanwhile(session, lambda: None)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert len(submitted) == 1
    yielded = records.read(session.jobs / "000003-reward-1" / records.OUTCOME)
    assert yielded["state"] == "YIELDED"


def claimed_at_the_same_time(session, monkeypatch):
    """The younger claim, of another gang, once it is made: in the look of the older one."""
    younger = []

    def claim():
        younger.append(claimed(session, "score", stages=["score", "reward"]))
        reclaimed(younger[0], claimed=4e9)

    overtake(monkeypatch, claim)
    return younger


def test_older_claim_goes_first_once_the_younger_has_yielded(
    session, submitted, of_two_gangs, monkeypatch
):
    younger = claimed_at_the_same_time(session, monkeypatch)
    meanwhile(session, lambda: records.give_up(younger[0], "YIELDED", ""))
    assert claims.obtain(session, 3, "reward").folder.name == "000003-reward-1"


def test_older_claim_yields_to_the_younger_that_did_not_see_it(
    session, submitted, of_two_gangs, monkeypatch
):
    session.answers["88"] = Seen("PENDING")
    younger = claimed_at_the_same_time(session, monkeypatch)
    meanwhile(session, lambda: recorded(younger[0], "88"), lambda: None)
    assert claims.obtain(session, 3, "reward").job_id == "88"
    assert submitted == []


def test_job_recorded_by_a_claimant_that_then_leaves_is_seen(session, submitted, monkeypatch):
    folder = claimed(session)

    def submit_and_leave(*claim):
        recorded(folder, "77")
        return False

    session.answers["77"] = Seen("PENDING")
    monkeypatch.setattr(records, "claimant_alive", submit_and_leave)
    assert claims.obtain(session, 3, "reward").job_id == "77"
    assert submitted == []


def test_failed_job_that_lingers_on_its_nodes_is_not_waited_for_again(session, submitted, capsys):
    started(earlier(session), "FAILED")
    session.answers["77"] = Seen("COMPLETING")
    meanwhile(session, lambda: session.answers.update({"77": Seen("FAILED")}))
    assert claims.obtain(session, 3, "reward").job_id == "101"
    said = "000003-reward: waiting for job 77, which is FAILED, to leave its nodes\n"
    assert capsys.readouterr().err == said


def test_cancelled_job_that_goes_on_is_cancelled_until_the_cluster_answers(
    session, submitted, monkeypatch
):
    records.give_up(earlier(session), "CANCELLED", "the flow was stopped")
    session.answers["77"] = Seen("RUNNING")
    done = subprocess.CompletedProcess([], 0, "", "")
    answers, asked = [None, done], []
    monkeypatch.setattr(
        slurm_jobs, "run_command", lambda words: asked.append(words) or answers.pop(0)
    )
    over = lambda: session.answers.update({"77": Seen("CANCELLED")})  # noqa: E731
    meanwhile(session, lambda: None, lambda: None, over)
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert asked == [["scancel", "77"]] * 2


def test_committed_meanwhile_needs_no_job(session, submitted):
    session.run.found = object()
    assert claims.obtain(session, 3, "reward") is None
    assert submitted == []


def test_refused_submission_is_over_also_for_its_own_process(session, monkeypatch):
    def refuse(folder, order):
        raise JobError("sbatch refused")

    monkeypatch.setattr(claims, "submit", refuse)
    meanwhile(session)
    for number in (1, 2):
        with pytest.raises(JobError, match="sbatch refused"):
            claims.obtain(session, 3, "reward")
        folder = session.jobs / f"000003-reward-{number}"
        assert records.read(folder / records.OUTCOME)["state"] == "REFUSED"
        assert records.read(folder / records.CLAIM)["pid"] == os.getpid()
    assert session.making == set()


def test_submission_that_broke_off_leaves_nothing_running(session, monkeypatch):
    asked = []
    monkeypatch.setattr(slurm_jobs, "run_command", asked.append)

    def break_off(folder, order):
        (folder / "55_0_submitted.pkl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(claims, "submit", break_off)
    with pytest.raises(KeyboardInterrupt):
        claims.obtain(session, 3, "reward")
    assert asked == [["scancel", "55"]]
    given_up = records.read(session.jobs / "000003-reward-1" / records.OUTCOME)
    assert (given_up["state"], given_up["reason"]) == ("FAILED", "KeyboardInterrupt")


def test_shards_of_an_array_whose_recording_was_cut_off_go_out_again(
    session, submitted, monkeypatch
):
    folder = claimed(session, "rollout", elements=2, shares=[[0], [1]])
    reclaimed(folder, **DEAD)
    (folder / "55_0_submitted.pkl").touch()
    session.answers["55"] = Seen("RUNNING")
    job = claims.obtain(session, 3, "rollout")
    session.answers["55"] = Seen("CANCELLED")
    monkeypatch.setattr(outcome, "COMMIT_GRACE_S", 0.0)
    monkeypatch.setattr("tasks.jobs.finished_shards", lambda *_: {1})
    assert wait(session, 3, "rollout", job) is None
