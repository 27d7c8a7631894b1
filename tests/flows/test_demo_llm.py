"""Two steps of the demo with a real pretrained model; `make demo-llm` runs the whole of it."""

import importlib.util

import pytest

from flows import train
from flows.demo_llm import PACKAGE, RUN, prepare_model, write_sums
from relax.analytics import open_run
from relax.flags import load_config
from relax.store import Run
from tasks.stage import perform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"
    ),
]


def test_two_steps_of_a_pretrained_model(tmp_path):
    model = prepare_model(tmp_path / "model")
    write_sums(tmp_path / "sums", seed=1)
    settings = {
        **RUN,
        "num_rollout": 2,
        "hf_checkpoint": str(model),
        "prompt_data": str(tmp_path / "sums" / "train.jsonl"),
        "run_dir": str(tmp_path / "run"),
    }
    train.run(load_config(None, settings), perform)
    run = open_run(tmp_path / "run")
    ((prompt, response),) = run.sql("SELECT prompt, response FROM responses LIMIT 1").fetchall()
    assert "What is" in prompt and prompt.endswith("<|im_start|>assistant\n")
    assert response
    ((most,),) = run.sql(
        "SELECT max(value) FROM metrics WHERE metric = 'rollout/response_len/max'"
    ).fetchall()
    assert most == 8
    assert Run.open(tmp_path / "run").num_updates() == 2
