"""Which configurations are refused, in which words; the page's RLOO table row by row."""

from pathlib import Path

import pytest

from relax.algorithms import ALGORITHMS, rules
from relax.algorithms.inheritance import load
from relax.errors import ConfigError
from relax.flags import load_config

PAGE = Path(__file__).parents[4] / "shared/reference/algorithms.md"
FITTING = {  # what each row must be given to be accepted
    "rloo": {"calculate_per_token_loss": True},
    "reinforce_plus_plus": {"normalize_advantages": True, "kl_coef": 0.1, "ref_load": "ref"},
    "reinforce_plus_plus_baseline": {
        "normalize_advantages": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "ref_load": "ref",
    },
}


def checked(name, **given):
    """Warnings, or the ConfigError's lines."""
    settings = {"advantage_estimator": name, **FITTING.get(name, {}), **given}
    return rules.check(load_config(None, settings))


def refused(name, **given):
    with pytest.raises(ConfigError) as caught:
        checked(name, **given)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_each_row_is_accepted_as_the_page_has_it(name):
    assert checked(name) == []


def test_unknown_algorithm():
    (line,) = refused("gropo")
    assert line.startswith("algorithm.advantage_estimator = 'gropo': known: grpo, dr_grpo, rloo")
    assert line.endswith("; did you mean grpo?")


# --- the page's RLOO table -----------------------------------------------------------------------

RLOO_TABLE = {  # first words of the page's row: [(what breaks it, what the message starts with)]
    "--advantage-estimator rloo": [],
    "--n-samples-per-prompt at least 2": [
        (
            {"n_samples_per_prompt": 1},
            "rollout.n_samples_per_prompt = 1: must be at least 2",
        )
    ],
    "--rollout-batch-size \u00d7 --n-samples-per-prompt equals --global-batch-size": [
        (
            {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 16},
            "update.global_batch_size = 16: must be rollout_batch_size * n_samples_per_prompt = 32",
        )
    ],
    "--num-steps-per-rollout unset or 1": [
        ({"num_steps_per_rollout": 2}, "update.num_steps_per_rollout = 2: must be unset or 1")
    ],
    "--calculate-per-token-loss enabled": [
        (
            {"calculate_per_token_loss": False},
            "algorithm.calculate_per_token_loss = False: must be on",
        )
    ],
    "--kl-coef 0": [({"kl_coef": 0.1, "ref_load": "ref"}, "algorithm.kl_coef = 0.1: must be 0.0")],
    "--max-staleness 0": [({"max_staleness": 1}, "rollout.max_staleness = 1: must be 0")],
    "reward normalization enabled": [
        (
            {"disable_rewards_normalization": True},
            "algorithm.disable_rewards_normalization = True: must be off",
        )
    ],
    "--normalize-advantages disabled": [
        ({"normalize_advantages": True}, "algorithm.normalize_advantages = True: must be off")
    ],
    "--fully-async, --hybrid, --partial-rollout, --use-dynamic-global-batch-size disabled": [
        ({"fully_async": True}, "rollout.fully_async = True: must be off"),
        ({"hybrid": True}, "rollout.hybrid = True: must be off"),
        ({"partial_rollout": True}, "rollout.partial_rollout = True: must be off"),
        (
            {"use_dynamic_global_batch_size": True},
            "update.use_dynamic_global_batch_size = True: must be off",
        ),
    ],
}
BREAKS = [(row, *case) for row, cases in RLOO_TABLE.items() for case in cases]


@pytest.mark.parametrize(("row", "given", "start"), BREAKS, ids=[str(b[1]) for b in BREAKS])
def test_rloo_table_row(row, given, start):
    (line,) = refused("rloo", **given)
    assert line.startswith(start)
    assert "; rloo" in line and len(line.split(";", 1)[1]) > 20  # the reason


