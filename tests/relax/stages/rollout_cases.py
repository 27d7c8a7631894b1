"""Runs for the tests of the rollout stage, also in the processes that they start."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from flows import train
from flows.opening import about
from relax.doctor.start import check
from relax.flags import load_config
from relax.stages.perform import Warm, perform
from relax.store import Run, rows
from tasks import stage

REWARD = """
def reward(response_text, label):
    return {"easy": 1.0, "hard": 0.0}.get(label, float(sum(map(ord, response_text)) % 2))
"""
"""By label: always 1, always 0, or a coin that the response tosses."""


def write_prompts(path: Path, labels: list[str]) -> Path:
    rows = [{"input": f"{n:03d}=", "label": label} for n, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.with_name("reward.py").write_text(REWARD)
    return path


def settings_of(model: Path, prompts: Path, run_dir: Path) -> dict:
    return {
        "run_dir": str(run_dir),
        "hf_checkpoint": str(model),
        "prompt_data": str(prompts),
        "custom_rm_path": f"{prompts.with_name('reward.py')}:reward",
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 6,
        "lr": 1e-3,
        "min_free_gib": 0,
    }


def begin(settings: dict) -> Run:
    config = load_config(None, settings)
    return Run.start(config, check(config), about(1))


def do(run: Run, name: str = "rollout", step: int = 0, warm: Warm | None = None) -> None:
    perform(str(run.root), step, name, "test", warm)


def responses_of(run: Run, name: str = "rollout", step: int = 0):
    return rows(run.table(step, name, "responses"))


def prompts_of(run: Run, name: str = "rollout", step: int = 0):
    return rows(run.table(step, name, "prompts"))


def train_all(settings: dict) -> Run:
    train.run(load_config(None, settings), stage.perform)
    return Run.open(settings["run_dir"])


def plain_logp(model: Path, prompt: list[int], tokens: list[int], temperature: float):
    """log softmax(logits / temperature) of each token, by a plain forward."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    whole = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits_TV = network(whole).logits[0, len(prompt) - 1 : -1] / temperature
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
