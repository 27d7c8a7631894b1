"""A process that has imported everything and forks: each child runs the pipeline, some to death.

Commands come as JSON lines on stdin, one answer each on stdout. A child told to die counts the
disk operations of the store, each before and after, and at the given one writes a marker that says
where it is, forces it to the disk, and sends itself a signal (SIGKILL unless told otherwise).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute  # noqa: F401  (what a run loads late, loaded before the fork)
import torch
import transformers.models.auto.tokenization_auto  # noqa: F401
from crash_lab import flags

import relax.stages.advantage
import relax.stages.reward
import relax.stages.rollout
import relax.stages.score
import relax.stages.update  # noqa: F401
from flows import train  # noqa: F401
from relax.cli import main
from relax.engines.embedded import TransformersEngine
from relax.schema import IDS_PER_STEP
from relax.stages.training import trainer_options
from relax.store import Run, disk
from relax.store.arrow import content_hash
from relax.trainer.actor import Actor
from relax.trainer.checkpoint import find_fault
from relax.trainer.publish import policy_hash

OPERATIONS = (
    "write_file",
    "fsync_file",
    "fsync_dir",
    "sync_tree",
    "rename",
    "make_dir",
    "remove_tree",
)
"""What relax.store.disk does to a disk; all that a run leaves there goes through these."""

Event = tuple[str, str, str]
"""(before or after, operation, path below the run with this attempt's names made anonymous)."""


class Witness:
    """Records each operation of the store and, at event `die_at`, sends the process `signal`."""

    def __init__(self, root: Path, die_at: int | None, signal: int, marker: Path) -> None:
        self.root, self.die_at, self.signal, self.marker = root, die_at, signal, marker
        self.events: list[Event] = []

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(disk, name, self._wrapped(name, getattr(disk, name)))

    def _wrapped(self, name: str, operation: Callable) -> Callable:
        def watched(path: Path, *rest: Any) -> Any:
            self._see("before", name, path)
            result = operation(path, *rest)
            self._see("after", name, path)
            return result

        return watched

    def _see(self, phase: str, name: str, path: Path) -> None:
        self.events.append((phase, name, anonymous(path, self.root)))
        if len(self.events) - 1 == self.die_at:
            with self.marker.open("w") as file:
                json.dump(self.events[-1], file)
                file.flush()
                os.fsync(file.fileno())
            os.kill(os.getpid(), self.signal)


def anonymous(path: Path, root: Path) -> str:
    """The path below the run, without what differs from one attempt to the next."""
    name = os.path.relpath(path, root)
    name = re.sub(r"inline-\d+-\d+-\d+", "ATTEMPT", name)
    name = re.sub(r"lease/\..*", "lease/.ME", name)
    return re.sub(r"code/\.[0-9a-f]+-[^/]+-\d+", "code/.SCRATCH", name)


def log_samples(log: Path) -> None:
    """One line a sampled response; the reward function of the tests logs itself."""
    _log_each(log, TransformersEngine, "sample", lambda request: f"sample {request.seed}\n")


def log_scores(log: Path) -> None:
    """One line a response whose log-probabilities are computed, with its step."""
    _log_each(log, Actor, "logp", lambda asked: f"score {asked.sample_id // IDS_PER_STEP}\n")


def _log_each(log: Path, owner: type, method: str, line: Callable[[Any], str]) -> None:
    """A line for each member of the method's first argument, before it is called."""
    whole = getattr(owner, method)

    def logged(self: Any, asked: Any, *rest: Any) -> Any:
        with log.open("a") as file:
            file.writelines(map(line, asked))
        return whole(self, asked, *rest)

    setattr(owner, method, logged)


def drift() -> None:
    """Restoring gives one weight another last digit, as another machine's arithmetic would."""
    whole = Actor.restore

    def restore(self: Actor, directory: Path) -> None:
        whole(self, directory)
        with torch.no_grad():
            next(iter(self._state().weights.values())).mul_(1 + 1e-6)

    Actor.restore = restore


def run(command: dict[str, Any]) -> int:
    """One pipeline, in a child; its exit status says how it ended."""
    folder = Path(command["folder"])
    root = Path(command["settings"]["run_dir"])
    os.environ["CRASH_LOG"] = str(folder / "calls.log")
    log_samples(folder / "calls.log")
    log_scores(folder / "calls.log")
    witness = Witness(root, command["die_at"], command["by"], folder / "marker.json")
    witness.install()
    if command["drift"]:
        drift()
    code = main(["train", "--no-prefect", *flags(command["settings"])])
    (folder / "events.json").write_text(json.dumps(witness.events))
    return code


def relax_command(command: dict[str, Any]) -> int:
    """Any command line, with the calls logged as in `run`."""
    log = Path(command["folder"], "calls.log")
    os.environ["CRASH_LOG"] = str(log)
    log_samples(log)
    return main(command["words"])


def inspect(command: dict[str, Any]) -> int:
    """Everything a run committed, computed anew from its files."""
    run = Run.open(command["run_dir"])
    found: dict[str, Any] = {}
    for path in sorted(run.root.glob("steps/*/[a-z]*/manifest.json")):
        step, stage = int(path.parts[-3]), path.parts[-2]
        manifest = run.committed(step, stage)
        found[f"{step}-{stage}"] = {
            "key": manifest.key,
            "tables": {t: _table(run, step, stage, t) for t in manifest.tables},
            "policy": manifest.policy and manifest.policy.hash,
        }
    found["seeds"] = [
        run.table(step, "rollout", "responses").column("seed").to_pylist()
        for step in range(run.num_updates())
    ]
    newest = run.num_updates()
    on_disk = {path.name.split(".")[0]: path for path in run.root.glob("policies/[0-9]*")}
    found["policies"] = {v: policy_hash(p) for v, p in sorted(on_disk.items())}
    checkpoints = list(run.checkpoints(newest))
    found["checkpoints"] = {v: _state(run, path) for v, path, _ in checkpoints}
    found["files"] = sorted(
        anonymous(path, run.root)
        for folder in ("steps", "policies", "checkpoints")
        for path in (run.root / folder).rglob("*")
    )
    Path(command["folder"], "inspected.json").write_text(json.dumps(found))
    return 0


def _table(run: Run, step: int, stage: str, name: str) -> str:
    return content_hash(run.table(step, stage, name))


def _state(run: Run, checkpoint: Path) -> str:
    """What a trainer knows after reading a checkpoint: weights, moments and step, to the bit."""
    options = trainer_options(run.config, temperature=1.0)
    model = Path(run.config.model.hf_checkpoint)
    actor = Actor.load(model, options, num_schedule_steps=run.schedule_steps)
    if fault := find_fault(checkpoint / "actor"):
        return fault
    actor.restore(checkpoint / "actor")
    digest = hashlib.sha256()
    _feed(digest, actor._state().tensors())
    digest.update(str(actor.step).encode())
    return digest.hexdigest()


def _feed(digest: Any, state: Any) -> None:
    if isinstance(state, dict):
        for name in sorted(state):
            digest.update(str(name).encode())
            _feed(digest, state[name])
    else:
        value = state.full_tensor() if hasattr(state, "full_tensor") else torch.as_tensor(state)
        digest.update(np.ascontiguousarray(value.detach().numpy()).tobytes())


COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "run": run,
    "relax": relax_command,
    "inspect": inspect,
}


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(command)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _child(command: dict[str, Any]) -> None:
    """Never returns to the loop of its parent."""
    code = 70
    log = os.open(Path(command["folder"], "output.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        code = COMMANDS[command["command"]](command)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