def test_rloo_table_is_the_pages():
    if not PAGE.exists():
        pytest.skip(f"{PAGE} is not there; the rows above are checked all the same")
    text = PAGE.read_text().split("\nRLOO\n")[-1].split("Requirements and Parameters\n")[1]
    table = text.split("\nThe batch sizes are hardware-tunable")[0]
    found = [line for line in table.splitlines() if line and not line.startswith("Parameter ")]
    assert len(found) == len(RLOO_TABLE)
    for line, words in zip(found, RLOO_TABLE, strict=True):
        assert line.startswith(words)


def test_several_broken_rules_are_told_at_once():
    lines = refused("rloo", max_staleness=2, normalize_advantages=True, num_steps_per_rollout=2)
    assert len(lines) == 3


# --- the other rows ------------------------------------------------------------------------------

REFUSALS = [
    ("grpo", {"n_samples_per_prompt": 1}, "n_samples_per_prompt = 1: must be at least 2"),
    ("dr_grpo", {"calculate_per_token_loss": True}, "calculate_per_token_loss = True: must be off"),
    ("dr_grpo", {"normalize_advantages": True}, "normalize_advantages = True: must be off"),
    ("dr_grpo", {"disable_rewards_normalization": True}, "must be off"),
    ("dr_grpo", {"disable_grpo_std_normalization": True}, "dr_grpo does not use it"),
    ("rloo", {"eps_clip": 0.1}, "eps_clip = 0.1: must be 0.2; rloo does not use it"),
    ("rloo", {"drop_incomplete_groups": True}, "drop_incomplete_groups = True: must be off"),
    ("grpo", {"sapo_tau_pos": 2.0}, "sapo_tau_pos = 2.0: must be 1.0; grpo does not use it"),
    ("grpo", {"gamma": 0.9}, "gamma = 0.9: must be 1.0; grpo does not use it"),
    ("grpo", {"kl_coef": 0.1, "ref_load": "r"}, "kl_coef = 0.1: must be 0.0; grpo does not use it"),
    ("grpo", {"critic_lr": 1e-4}, "update.critic_lr = 0.0001: must be unset"),
    ("grpo", {"critic_load": "x"}, "model.critic_load = 'x': must be unset; grpo does not use it"),
    ("m2po", {"eps_clip": 0.3}, "eps_clip = 0.3: must be 0.2; m2po does not use it"),
    ("m2po", {"eps_clip_high": 0.3}, "eps_clip_high = 0.3: must be unset"),
    ("cispo", {"eps_clip_c": 3.0}, "eps_clip_c = 3.0: must be unset"),
    ("grpo", {"eps_clip_c": 1.0}, "eps_clip_c = 1.0: must be above 1"),
    ("ppo", {"fully_async": True}, "fully_async = True: must be off; ppo:"),
    ("ppo", {"hybrid": True}, "hybrid = True: must be off; ppo:"),
    ("ppo", {"max_staleness": 1}, "max_staleness = 1: must be 0; ppo:"),
    ("ppo", {"use_kl_loss": True, "ref_load": "r"}, "use_kl_loss = True: must be off; ppo:"),
    ("ppo", {"kl_coef": 0.1}, "kl_coef = 0.1: needs ref_load"),
    ("ppo", {"kl_loss_type": "k3"}, "kl_loss_type = 'k3': must be unset or k1"),
    ("ppo", {"disable_rewards_normalization": True}, "ppo does not use it"),
    ("ppo", {"custom_advantage_path": "a:b"}, "custom_advantage_path = 'a:b': must be unset"),
    ("reinforce_plus_plus", {"normalize_advantages": False}, "normalize_advantages = False: must"),
    ("reinforce_plus_plus", {"kl_coef": 0.0}, "kl_coef = 0.0: must be above 0"),
    ("reinforce_plus_plus", {"kl_loss_type": "k2"}, "kl_loss_type = 'k2': must be unset or k1"),
    ("reinforce_plus_plus", {"use_kl_loss": True}, "use_kl_loss = True: must be off"),
    ("reinforce_plus_plus", {"fully_async": True}, "fully_async = True: must be off"),
    ("reinforce_plus_plus", {"hybrid": True}, "hybrid = True: must be off"),
    ("reinforce_plus_plus", {"calculate_per_token_loss": True}, "must be off"),
    ("reinforce_plus_plus", {"ref_load": ""}, "kl_coef = 0.1: needs ref_load"),
    ("reinforce_plus_plus", {"disable_rewards_normalization": True}, "does not use it"),
    ("reinforce_plus_plus_baseline", {"normalize_advantages": False}, "must be on"),
    ("reinforce_plus_plus_baseline", {"n_samples_per_prompt": 1}, "must be at least 2"),
    ("reinforce_plus_plus_baseline", {"kl_loss_coef": 0.0}, "kl_loss_coef = 0.0: must be above 0"),
    ("reinforce_plus_plus_baseline", {"kl_loss_type": "k3"}, "must be unset or k2"),
    ("reinforce_plus_plus_baseline", {"use_unbiased_kl": True}, "use_unbiased_kl = True: must be"),
    ("reinforce_plus_plus_baseline", {"custom_reward_post_process_path": "a:b"}, "must be unset"),
    ("reinforce_plus_plus_baseline", {"disable_rewards_normalization": True}, "must be off"),
    ("reinforce_plus_plus_baseline", {"calculate_per_token_loss": True}, "must be off"),
    ("reinforce_plus_plus_baseline", {"hybrid": True}, "hybrid = True: must be off"),
    ("grpo", {"kl_loss_coef": 0.1, "ref_load": "r"}, "no effect without use_kl_loss"),
    ("grpo", {"use_unbiased_kl": True}, "no effect without use_kl_loss"),
    ("grpo", {"use_kl_loss": True}, "use_kl_loss = True: needs ref_load"),
    ("grpo", {"kl_loss_type": "k1"}, "the gradient of k1 as a loss ignores the reference"),
    ("grpo", {"use_tis": True, "use_icepop": True}, "use_icepop = True: must be off with use_tis"),
    ("grpo", {"use_tis": True, "use_rollout_logprobs": True}, "must be off with use_tis"),
    ("grpo", {"use_icepop": True, "use_rollout_logprobs": True}, "must be off with use_icepop"),
    ("grpo", {"use_tis": True, "tis_clip_low": 3.0}, "tis_clip_low = 3.0: must be at most"),
    (
        "grpo",
        {"use_tis": True, "rollout_top_p": 0.9},
        "rollout_top_p = 0.9: must be 1.0 with use_tis",
    ),
    (
        "grpo",
        {"use_icepop": True, "rollout_top_k": 5},
        "rollout_top_k = 5: must be 0 with use_icepop",
    ),
    ("grpo", {"use_rollout_logprobs": True, "rollout_top_k": 5}, "with use_rollout_logprobs"),
    ("grpo", {"true_on_policy_mode": True, "num_steps_per_rollout": 2}, "2 optimizer steps"),
    ("grpo", {"true_on_policy_mode": True, "use_rollout_logprobs": True}, "must be off with use_r"),
    ("grpo", {"true_on_policy_mode": True, "max_staleness": 1}, "with max_staleness = 1"),
    ("grpo", {"fully_async": True, "normalize_advantages": True}, "must be off with fully_async"),
    ("grpo", {"fully_async": True, "use_dynamic_global_batch_size": True}, "with fully_async"),
    ("grpo", {"use_opd": True}, "use_opd = True: needs opd_teacher_load"),
    ("grpo", {"opd_only_reward": True}, "opd_only_reward = True: must be off"),
    ("gspo", {"custom_loss_path": "mine:loss", "gamma": 0.9}, "gspo does not use it"),
    ("gspo", {"custom_loss_path": "mine:loss", "kl_coef": 0.9, "ref_load": "r"}, "not use it"),
]


