import pytest

from relax.analytics.questions import QUESTIONS, question
from relax.analytics.views import open_run
from relax.errors import ConfigError

ANSWERS = {
    "reward-by-step": [(0, 0.5, 2.5, 0.25), (1, 1.5, 2.0, 0.0), (2, 0.0, 2.0, 0.25)],
    "no-signal": [(0, 0.5, 0.5, 0.0), (1, 0.5, 0.0, 0.5), (2, 1.0, 1.0, 0.0)],
    "finish-reason": [("length", 2, 0.0, 4.0), ("stop", 10, 0.4, 1.8)],
    # the first token of four responses, then tokens 1 and 2 of those that have them
    "drift-by-position": [(0.0, 4, 0.5, 0.5, 0.5), (1.0, 4, 0.5, 0.5, 0.5)],
    "drift-by-step": [(1, "train/train_rollout_logprob_abs_diff", 0.5)],
    "longest-wrong": [
        (0, 3, 4, "length", "1+1=", "2", "aaaa"),
        (2, 2_000_000, 4, "length", "0+1=", "1", "aaaa"),
        (0, 2, 3, "stop", "1+1=", "2", "aaa"),
    ],
    "shortest-right": [
        (0, 0, 1, "0+1=", "1", "a"),
        (1, 1_000_000, 2, "2+1=", "3", "aa"),
        (1, 1_000_001, 2, "2+1=", "3", "aa"),
        (1, 1_000_003, 2, "3+1=", "4", "aa"),
    ],
    "never-solved": [(1, 2, 4, 2, "1+1=", "2")],
    "forgotten": [(0, 2, 0.0, 0.5, 0, "0+1=")],
    "clip-fraction": [(0, 0, 0.25, None, 2.0), (1, 0, 0.5, None, None)],
    "clip-by-sign": [(0, 0, 0.15, 0.1)],
    "stage-seconds": [
        ("rollout", 3, 4.0, 4.0, 12.0),
        ("reward", 3, 2.0, 2.0, 6.0),
    ],
    "consumed-once": [(0, 4, 0, 0), (1, 2, 0, 0)],
    "held-out": [("held_out", "greedy", 0, 2, 0.5, 1.0)],
    "cost-per-stage": [("reward", 1, None, None, None, None)],
    "idle-share": [],
    "lost-attempts": [(2, "advantage", "job-1", None, None, None)],
}

FIRST_ROWS = ("longest-wrong", "stage-seconds")
"""Questions of which the answer above gives the first rows only."""


@pytest.fixture(scope="module")
def opened(run):
    return open_run(run.root)


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer(opened, name):
    found = opened.sql(question(name).sql(1)).fetchall()
    expected = ANSWERS[name]
    assert len(found) == len(expected) or name in FIRST_ROWS
    assert [tuple(r) for r in found[: len(expected)]] == [pytest.approx(row) for row in expected]


def test_every_question_is_asked_of_several_runs_too(run, own_run):
    both = open_run(run.root, own_run.root)
    for row in QUESTIONS.values():
        answer = both.sql(row.sql(2))
        assert answer.columns[0] == "run"
        answer.fetchall()


def test_a_prompt_drawn_twice_in_an_epoch_and_a_gap_are_seen(own_run):
    from relax.schema import PROMPTS
    from relax.store import Output

    again = PROMPTS.table(
        group_id=[3_000_000],
        prompt_id=[0],
        epoch=[1],
        position=[3],
        cursor=[3],
        prompt=["0+1="],
        prompt_tokens=[[5]],
        prompt_len=[1],
        label=["1"],
    )
    output = Output(own_run.root, 3, "rollout", attempt="x", key_parts={})
    output.write("prompts", again)
    output.commit()
    found = open_run(own_run.root).sql(question("consumed-once").sql(1)).fetchall()
    assert found == [(0, 4, 0, 0), (1, 3, 1, 1)]


def test_an_unknown_question_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no such question; did you mean never-solved\?"):
        question("never-solvd")


def test_there_are_at_least_ten():
    assert len(QUESTIONS) >= 10
