"""The commands of README and docs are run, word for word, in a folder where their files exist.

Each is run here, or a line of ELSEWHERE says why it is not.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from documented import ROOT, commands

from flows import train
from relax import cli
from relax.flags import load_config
from tasks.stage import perform

pytestmark = pytest.mark.integration

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
ELSEWHERE = {
    r"^make ": "it sets up an environment of its own; CI calls it",
    r"^(python3 -m venv|pip|\S*bin/pip) ": "it installs packages; the Makefile does the same",
    r"^prefect ": "it needs a server: tests/flows/test_deployment.py runs the README's lines",
    r"cluster\.toml": "it needs a cluster: tests/cluster",
    r"^sbatch ": "it needs a cluster: tests/cluster",
    r"^python -m relax\.reference": "tests/test_docs.py compares what it writes",
    r"^python benchmarks/": "it measures a machine for minutes",
    r" recipe\.toml ": "tests/test_adding_an_algorithm.py follows the page to the letter",
    r" (RUN|NAME)\b": "these words stand for the reader's own",
}
"""Commands that are not run here, by what is in them, and why."""
FILLED = {"--step 199": "--step 0"}
"""The run of the pages has 200 steps, the one here has one."""


def is_elsewhere(line: str) -> bool:
    """Whether a command needs what is not here."""
    return any(re.search(pattern, line) for pattern in ELSEWHERE)


RUNNABLE = [line for line in commands() if not is_elsewhere(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout's recipes, the prompts, and the runs that the pages speak of."""
    if not GSM8K.is_dir():
        pytest.skip(f"{GSM8K} is not there")
    root = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", root / "recipes")
    (root / "gsm8k").symlink_to(GSM8K)
    for run in ("runs/max3-1/train", "runs/x", "runs/y"):
        settings = {
            "run_dir": str(root / run),
            "hf_checkpoint": str(root / "recipes/tiny_qwen3"),
            "prompt_data": str(GSM8K / "test.jsonl"),
            "input_key": "question",
            "label_key": "answer",
            "num_rollout": 1,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 8,
            "min_free_gib": 0,
        }
        train.run(load_config(None, settings), perform)
    return root


@pytest.mark.parametrize("line", RUNNABLE)
def test_it_runs(line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for shown, here in FILLED.items():
        line = line.replace(shown, here)
    program, *words = shlex.split(line)
    assert program == "relax", f"{line}: run it here, or say in ELSEWHERE why not"
    if words[0] == "train":
        words.append("--no-prefect")  # with it: tests/flows/test_deployment.py
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


def test_there_are_some():
    assert len(RUNNABLE) >= 10
    assert any(line.startswith("relax train recipes/gsm8k_cpu.toml") for line in RUNNABLE)
    assert any(line.startswith("relax export ") for line in RUNNABLE)


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_what_is_left_out_is_there(pattern):
    assert [line for line in commands() if re.search(pattern, line)], ELSEWHERE[pattern]