@pytest.mark.parametrize(
    ("name", "given", "words"), REFUSALS, ids=[f"{n}-{'-'.join(g)}" for n, g, _ in REFUSALS]
)
def test_refusal(name, given, words):
    lines = refused(name, **given)
    assert any(words in line for line in lines), lines
    for line in lines:
        where, _, rest = line.partition(" = ")
        assert where.split(".")[0] in ("algorithm", "model", "rollout", "update") and ": " in rest
        assert "; " in rest, f"no reason: {line}"


def test_both_kl_terms_are_refused():
    lines = refused("ppo", kl_coef=0.1, use_kl_loss=True, kl_loss_coef=0.1, ref_load="r")
    assert any("must be 0 where kl_loss_coef is not" in line for line in lines)


ACCEPTED = [
    ("grpo", {"n_samples_per_prompt": 1, "disable_rewards_normalization": True}),
    (
        "cispo",
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "ref_load": "r",
            "use_tis": True,
            "eps_clip_high": 10.0,
        },
    ),
    ("cispo", {"calculate_per_token_loss": True}),
    ("m2po", {"m2po_miniclip_low": 0.2, "m2po_miniclip_high": 0.28, "use_tis": True}),
    ("rloo", {"use_kl_loss": True, "kl_loss_coef": 0.01, "ref_load": "r"}),
    ("rloo", {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 32}),
    ("reinforce_plus_plus", {"kl_loss_type": "k1", "gamma": 0.99}),
    ("reinforce_plus_plus_baseline", {"kl_loss_type": "k2"}),
    ("ppo", {"kl_coef": 0.01, "ref_load": "r", "lambd": 0.95, "normalize_advantages": True}),
    ("grpo", {"use_kl_loss": True, "ref_load": "r"}),
    ("gspo", {"custom_loss_path": "mine:loss", "eps_clip_c": 2.0, "sapo_tau_pos": 3.0}),
    ("gspo", {"custom_advantage_path": "mine:loss", "gamma": 0.9}),
]


