"""The stage `score`: which columns, what is in them, and when it is done again."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stage_cases import VOCABULARY, do, made_rollout, settings_of, started
from transformers import AutoModelForCausalLM

from relax.algorithms import rules
from relax.errors import ArtifactError
from relax.stages import STAGES
from relax.stages.columns import score_lists
from relax.stages.keys import key_parts
from relax.stages.perform import Warm
from relax.stages.update import response_sequences
from relax.store import disk, rows

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "reference"}
OPD = {"use_opd": True, "opd_teacher_load": "teacher"}
WHITE = {"normalize_advantages": True}

# Overrides -> the columns that ALGORITHMS sections 1 and 2 ask for.
WANTED = [
    ({}, set()),
    ({"num_steps_per_rollout": 2}, {"old_logp"}),
    ({"num_steps_per_rollout": 2, "use_rollout_logprobs": True}, set()),
    ({"use_tis": True}, set()),
    ({"true_on_policy_mode": True}, set()),
    (KL, {"ref_logp"}),
    ({**KL, "kl_loss_coef": 0.0}, {"ref_logp"}),
    ({**KL, "num_steps_per_rollout": 2}, {"old_logp", "ref_logp"}),
    (OPD, {"teacher_logp"}),
    ({**OPD, "opd_log_prob_top_k": 3}, {"teacher_logp", "top_k_overlap"}),
    ({"opd_log_prob_top_k": 3, "num_steps_per_rollout": 2}, {"old_logp"}),
    ({"advantage_estimator": "ppo"}, {"value"}),
    (
        {"advantage_estimator": "ppo", "kl_coef": 0.1, "ref_load": "reference"},
        {"value", "ref_logp", "old_logp"},
    ),
    (
        {"advantage_estimator": "reinforce_plus_plus", **WHITE, "kl_coef": 0.1,
         "ref_load": "reference", "use_rollout_logprobs": True},
        {"ref_logp"},
    ),
    (
        {"advantage_estimator": "reinforce_plus_plus", **WHITE, "kl_coef": 0.1,
         "ref_load": "reference"},
        {"ref_logp", "old_logp"},
    ),
    (
        {"advantage_estimator": "reinforce_plus_plus_baseline", **WHITE, **KL},
        {"ref_logp"},
    ),
]  # fmt: skip


@pytest.fixture
def begun(models, task, tmp_path):
    """Start a run whose step 0 has a rollout made by hand."""

    def begin(name="run", **changed):
        run = started(settings_of(models, task, tmp_path / name, **changed))
        made_rollout(run, 0, np.random.default_rng(5))
        return run

    return begin


@pytest.mark.parametrize(("changed", "wanted"), WANTED)
def test_each_column_is_there_exactly_when_something_asks_for_it(begun, changed, wanted):
    run = begun(**changed)
    needed = rules.scores_needed(run.config)
    assert needed == wanted - {"top_k_overlap"}
    if needed:
        do(run, 0, ["score"])
    assert score_lists(run, 0).keys() == wanted


def answers(run, step):
    """Prompt and response of each response."""
    tables = (rows(run.table(step, "rollout", name)) for name in ("prompts", "responses"))
    return response_sequences(*tables)


def forward(directory, sequence):
    """Hidden states and logits at the positions that predict the response."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        out = model(torch.from_numpy(sequence.tokens)[None], output_hidden_states=True)
    first = len(sequence.tokens) - sequence.response_len
    places = slice(first - 1, len(sequence.tokens) - 1)
    return out.hidden_states[-1][0, places], out.logits[0, places]


def plain_logp(directory, sequence, temperature):
    logp_TV = (forward(directory, sequence)[1] / temperature).log_softmax(-1)
    target_T = torch.from_numpy(sequence.tokens[len(sequence.tokens) - sequence.response_len :])
    return logp_TV.gather(1, target_T[:, None])[:, 0].numpy()


