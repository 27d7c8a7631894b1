"""Tiny models (with a critic and a teacher), a few prompts, and runs made of them."""

import os
import sys
from pathlib import Path

import pytest

# What tests share with the processes that they start lies beside them, the rest above.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from rollout_cases import begin, settings_of, write_prompts
from stage_cases import write_critic, write_policy

from relax.data.tasks import build_model
from relax.trainer.numerics import make_deterministic


@pytest.fixture(scope="session", autouse=True)
def deterministic():
    make_deterministic(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of four models: policy, reference, teacher and critic."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference", "teacher")):
        write_policy(root / name, seed=seed)
    write_critic(root / "policy", root / "critic")
    return root


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    from relax.data.tasks import write_task

    return write_task("max3", tmp_path_factory.mktemp("max3"), seed=0)


@pytest.fixture(scope="session")
def stage_model(tmp_path_factory):
    """A random model of the made-up tasks' characters."""
    make_deterministic(1)
    return build_model(
        tmp_path_factory.mktemp("stages") / "base", hidden_size=64, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=32, intermediate_size=64, seed=3,
    )  # fmt: skip


@pytest.fixture
def base_settings(stage_model, tmp_path):
    """Settings of a run over six prompts."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["mixed"] * 6)
    return settings_of(stage_model, prompts, tmp_path / "run")


@pytest.fixture
def start(base_settings):
    """Start a run with settings changed: start(rollout_temperature=0.5)."""
    return lambda **changes: begin({**base_settings, **changes})