@pytest.mark.parametrize(("name", "given"), ACCEPTED)
def test_accepted(name, given):
    assert checked(name, **given) == []


def test_settings_the_types_refuse():
    for given in (
        {"rollout_temperature": 0.0},
        {"m2po_kl2_budget": -0.1},
        {"m2po_kl2_budget": "inf"},
        {"m2po_kl2_budget": "nan"},
        {"m2po_miniclip_low": 1.5},
        {"m2po_miniclip_high": -1.0},
        {"eps_clip_c": "nan"},
        {"entropy_coef": "nan"},
    ):
        with pytest.raises(ConfigError):
            load_config(None, given)
    with pytest.raises(ConfigError, match="is not num_steps_per_rollout"):
        load_config(None, {"num_steps_per_rollout": 2, "global_batch_size": 256})
    with pytest.raises(ConfigError, match=r"takes whole groups"):
        load_config(None, {"num_steps_per_rollout": 64})


# --- warnings ------------------------------------------------------------------------------------


def test_stale_data_without_a_correction_is_warned_about():
    (line,) = checked("grpo", max_staleness=2)
    assert line.startswith("rollout.max_staleness = 2: stale data is not corrected")
    for weight in rules.OTHER_WEIGHTS:
        assert checked("grpo", max_staleness=2, **{weight: True}) == []
    lines = checked("m2po", max_staleness=2)
    assert len(lines) == 2 and "the bound of m2po cannot engage" in lines[1]
    assert len(checked("m2po", max_staleness=2, num_steps_per_rollout=2)) == 1


def test_cut_distributions_are_warned_about():
    (line,) = checked("grpo", rollout_top_p=0.9)
    assert line.startswith("rollout.rollout_top_p = 0.9: the trainer's log-probabilities")


