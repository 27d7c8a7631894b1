"""Held-out prompts: answers and their means, and rewards that are none."""

import numpy as np
import pytest
from rollout_cases import begin, do, settings_of, write_prompts

from relax.errors import ArtifactError, FunctionError
from relax.store import rows

VERIFIER = """
def reward(response_text, label):
    if label == "nan":
        return float("nan")
    if label == "raises":
        raise ValueError("no good")
    return float(len(response_text))
"""


@pytest.fixture
def evaluated(stage_model, tmp_path):
    """A run whose held-out prompts have these labels."""

    def run(labels):
        prompts = write_prompts(tmp_path / "prompts.jsonl", labels)
        (tmp_path / "reward.py").write_text(VERIFIER)
        return begin(
            settings_of(stage_model, prompts, tmp_path / "run")
            | {"eval_prompt_data": str(prompts), "n_samples_per_eval_prompt": 2}
        )

    return run


def test_answers_and_their_means(evaluated):
    run = evaluated(["a", "b", "c"])
    do(run, "evaluate")
    table = rows(run.table(0, "evaluate", "evals"))
    assert table.decoding == ["sampled"] * 6 + ["greedy"] * 3
    assert table.prompt_id.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert table.sample_index.tolist() == [0, 1] * 3 + [0] * 3
    assert table.reward.tolist() == [len(text) for text in table.response]
    metrics = rows(run.table(0, "evaluate", "metrics"))
    found = dict(zip(metrics.metric, metrics.value.tolist(), strict=True))
    for decoding in ("sampled", "greedy"):
        those = table.reward[np.array(table.decoding) == decoding]
        assert found[f"eval/held_out/{decoding}/reward_mean"] == pytest.approx(those.mean())
    assert np.isfinite(list(found.values())).all()


def test_a_reward_that_is_no_number_stops_and_names_the_answers(evaluated):
    run = evaluated(["a", "nan"])
    with pytest.raises(ArtifactError) as caught:
        do(run, "evaluate")
    assert str(caught.value) == (
        "evaluate: not a finite number for 3 samples: sampled answer 0 to prompt 1 (nan), "
        "sampled answer 1 to prompt 1 (nan), greedy answer 0 to prompt 1 (nan); mend the verifier"
    )
    assert run.manifest(0, "evaluate") is None


def test_a_verifier_that_raises_is_told_for_which_answer(evaluated):
    with pytest.raises(FunctionError, match="no good, sampled answer 0 to prompt 1\n"):
        do(evaluated(["a", "raises"]), "evaluate")