def test_every_column_is_that_of_a_plain_forward_pass(begun, models):
    run = begun(
        advantage_estimator="ppo", kl_coef=0.1, ref_load="reference", critic_load="critic",
        use_opd=True, opd_teacher_load="teacher", opd_log_prob_top_k=3, rollout_temperature=0.8,
    )  # fmt: skip
    do(run, 0, ["score"])
    found = score_lists(run, 0)
    assert len(found) == 5
    head_H = load_file(models / "critic" / "model.safetensors")["score.weight"][0]
    sources = {"old_logp": "policy", "ref_logp": "reference", "teacher_logp": "teacher"}
    overlaps = []
    for place, sequence in enumerate(answers(run, 0)):
        for column, model in sources.items():
            expected_T = plain_logp(models / model, sequence, 0.8)
            np.testing.assert_allclose(found[column][place], expected_T, atol=5e-5, rtol=1e-5)
        value_T = forward(models / "critic", sequence)[0] @ head_H
        np.testing.assert_allclose(found["value"][place], value_T, atol=2e-5, rtol=1e-5)
        ours, theirs = (forward(models / m, sequence)[1] for m in ("policy", "teacher"))
        for t in range(sequence.response_len):
            likeliest = [
                sorted(range(VOCABULARY), key=lambda v, row=row: -row[v])[:3]
                for row in (ours[t].tolist(), theirs[t].tolist())
            ]
            overlaps.append(len(set(likeliest[0]) & set(likeliest[1])) / 3)
    np.testing.assert_allclose(np.concatenate(found["top_k_overlap"]), overlaps, rtol=1e-6)
    assert 0 < np.mean(overlaps) < 1


def test_the_reference_follows_the_policy(begun):
    run = begun(**KL, ref_update_interval=3, num_rollout=10)
    warm = Warm()
    for step in range(5):
        if step:
            made_rollout(run, step, np.random.default_rng(5 + step))
        do(run, step, ["score", "advantage", "update"], warm)
    made_rollout(run, 5, np.random.default_rng(9))
    do(run, 5, ["score"], warm)
    kept = sorted(int(p.name[:6]) for p in (run.root / "policies").iterdir())
    assert kept == [3, 4, 5]  # 3 is the reference of steps 3 to 5 alone
    for sequence, row in zip(answers(run, 5), score_lists(run, 5)["ref_logp"]):  # noqa: B905
        expected_T = plain_logp(run.policy_dir(3), sequence, 1.0)
        np.testing.assert_allclose(row, expected_T, atol=5e-5, rtol=1e-5)
    for sequence, row in zip(answers(run, 2), score_lists(run, 2)["ref_logp"]):  # noqa: B905
        expected_T = plain_logp(run.config.model.ref_load, sequence, 1.0)
        np.testing.assert_allclose(row, expected_T, atol=5e-5, rtol=1e-5)


def test_a_damaged_policy_is_no_reference(begun):
    run = begun(**KL, ref_update_interval=1)
    do(run, 0, ["score", "advantage", "update"])
    made_rollout(run, 1, np.random.default_rng(6))
    weights = run.policy_dir(1) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="weights differ from the manifest"):
        do(run, 1, ["score"])


KEYED = [
    ({"eps_clip": 0.1}, False),
    ({"entropy_coef": 0.1}, False),
    ({"kl_loss_coef": 0.2}, False),
    ({"num_steps_per_rollout": 2}, True),
    ({"use_opd": True, "opd_teacher_load": "teacher"}, True),
    ({"use_opd": True, "opd_teacher_load": "teacher", "opd_log_prob_top_k": 2}, True),
    ({"ref_load": "teacher"}, True),
    ({"update_dtype": "bfloat16"}, True),
    ({"max_tokens_per_gpu": 2000}, False),
]


@pytest.mark.parametrize(("changed", "matters"), KEYED)
def test_the_key_names_what_the_columns_depend_on(begun, changed, matters):
    runs = [begun("one", **KL), begun("other", **{**KL, **changed})]
    one, other = (key_parts(run, 0, STAGES["score"]) for run in runs)
    assert (one != other) is matters


def test_more_words_to_overlap_are_another_key(begun):
    asked = {**OPD, "opd_log_prob_top_k": 2}
    runs = [begun("one", **asked), begun("other", **{**asked, "opd_log_prob_top_k": 3})]
    one, other = (key_parts(run, 0, STAGES["score"]) for run in runs)
    assert one != other


def test_warm_and_cold_scores_have_the_same_bits(begun):
    changed = dict(
        advantage_estimator="ppo", kl_coef=0.1, ref_load="reference", critic_load="critic",
        num_steps_per_rollout=2, save_interval=1,
    )  # fmt: skip
    warm, contents = Warm(), []
    for name in ("warm", "cold"):
        run = begun(name, **changed)
        for step in range(2):
            if step:
                made_rollout(run, step, np.random.default_rng(6))
            for stage in ("score", "advantage", "update"):
                do(run, step, [stage], warm if name == "warm" else Warm())
        assert disk.size(run.policy_dir(2)) > 0
        contents.append(
            [run.committed(s, stage).content for s in range(2) for stage in ("score", "update")]
        )
    assert contents[0] == contents[1]
