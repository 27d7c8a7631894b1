"""Every state of SLURM, and the races around it, as one outcome."""

import pytest

from slurm.outcome import Done, Failed, Phase, Queued, Requeued, Running, judge, phase_of
from slurm.watch import Seen


def outcome(state, age_s=100.0, started=True, **seen):
    return judge(
        committed=False, seen=Seen(state, since=1000.0, **seen), now=1000.0 + age_s, started=started
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", Requeued()),
        ("CONFIGURING", Requeued()),
        ("RUNNING", Running()),
        ("COMPLETING", Running()),
        ("SUSPENDED", Running()),
        ("STOPPED", Running()),
        ("REQUEUED", Requeued()),
        ("REQUEUE_HOLD", Requeued()),
        ("SPECIAL_EXIT", Requeued()),
        ("COMPLETED", Failed("COMPLETED", "it ended without a result")),
        ("FAILED", Failed("FAILED", "it failed")),
        (
            "TIMEOUT",
            Failed("TIMEOUT", "it reached its time limit; raise minutes of its allocation"),
        ),
        (
            "OUT_OF_MEMORY",
            Failed("OUT_OF_MEMORY", "it ran out of memory; raise mem_gb of its allocation"),
        ),
        ("CANCELLED", Failed("CANCELLED", "it was cancelled")),
        ("DEADLINE", Failed("DEADLINE", "it reached its deadline")),
        ("LAUNCH_FAILED", Failed("LAUNCH_FAILED", "its nodes could not start it")),
        (
            "NODE_FAIL",
            Failed("NODE_FAIL", "its nodes were lost or taken, and it was not requeued"),
        ),
        (
            "PREEMPTED",
            Failed("PREEMPTED", "its nodes were lost or taken, and it was not requeued"),
        ),
        ("UNKNOWN", Failed("UNKNOWN", "neither squeue nor sacct knows it any more")),
        ("A_STATE_OF_TOMORROW", Failed("A_STATE_OF_TOMORROW", "it is over")),
    ],
)
def test_state_that_has_lasted(state, expected):
    assert outcome(state) == expected


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED", "FAILED", "NODE_FAIL", "UNKNOWN"])
def test_manifest_alone_decides_success(state):
    seen = Seen(state, since=0.0)
    assert judge(committed=True, seen=seen, now=1e6, started=False) == Done()
    assert judge(committed=True, seen=None, now=1e6, started=False) == Done()


def test_job_that_never_ran_is_queued_with_the_clusters_reason():
    assert outcome("PENDING", started=False, reason="Priority") == Queued("Priority")


def test_pending_after_a_start_is_a_requeue():
    assert outcome("PENDING", reason="BeginTime") == Requeued("BeginTime")


def test_dependency_that_cannot_be_met_ends_the_wait():
    found = outcome("PENDING", started=False, reason="DependencyNeverSatisfied")
    assert found == Failed("PENDING", "it waits for a job that failed")


def test_node_failure_may_yet_be_a_requeue():
    """NODE_FAIL shows for up to 5 s before the job is pending again; submitit takes it as final."""
    assert outcome("NODE_FAIL", age_s=4.5) == Requeued("NODE_FAIL")
    assert outcome("PREEMPTED", age_s=4.5) == Requeued("PREEMPTED")


def test_end_of_a_job_may_be_seen_before_its_commit():
    assert outcome("COMPLETED", age_s=0.5) == Running()
    assert outcome("TIMEOUT", age_s=0.5) == Running()


def test_fresh_job_may_be_unknown_for_a_while():
    assert outcome("UNKNOWN", age_s=3.0, started=False) == Queued()
    assert outcome("UNKNOWN", age_s=3.0, started=True) == Running()


def test_silent_cluster_changes_nothing():
    assert judge(committed=False, seen=None, now=1e6, started=True) == Running()
    assert judge(committed=False, seen=None, now=1e6, started=False) == Queued()


def test_exit_code_is_told():
    found = outcome("FAILED", exit_code="3:0")
    assert found == Failed("FAILED", "it failed (exit 3:0)")


@pytest.mark.parametrize(
    ("state", "age_s", "waited_for", "given_up"),
    [
        ("PENDING", 100.0, Phase.LIVING, Phase.ENDING),
        ("RUNNING", 100.0, Phase.LIVING, Phase.ENDING),
        ("COMPLETING", 0.0, Phase.LIVING, Phase.ENDING),
        ("REQUEUED", 100.0, Phase.LIVING, Phase.ENDING),
        ("NODE_FAIL", 4.5, Phase.DOUBTFUL, Phase.DOUBTFUL),
        ("NODE_FAIL", 100.0, Phase.OVER, Phase.OVER),
        ("UNKNOWN", 3.0, Phase.DOUBTFUL, Phase.OVER),
        ("UNKNOWN", 100.0, Phase.OVER, Phase.OVER),
        ("COMPLETED", 0.0, Phase.OVER, Phase.OVER),
        ("FAILED", 0.0, Phase.OVER, Phase.OVER),
        ("ENDED", 0.0, Phase.OVER, Phase.OVER),
        ("A_STATE_OF_TOMORROW", 0.0, Phase.DOUBTFUL, Phase.DOUBTFUL),
        ("A_STATE_OF_TOMORROW", 100.0, Phase.OVER, Phase.OVER),
    ],
)
def test_phase_of_a_job(state, age_s, waited_for, given_up):
    seen = Seen(state, since=1000.0)
    assert phase_of(seen, given_up=False, now=1000.0 + age_s) is waited_for
    assert phase_of(seen, given_up=True, now=1000.0 + age_s) is given_up


def test_silent_cluster_leaves_the_phase_in_doubt():
    assert phase_of(None, given_up=False, now=1e6) is Phase.DOUBTFUL
    assert phase_of(None, given_up=True, now=1e6) is Phase.DOUBTFUL
