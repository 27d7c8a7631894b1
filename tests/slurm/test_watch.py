"""One squeue call for all jobs; sacct for the rest, where it works."""

import itertools
import subprocess

import pytest

from slurm.watch import Seen, Watch, plain, query


def commands(answers):
    """A stand-in for the cluster: the first word's answer, and what was asked."""
    asked = []

    def run(words):
        asked.append(words)
        answer = answers.get(words[0])
        if answer is None:
            return None
        code, out, err = answer
        return subprocess.CompletedProcess(words, code, out, err)

    return run, asked


def test_one_squeue_call_answers_for_all_jobs():
    out = "1|RUNNING|None\n2|PENDING|Priority\n3|COMPLETED|None\n"
    run, asked = commands({"squeue": (0, out, "")})
    assert query(["1", "2", "3"], run) == {
        "1": Seen("RUNNING"),
        "2": Seen("PENDING", "Priority"),
        "3": Seen("COMPLETED"),
    }
    assert len(asked) == 1
    assert asked[0][-1] == "1,2,3"


def test_what_squeue_forgot_is_asked_of_sacct():
    run, asked = commands(
        {
            "squeue": (0, "1|RUNNING|None\n", ""),
            "sacct": (0, "2|CANCELLED by 0|0:15\n", ""),
        }
    )
    found = query(["1", "2"], run)
    assert found == {"1": Seen("RUNNING"), "2": Seen("CANCELLED", exit_code="0:15")}
    assert asked[1][-1] == "2"


def test_single_job_that_squeue_calls_invalid():
    invalid = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    run, _ = commands({"squeue": invalid, "sacct": (0, "7|FAILED|1:0\n", "")})
    assert query(["7"], run) == {"7": Seen("FAILED", exit_code="1:0")}


def test_sacct_absent_or_its_database_down_leaves_unknown():
    disabled = (1, "", "Slurm accounting storage is disabled\n")
    for sacct in (None, disabled):
        run, _ = commands({"squeue": (0, "", ""), "sacct": sacct})
        assert query(["7"], run) == {"7": Seen("UNKNOWN")}


def test_controller_that_does_not_answer_is_no_answer():
    down = (1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")
    for squeue in (None, down):
        run, asked = commands({"squeue": squeue})
        assert query(["7"], run) is None
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("elements", "whole"),
    [
        ("COMPLETED FAILED RUNNING", "RUNNING"),
        ("FAILED PENDING COMPLETED", "PENDING"),
        ("FAILED NODE_FAIL COMPLETED", "NODE_FAIL"),  # it may be put back into the queue
        ("COMPLETED FAILED COMPLETED", "FAILED"),
        ("COMPLETED COMPLETED COMPLETED", "COMPLETED"),
    ],
)
def test_array_is_over_when_all_its_elements_are_and_as_bad_as_the_worst(elements, whole):
    lines = [f"9_{place}|{state}|None\n" for place, state in enumerate(elements.split())]
    run, _ = commands({"squeue": (0, "".join(lines), "")})
    assert query(["9"], run) == {"9": Seen(whole)}


def test_states_are_normalised():
    assert [plain(s) for s in ("CANCELLED by 0", "CANCELLED+", "RUNNING")] == [
        "CANCELLED",
        "CANCELLED",
        "RUNNING",
    ]


def test_many_waiting_stages_share_one_call_and_it_backs_off(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("slurm.watch.time.monotonic", lambda: now[0])

    def ask(job_ids):
        calls.append((now[0], list(job_ids)))
        return {job_id: Seen("RUNNING") for job_id in job_ids}

    watch = Watch(ask)
    while now[0] < 300.0:
        for job_id in ("1", "2", "3"):
            watch.seen(job_id)
        now[0] += 0.1
    assert calls[-1][1] == ["1", "2", "3"]
    gaps = [round(b[0] - a[0]) for a, b in itertools.pairwise(calls)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 30
    assert len(calls) < 20


def test_time_of_a_state_is_that_of_its_first_sight(monkeypatch):
    now, state = [10.0], ["RUNNING"]
    monkeypatch.setattr("slurm.watch.time.monotonic", lambda: now[0])
    watch = Watch(lambda job_ids: {job_id: Seen(state[0]) for job_id in job_ids})
    assert watch.now("1") == Seen("RUNNING", since=10.0)
    now[0] = 20.0
    assert watch.now("1") == Seen("RUNNING", since=10.0)
    state[0] = "FAILED"
    assert watch.now("1") == Seen("FAILED", since=20.0)
