"""What is submitted ahead of its turn: once, found again, and gone where its job cannot come."""

import subprocess

import pytest
from job_lab import claimed, names, recorded, started

from relax.flags import load_config
from slurm import jobs as slurm_jobs
from slurm import records
from slurm.errors import JobError
from slurm.jobs import Job
from slurm.watch import Seen
from tasks import claims
from tasks.jobs import wait
from tasks.session import Stopped


@pytest.fixture
def queued(session):
    """A rollout of step 3 that is in hand, what follows is submitted with it."""
    session.plan = {3: ["rollout", "reward", "advantage", "update"]}
    ahead = {"placement": "job", "executor": "slurm", "submit_ahead": True}
    session.config = load_config(None, ahead)
    session.answers["70"] = Seen("RUNNING")
    return recorded(claimed(session, "rollout"), "70")


def test_what_follows_waits_in_the_queue_and_is_found_in_its_turn(
    session, submitted, queued, capsys
):
    claims.submit_ahead(session, 3, "rollout", queued)
    (order,) = submitted
    assert (order.labels["stages"], order.after) == (["reward"], "70")
    assert names(session) == ["000003-reward-1", "000003-rollout-1"]
    assert session.served_jobs == [session.ahead]  # its folder is packed in any case
    claims.submit_ahead(session, 3, "rollout", queued)  # asked again: nothing twice
    assert claims.obtain(session, 3, "reward").job_id == "101"
    assert len(submitted) == 1
    assert capsys.readouterr().err == ""
    claims.submit_ahead(session, 3, "reward", Job.load(session.jobs / "000003-reward-1"))
    assert [(o.labels["stages"], o.after) for o in submitted[1:]] == [(["advantage"], "101")]


def test_what_waits_for_a_job_found_again_is_known(session, submitted, queued):
    claims.submit_ahead(session, 3, "rollout", queued)
    session.ahead = None  # as in another flow
    claims.submit_ahead(session, 3, "rollout", queued)
    assert (session.ahead.job_id, len(submitted)) == ("101", 1)


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (["rollout", "reward"], {"submit_ahead": False}),
        (["rollout", "reward"], {"reward_placement": "inline"}),
        (["rollout"], {}),
        ([], {}),
    ],
)
def test_nothing_waits_where_nothing_follows(session, submitted, queued, plan, more):
    session.plan = {3: plan}
    own = {"placement": "job", "executor": "slurm", "submit_ahead": True, **more}
    session.config = load_config(None, own)
    claims.submit_ahead(session, 3, "rollout", queued)
    assert (submitted, session.ahead, names(session)) == ([], None, ["000003-rollout-1"])


def test_what_waits_for_a_job_that_fails_is_cancelled(session, submitted, queued, monkeypatch):
    asked = []
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(slurm_jobs, "run_command", lambda words: asked.append(words) or done)
    claims.submit_ahead(session, 3, "rollout", queued)
    started(queued.folder, "FAILED", error="ValueError: of the user")
    with pytest.raises(JobError, match="of the user"):
        wait(session, 3, "rollout", queued)
    assert asked == [["scancel", "101"]]
    assert records.read(session.jobs / "000003-reward-1" / records.OUTCOME)["state"] == "CANCELLED"
    assert records.read(queued.folder / records.OUTCOME)["state"] == "FAILED"
    # The next flow: the rollout anew, and what follows it, too.
    session.answers |= {"70": Seen("FAILED"), "101": Seen("CANCELLED")}
    again = claims.obtain(session, 3, "rollout")
    claims.submit_ahead(session, 3, "rollout", again)
    assert [order.after for order in submitted] == ["70", "", "102"]


def test_a_refusal_ahead_of_its_turn_stops_nothing(session, queued, monkeypatch, capsys):
    def refuse(folder, order):
        raise JobError(f"{order.name}: sbatch refused: job submit limit")

    monkeypatch.setattr(claims, "submit", refuse)
    claims.submit_ahead(session, 3, "rollout", queued)
    assert session.ahead is None
    assert "000003-reward: submitted in its turn" in capsys.readouterr().err
    outcome = records.read(session.jobs / "000003-reward-1" / records.OUTCOME)
    assert outcome["state"] == "REFUSED"


def test_one_whose_dependency_failed_after_all_goes_out_again_in_its_turn(
    session, submitted, queued, capsys
):
    """The rollout was committed; its job ended badly while its processes were torn down."""
    claims.submit_ahead(session, 3, "rollout", queued)
    session.answers |= {"70": Seen("FAILED"), "101": Seen("CANCELLED")}
    ahead, session.ahead = session.ahead, None  # its turn has come
    assert wait(session, 3, "reward", ahead) is None
    assert "it goes out again in its turn" in capsys.readouterr().err
    again = claims.obtain(session, 3, "reward")
    assert (again.job_id, submitted[-1].after) == ("102", "")


@pytest.mark.parametrize("detach", [False, True])
def test_a_stop_between_two_stages_ends_what_was_sent_ahead(
    session, submitted, queued, monkeypatch, detach
):
    asked = []
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(slurm_jobs, "run_command", lambda words: asked.append(words) or done)
    session.config = session.config.model_copy(
        update={"slurm": session.config.slurm.model_copy(update={"detach": detach})}
    )
    claims.submit_ahead(session, 3, "rollout", queued)
    session.stopping.set()
    with pytest.raises(Stopped):
        session.stop_if_asked()
    assert asked == ([] if detach else [["scancel", "101"]])
