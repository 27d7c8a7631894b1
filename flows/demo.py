"""`make demo`: a tiny model learns a made-up task, through the flows of every run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from relax.analytics import open_run
from relax.analytics.plot import plot_rewards
from relax.analytics.views import OpenRun
from relax.data.tasks import TASKS, build_model, build_tokenizer, write_task
from relax.store import Run

WARM_UP = {"lr": 1e-3, "num_rollout": 1, "sft_batch_size": 32}
WARM_UP_STEPS = {"max3": 20, "sort3": 60}
"""Supervised steps after which a task is solved now and then, and no more."""
REINFORCE = {
    "lr": 3e-4,
    "num_rollout": 200,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 4,
    "n_samples_per_eval_prompt": 4,
    "save_interval": 50,
}
QUESTIONS = (
    "SELECT step, reward, response_len FROM steps ORDER BY step",
    "SELECT prompt, response, label, rollout_logp_sum FROM responses "
    "WHERE raw_reward = 0 ORDER BY rollout_logp_sum DESC LIMIT 10",
    "SELECT decoding, policy_version, avg(reward) AS accuracy FROM evals GROUP BY ALL",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Warm a random model up on labels, then train it by GRPO; everything lands in --run-dir."""
    parser = argparse.ArgumentParser(prog="make demo", description=main.__doc__)
    parser.add_argument("--task", choices=list(TASKS), default="max3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/TASK-SEED")
    parser.add_argument("--steps", type=int, default=REINFORCE["num_rollout"])
    given = parser.parse_args(argv)
    root = given.run_dir or Path("runs") / f"{given.task}-{given.seed}"

    from flows.server import ensure_server
    from flows.sft import sft
    from flows.train import train

    ensure_server()

    base = prepare(root, given.task, given.seed)
    shared = {
        "seed": given.seed,
        "rollout_seed": given.seed,
        "prompt_data": str(root / "task" / "train.jsonl"),
    }
    print("warm-up: a few supervised steps on the labels of the training prompts", flush=True)
    sft(
        overrides={
            **shared,
            **WARM_UP,
            "sft_steps": WARM_UP_STEPS[given.task],
            "run_dir": str(root / "warm-up"),
            "hf_checkpoint": str(base),
        }
    )
    warm = Run.open(root / "warm-up")
    print("reinforcement: GRPO on the same prompts; the held-out ones were never seen", flush=True)
    train(
        overrides={
            **shared,
            **REINFORCE,
            "num_rollout": given.steps,
            "run_dir": str(root / "train"),
            "hf_checkpoint": str(warm.policy_dir(warm.num_updates())),
            "eval_prompt_data": str(root / "task" / "held_out.jsonl"),
        }
    )
    tell(root / "train")


def prepare(root: Path, task: str, seed: int) -> Path:
    """The task's files and a random model with its tokenizer, made once."""
    base = root / "base"
    if not (base / "config.json").exists():
        write_task(task, root / "task", seed=seed)
        build_tokenizer(base)
        build_model(base, seed=seed)
    return base


def tell(run_dir: Path) -> None:
    """Held-out accuracy before and after, the plot, and what to ask next."""
    tell_accuracy(open_run(run_dir), "held-out accuracy (200 prompts)")
    plot = plot_rewards(run_dir, run_dir / "rewards.png")
    print(f"\nreward curve: {plot}\nask the run anything, for instance:")
    for question in QUESTIONS:
        print(f'  .venv/bin/relax sql {run_dir} "{question}"')


def tell_accuracy(run: OpenRun, title: str) -> None:
    """Mean reward of each evaluation: a line for each decoding and policy."""
    print(f"\n{title}")
    accuracy = run.sql(
        "SELECT decoding, policy_version, avg(reward) FROM evals GROUP BY ALL ORDER BY ALL"
    )
    for decoding, version, reward in accuracy.fetchall():
        print(f"  {decoding:8} policy {version:3}: {reward:.3f}")


if __name__ == "__main__":
    main()
