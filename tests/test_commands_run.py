"""The commands of README and docs are run, word for word, in a folder where their files exist."""

import importlib.util
import shlex
import shutil
from pathlib import Path

import pytest

from flows import train
from relax import cli
from relax.flags import load_config
from tasks.stage import perform

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CLUSTER = ("cluster.toml", "--question cost-per-stage")
"""Commands that need a cluster are run by tests/cluster."""
PATTERNS = ("RUN", "NAME", "recipe.toml")
"""Words that stand for the reader's own; the page on algorithms has a test of its own."""


def documented():
    """Every `relax ...` command of a code block that can be run as it stands."""
    spec = importlib.util.spec_from_file_location("docs_of_text", ROOT / "tests" / "test_docs.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    found = []
    for page in pages.PAGES_OF_TEXT:
        blocks = "\n".join(pages.FENCE.findall(page.read_text())).replace("\\\n", " ")
        lines = [line.strip() for line in blocks.splitlines() if line.startswith("relax ")]
        found += [line.split("  #")[0] for line in lines]
    return list(dict.fromkeys(found))


RUNNABLE = [
    line
    for line in documented()
    if not any(word in line for word in CLUSTER)
    and not any(pattern in shlex.split(line) for pattern in PATTERNS)
]


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
    words = shlex.split(line)[1:]
    if words[0] == "train":
        words.append("--no-prefect")  # with it: tests/flows/test_deployment.py
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


def test_there_are_some():
    assert len(RUNNABLE) >= 10
    assert any(line.startswith("relax train recipes/gsm8k_cpu.toml") for line in RUNNABLE)
