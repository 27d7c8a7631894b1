"""A tiny model, a critic with a head of its own and a teacher on disk; the task max3."""

import os
import sys
from pathlib import Path

import pytest

# What tests share with the processes that they start lies beside them.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from stage_cases import write_critic, write_policy


@pytest.fixture(scope="session", autouse=True)
def deterministic():
    from relax.trainer.numerics import make_deterministic

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
