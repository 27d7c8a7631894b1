"""docs/adding_an_algorithm.md, followed to the letter from outside the package."""

import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from flows import train
from flows.demo import prepare
from relax.algorithms import ALGORITHMS, Algorithm, rules
from relax.algorithms.loss import StepCounts, step_loss
from relax.algorithms.whole_rollout import compute
from relax.config import AlgorithmSection
from relax.errors import ConfigError
from relax.flags import build_parser, load_config, overrides_of, parse_flags
from relax.store import Run, rows
from tasks.stage import perform

PAGE = Path(__file__).parents[1] / "docs/adding_an_algorithm.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
FUNCTIONS, COMMAND, ROW = (text for _, text in BLOCKS)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the page's file in it."""
    (tmp_path / "my_algorithm.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def recipe(root, run_dir):
    """recipe.toml of the page's command: two steps on a tiny model; rewards are real numbers."""
    base = prepare(root, "max3", 3)
    (root / "closeness.py").write_text(
        "def closeness(response_text, label):\n"
        "    return len(response_text) % 4 + (label in response_text)\n"
    )
    (root / "recipe.toml").write_text(
        f"""
[run]
run_dir = "{run_dir}"
num_rollout = 2
[model]
hf_checkpoint = "{base}"
[data]
prompt_data = "{root}/task/train.jsonl"
[rollout]
rollout_batch_size = 3
n_samples_per_prompt = 4
rollout_max_response_len = 4
[reward]
custom_rm_path = "{root}/closeness.py:closeness"
[update]
num_steps_per_rollout = 3
"""
    )


def test_by_flags_alone(here):
    recipe(here, here / "run")
    words = shlex.split(COMMAND)
    assert words[:2] == ["relax", "train"]
    known = parse_flags(build_parser("relax train", ""), words[2:])
    config = load_config(known.config, overrides_of(known))
    train.run(config, perform)
    run = Run.open(here / "run")
    reward = rows(run.table(0, "reward", "rewards"))
    assert (reward.reward == reward.raw_reward / 2).all() and reward.reward.max() > 0
    advantage = rows(run.table(0, "advantage", "advantages")).advantage
    for group in set(reward.group_id.tolist()):
        inside = reward.group_id == group
        own = reward.reward[inside]
        low, high = sorted(own)[1:3]
        assert advantage[inside] == pytest.approx(own - (low + high) / 2)
    metric = rows(run.table(1, "update", "metrics"))
    columns = zip(metric.optimizer_step, metric.metric, metric.value, strict=True)
    found = {(place, name): value for place, name, value in columns}
    assert found[0, "train/ois"] == pytest.approx(1, abs=1e-5)
    assert found[2, "train/ois"] != 1.0  # the third step of a rollout has a ratio to speak of
    assert {value for (_, name), value in found.items() if name == "train/pg_clipfrac"} == {0.0}
    assert run.manifest(1, "update").key_parts["sources"]["custom_loss_path"].endswith(":spo")
    (here / "my_algorithm.py").write_text(FUNCTIONS + "\n# changed\n")
    with pytest.raises(ConfigError, match="custom"):
        train.run(config, perform)


def test_by_a_row(here, monkeypatch):
    row = eval(ROW, {"Algorithm": Algorithm})
    monkeypatch.setitem(ALGORITHMS, row.name, row)
    settings = {"advantage_estimator": row.name, "eps_clip": 0.5}
    config = load_config(None, settings)
    assert rules.check(config) == []
    with pytest.raises(ConfigError, match=r"gamma = 0.9: must be 1.0; median_spo does not use it"):
        rules.check(load_config(None, settings | {"gamma": 0.9}))
    algorithm = config.algorithm.model_dump()
    batch = {
        "reward_B": torch.tensor([1.0, 2.0, 4.0]),
        "group_id_B": torch.zeros(3).long(),
        "mask_BT": torch.tensor([[1.0], [1.0], [1.0]]),
    }
    found = compute(row, batch, algorithm)
    assert found.advantage_BT.flatten().tolist() == [-1.0, 0.0, 2.0]
    logp_BT = torch.tensor([[-1.0], [-1.0], [-1.0]], requires_grad=True)
    old_logp_BT = logp_BT.detach() - torch.tensor([[math.log(1.5)], [0.0], [math.log(0.5)]])
    tensors = {
        "logp_BT": logp_BT,
        "old_logp_BT": old_logp_BT,
        "entropy_BT": torch.ones(3, 1),
        "advantage_BT": found.advantage_BT,
        "mask_BT": batch["mask_BT"],
    }
    loss, sums = step_loss(row, algorithm, StepCounts(3, 3, 8))(tensors)
    # -rA + |A| (r - 1)^2: 1.5 + .25, 0, -1 + .5
    assert loss.item() == pytest.approx((1.75 - 0.5) / 3, rel=1e-5)
    loss.backward()
    # r (-A + 2 |A| (r - 1)): 1.5 * 2, 0, .5 * (-2 - 2)
    assert logp_BT.grad is not None
    assert logp_BT.grad.flatten().tolist() == pytest.approx([1.0, 0.0, -2 / 3], rel=1e-5)
    assert sums["train/silenced_frac"].item() == 0.0


def test_a_wrong_signature_is_told_before_anything_is_loaded(here):
    from relax.doctor.settings import checked

    (here / "my_algorithm.py").write_text(
        "import no_such_module_anywhere\n"
        "def spo(logp_BT, old_BT, advantage_BT, mask_BT): ...\n"
        "def halved(reward_B, group_id_B, size): ...\n"
    )
    for flag, function, words in (
        ("custom_loss_path", "spo", r"takes \(logp_BT, old_BT, .*\(logp_BT, old_logp_BT, "),
        ("custom_reward_post_process_path", "halved", r"takes \(reward_B, group_id_B, size\)"),
    ):
        config = load_config(None, {flag: f"my_algorithm.py:{function}"})
        with pytest.raises(ConfigError, match=words):
            checked(config)


def test_settings_of_the_page_exist():
    for flag in re.findall(r"`--([\w-]+)`", PAGE.read_text()):
        name = flag.replace("-", "_")
        assert name in AlgorithmSection.model_fields, name
