"""Jobs of several gloo ranks: each is a function that the tests run in fresh processes."""

import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch.distributed as dist
from process_group import joined, meeting_point
from training_cases import make_sequences, policy_gradient, value_regression

from relax.trainer.actor import Actor
from relax.trainer.critic import Critic
from relax.trainer.numerics import make_deterministic
from relax.trainer.options import TrainerOptions

OPTIONS = TrainerOptions(lr=1e-4, weight_decay=0.1, temperature=0.7, max_tokens_per_gpu=60)


# The server imports everything once; each rank is then a fork of it, started in a moment.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rank_jobs"])


def launch(num_ranks: int, directory: Path, *jobs: tuple) -> list:
    """Start ranks that run the jobs (function, directory, arguments) one after another."""
    directory.mkdir(parents=True, exist_ok=True)
    port = meeting_point()
    processes = [
        CONTEXT.Process(target=run, args=(rank, num_ranks, port, directory, jobs))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list, directory: Path, timeout_s: float = 120) -> None:
    """Wait for all; a failure shows every rank's output."""
    for process in processes:
        process.join(timeout_s)
    logs = [file.read_text() for file in sorted(directory.glob("rank*.log"))]
    assert all(process.exitcode == 0 for process in processes), "\n".join(logs)


def run(rank: int, num_ranks: int, port: int, directory: Path, jobs: tuple) -> None:
    """What a rank's process does; what it prints goes to rankN.log."""
    log = os.open(directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    make_deterministic(1)
    with joined(rank, num_ranks, port, timeout_s=20):
        for job, where, arguments in jobs:
            where.mkdir(parents=True, exist_ok=True)
            result = job(where, **arguments)
            (where / f"rank{rank}.json").write_text(json.dumps(result))


def three_steps(directory: Path, model: Path, change: dict) -> dict:
    """Actor and critic, three steps; then logp and values, publish and checkpoint."""
    options = dataclasses.replace(OPTIONS, **change)
    actor = Actor.load(model, options, num_schedule_steps=3)
    critic = Critic.load(model, options, num_schedule_steps=3)
    rows = []
    for step in range(3):
        # The last step has fewer sequences than ranks may have micro-batches.
        sequences = make_sequences(16 if step < 2 else 1, seed=step)
        rows.append(actor.train_step(sequences, policy_gradient(sequences)))
        rows.append(critic.train_step(sequences, value_regression(sequences)))
    sequences = make_sequences(9, seed=9)
    logp = [row.tolist() for row in actor.logp(sequences, 1.0)]
    values = [row.tolist() for row in critic.values(sequences)]
    digest = actor.publish(directory / "policy", "float32")
    critic.publish(directory / "critic", "float32")
    actor.begin_save(directory / "000003")()
    finish = actor.begin_save(directory / "000004", in_background=True)
    assert actor.weights_hash("float32") == digest
    finish()
    return {"rows": rows, "logp": logp, "values": values, "hash": digest}


def reshard(directory: Path, model: Path, checkpoint: Path) -> dict:
    """Restore what another number of ranks saved, and train one more step."""
    actor = Actor.load(model, OPTIONS, num_schedule_steps=3)
    actor.restore(checkpoint)
    digest = actor.weights_hash("float32")
    sequences = make_sequences(8, seed=4)
    row = actor.train_step(sequences, policy_gradient(sequences))
    actor.publish(directory / "policy", "float32")
    return {"hash": digest, "step": actor.step, "row": row}


def steps(directory: Path, model: Path, first: int, last: int, saved: Path | None) -> dict:
    """Steps first .. last - 1, from a checkpoint where first > 0, and a checkpoint at the end."""
    options = dataclasses.replace(OPTIONS, lr_decay_style="cosine", lr_warmup_iters=2)
    actor = Actor.load(model, options, num_schedule_steps=6)
    if saved is not None:
        actor.restore(saved)
    rows = []
    for step in range(first, last):
        sequences = make_sequences(12, seed=step)
        rows.append(actor.train_step(sequences, policy_gradient(sequences)))
    actor.begin_save(directory / f"{last:06d}")()
    return {"rows": rows, "hash": actor.weights_hash()}


def die(directory: Path, model: Path) -> None:
    """Rank 1 leaves without a word after the first step; rank 0 must not wait for ever."""
    actor = Actor.load(model, OPTIONS, num_schedule_steps=3)
    sequences = make_sequences(8)
    for _ in range(2):
        actor.train_step(sequences, policy_gradient(sequences))
        if dist.get_rank() == 1:
            os._exit(9)
        time.sleep(0.5)
