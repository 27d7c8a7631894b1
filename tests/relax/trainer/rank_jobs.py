"""Jobs of several gloo ranks: each is a function that the tests run in fresh processes."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from training_cases import make_sequences, policy_gradient, value_regression

from relax.trainer.actor import Actor, TrainerOptions
from relax.trainer.critic import Critic
from relax.trainer.numerics import make_deterministic
from relax.trainer.ranks import join

OPTIONS = TrainerOptions(lr=1e-4, weight_decay=0.1, temperature=0.7, max_tokens_per_gpu=60)


def launch(job: str, num_ranks: int, directory: Path, **arguments) -> list[subprocess.Popen]:
    """Start the ranks of a job; they meet at a file of directory."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    text = json.dumps({"directory": str(directory), **arguments})
    return [
        subprocess.Popen(
            [sys.executable, __file__, job, str(rank), str(num_ranks), text],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], timeout_s: float = 120) -> list[str]:
    """Wait for all; the output of each. A failure shows every rank's output."""
    outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return outputs


def three_steps(directory: Path, model: str, change: dict) -> None:
    """Actor and critic, three steps; then logp and values, publish and checkpoint."""
    options = dataclasses.replace(OPTIONS, **change)
    actor = Actor.load(Path(model), options, num_schedule_steps=3)
    critic = Critic.load(Path(model), options, num_schedule_steps=3)
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
    actor.save(directory / "000003")
    pending = actor.save_async(directory / "000004")
    assert actor.weights_hash("float32") == digest
    pending.wait()
    result = {"rows": rows, "logp": logp, "values": values, "hash": digest}
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def reshard(directory: Path, model: str, checkpoint: str) -> None:
    """Restore what another number of ranks saved, and train one more step."""
    actor = Actor.load(Path(model), OPTIONS, num_schedule_steps=3)
    actor.restore(Path(checkpoint))
    digest = actor.weights_hash("float32")
    sequences = make_sequences(8, seed=4)
    row = actor.train_step(sequences, policy_gradient(sequences))
    actor.publish(directory / "policy", "float32")
    result = {"hash": digest, "step": actor.step, "row": row}
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def steps(directory: Path, model: str, first: int, last: int, saved: str) -> None:
    """Steps first .. last - 1, from a checkpoint where first > 0, and a checkpoint at the end."""
    options = dataclasses.replace(OPTIONS, lr_decay_style="cosine", lr_warmup_steps=2)
    actor = Actor.load(Path(model), options, num_schedule_steps=6)
    if first:
        actor.restore(Path(saved))
    for step in range(first, last):
        sequences = make_sequences(12, seed=step)
        print(json.dumps(actor.train_step(sequences, policy_gradient(sequences))))
    actor.save(directory / f"{last:06d}")
    print(actor.weights_hash())


def die(directory: Path, model: str) -> None:
    """Rank 1 leaves without a word after the first step; rank 0 must not wait for ever."""
    actor = Actor.load(Path(model), OPTIONS, num_schedule_steps=3)
    sequences = make_sequences(8)
    for _ in range(2):
        actor.train_step(sequences, policy_gradient(sequences))
        if os.environ["RANK"] == "1":
            os._exit(9)
        time.sleep(0.5)


JOBS = {"three_steps": three_steps, "reshard": reshard, "steps": steps, "die": die}

if __name__ == "__main__":
    name, rank, num_ranks, text = sys.argv[1:]
    arguments = json.loads(text)
    where = Path(arguments.pop("directory"))
    os.environ["RANK"] = rank
    make_deterministic(1)
    join(int(rank), int(num_ranks), where / "store", timeout_s=20)
    JOBS[name](where, **arguments)
