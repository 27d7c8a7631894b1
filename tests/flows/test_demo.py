"""`make demo` as a user starts it: what it says, and that the tiny model learns, by three seeds."""

import subprocess
import sys

import pytest
from prefect_server import ROOT

from relax.analytics import open_run


@pytest.fixture
def demo(prefect_server, tmp_path):
    """Run the demo with some flags: its output, and the directory it left."""

    def run(*words: str):
        done = subprocess.run(
            [sys.executable, "-m", "flows.demo", "--run-dir", str(tmp_path / "demo"), *words],
            env=prefect_server | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, cwd=ROOT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, tmp_path / "demo"

    return run


def accuracy(root) -> dict[tuple[str, int], float]:
    """Held-out accuracy by decoding and policy."""
    found = open_run(root / "train").sql(
        "SELECT decoding, policy_version, avg(reward) FROM evals GROUP BY ALL"
    )
    return {(decoding, version): mean for decoding, version, mean in found.fetchall()}


@pytest.mark.integration
def test_two_steps_tell_what_a_whole_demo_does(demo):
    said, root = demo("--steps", "2")
    told = said.splitlines()
    start = told.index("held-out accuracy (200 prompts)")
    found = accuracy(root)
    assert told[start + 1 : start + 5] == [
        f"  {decoding:8} policy {version:3}: {found[decoding, version]:.3f}"
        for decoding in ("greedy", "sampled")
        for version in (0, 2)
    ]
    assert f"reward curve: {root}/train/rewards.png" in told
    assert (root / "train" / "rewards.png").read_bytes().startswith(b"\x89PNG")
    questions = [line.split('"')[1] for line in told if ".venv/bin/relax sql" in line]
    assert len(questions) == 3
    run = open_run(root / "train")
    assert [len(run.sql(question).fetchall()) for question in questions] == [2, 10, 4]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_largest_of_three_digits_is_learned(demo, seed):
    _, root = demo("--seed", str(seed))
    found = accuracy(root)
    print(f"max3, seed {seed}: {found['sampled', 0]:.3f} -> {found['sampled', 200]:.3f}")
    assert found["sampled", 0] < 0.6
    assert found["sampled", 200] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sorting_three_digits_is_learned(demo):
    _, root = demo("--task", "sort3")
    found = accuracy(root)
    print(f"sort3, seed 1: {found['sampled', 0]:.3f} -> {found['sampled', 200]:.3f}")
    assert found["sampled", 200] > found["sampled", 0] + 0.25