def test_settings_that_wait_for_a_switch_are_warned_about():
    (line,) = checked("grpo", tis_clip=3.0)
    assert line == "algorithm.tis_clip = 3.0: no effect; without use_tis or use_icepop"
    (line,) = checked(
        "grpo", disable_rewards_normalization=True, disable_grpo_std_normalization=True
    )
    assert "disable_grpo_std_normalization = True: no effect" in line


# --- what the scoring of a rollout must bring ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("grpo", {}, set()),
        ("grpo", {"num_steps_per_rollout": 2}, {"old_logp"}),
        ("grpo", {"num_steps_per_rollout": 2, "use_rollout_logprobs": True}, set()),
        ("grpo", {"use_kl_loss": True, "ref_load": "r"}, {"ref_logp"}),
        ("reinforce_plus_plus", {}, {"old_logp", "ref_logp"}),
        ("reinforce_plus_plus", {"use_rollout_logprobs": True}, {"ref_logp"}),
        ("ppo", {}, {"value"}),
        ("ppo", {"kl_coef": 0.1, "ref_load": "r"}, {"value", "old_logp", "ref_logp"}),
        ("grpo", {"use_opd": True, "opd_teacher_load": "t"}, {"teacher_logp"}),
        ("grpo", {"true_on_policy_mode": True}, set()),
    ],
)
def test_scores_needed(name, given, wanted):
    settings = {"advantage_estimator": name, **FITTING.get(name, {}), **given}
    assert rules.scores_needed(load_config(None, settings)) == wanted


# --- another algorithm on top of a recipe -------------------------------------------------------


def recipe(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


GRPO_RECIPE = """
[algorithm]
advantage_estimator = "grpo"
eps_clip = 0.1
eps_clip_high = 0.28
normalize_advantages = true
entropy_coef = 0.01
"""


def test_settings_of_the_recipe_that_the_new_row_does_not_use_are_reset(tmp_path):
    path = recipe(tmp_path, GRPO_RECIPE)
    config, line = load(path, {"advantage_estimator": "rloo", "calculate_per_token_loss": True})
    assert line == (
        "rloo in place of grpo: reset, for rloo does not use them: "
        "eps_clip = 0.1, eps_clip_high = 0.28, normalize_advantages = True"
    )
    assert config.algorithm.eps_clip == 0.2 and config.algorithm.eps_clip_high is None
    assert config.algorithm.entropy_coef == 0.01  # used: it stays
    assert rules.check(config) == []


def test_settings_given_with_the_override_are_not_reset(tmp_path):
    path = recipe(tmp_path, GRPO_RECIPE)
    override = {"advantage_estimator": "m2po", "eps_clip": 0.3}
    config, line = load(path, override)
    assert line.endswith("eps_clip_high = 0.28")
    with pytest.raises(ConfigError, match=r"eps_clip = 0.3: must be 0.2; m2po does not use it"):
        rules.check(config)


def test_nothing_is_reset_without_a_change_of_algorithm(tmp_path):
    path = recipe(tmp_path, GRPO_RECIPE + "sapo_tau_pos = 3.0\n")
    for overrides in (None, {"lr": "1e-4"}, {"advantage_estimator": "grpo"}):
        config, line = load(path, overrides)
        assert line == ""
        with pytest.raises(ConfigError, match=r"sapo_tau_pos = 3\.0"):
            rules.check(config)
    assert load(None, {"advantage_estimator": "rloo", "eps_clip": "0.1"})[1] == ""


def test_a_kl_estimator_that_the_new_row_cannot_have_is_reset(tmp_path):
    text = '[algorithm]\nadvantage_estimator = "ppo"\nkl_loss_type = "k1"\nkl_coef = 0.1\n'
    config, line = load(recipe(tmp_path, text), {"advantage_estimator": "sapo"})
    assert "kl_loss_type = 'k1'" in line and "kl_coef = 0.1" in line
    assert rules.check(config) == []
