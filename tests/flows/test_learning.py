"""Each algorithm trains the demo's task to a clearly higher held-out accuracy. One seed each.

The numbers that were seen are in docs/learning.md.
"""

import pytest

from flows import sft, train
from flows.demo import WARM_UP, WARM_UP_STEPS, prepare
from relax.algorithms import ALGORITHMS
from relax.flags import load_config
from relax.store import Run, rows
from tasks.stage import perform

pytestmark = pytest.mark.slow

SEED = 1
SHARED = {
    "lr": 1e-3,
    "num_rollout": 30,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 4,
    "n_samples_per_eval_prompt": 4,
    "save_interval": 0,
    "min_free_gib": 0,
}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.001, "ref_load": "START"}
KL_IN_REWARD = {"kl_coef": 0.001, "ref_load": "START"}
TWO = {"num_steps_per_rollout": 2}  # on fresh data alone, several of them are one and the same
WHITE = {"normalize_advantages": True}

# Algorithm -> its own settings, and the least gain in held-out accuracy (sampled).
CASES = {
    "grpo": ({}, 0.25),
    "dr_grpo": ({}, 0.25),
    "rloo": ({"calculate_per_token_loss": True}, 0.25),
    "ppo": ({"critic_lr": 2e-3, "num_critic_only_steps": 2}, 0.25),
    "cispo": ({**KL, **TWO}, 0.25),
    "gspo": (TWO, 0.25),
    "sapo": (TWO, 0.25),
    "m2po": (TWO, 0.25),
    "reinforce_plus_plus": ({**WHITE, **KL_IN_REWARD}, 0.25),
    "reinforce_plus_plus_baseline": ({**WHITE, **KL}, 0.25),
}


@pytest.fixture(scope="session")
def warmed(tmp_path_factory):
    """The demo's task, and the demo's model after its warm-up."""
    root = tmp_path_factory.mktemp("learning")
    base = prepare(root, "max3", SEED)
    settings = {
        **WARM_UP,
        "sft_steps": WARM_UP_STEPS["max3"],
        "seed": SEED,
        "rollout_seed": SEED,
        "prompt_data": str(root / "task" / "train.jsonl"),
        "run_dir": str(root / "warm-up"),
        "hf_checkpoint": str(base),
        "min_free_gib": 0,
    }
    sft.run(load_config(None, settings), perform)
    warm = Run.open(root / "warm-up")
    return root, warm.policy_dir(warm.num_updates())


def accuracies(run: Run, last: int) -> list[float]:
    """Held-out accuracy of sampled answers, before the first and after the last step."""
    found = []
    for step in (0, last):
        metrics = rows(run.table(step, "evaluate", "metrics"))
        values = dict(zip(metrics.metric, metrics.value.tolist(), strict=True))
        found.append(values["eval/held_out/sampled/reward_mean"])
    return found


def learn(name: str, root, start) -> list[float]:
    """Train from the warmed-up policy; accuracy before and after."""
    own = {n: str(start) if v == "START" else v for n, v in CASES[name][0].items()}
    settings = {
        **SHARED,
        **own,
        "advantage_estimator": name,
        "seed": SEED,
        "rollout_seed": SEED,
        "prompt_data": str(root / "task" / "train.jsonl"),
        "eval_prompt_data": str(root / "task" / "held_out.jsonl"),
        "hf_checkpoint": str(start),
        "run_dir": str(root / name),
    }
    config = load_config(None, settings)
    train.run(config, perform)
    return accuracies(Run.open(root / name), config.run.num_rollout)


def test_every_algorithm_is_here():
    assert CASES.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_algorithm_learns(warmed, name):
    before, after = learn(name, *warmed)
    print(f"{name}: {before:.3f} -> {after:.3f}")
    assert after > before + CASES[name][1]
