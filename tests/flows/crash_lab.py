"""The tiny pipeline that the crash tests run, kill, run again and compare."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RELAX = Path(sys.executable).with_name("relax")
NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 2, 2, 3
RESPONSES = NUM_PROMPTS * GROUP_SIZE

REWARD = """
import os, time

def reward(response_text, label):
    with open(os.environ["CRASH_LOG"], "a") as log:
        log.write("reward\\n")
    gate = os.environ.get("CRASH_GATE")
    if gate:
        open(gate + ".reached", "w").close()
        while not os.path.exists(gate):
            time.sleep(0.01)
    return float(sum(map(ord, response_text)) % 7)
"""
"""Tells responses of a random model apart, so that every update moves the weights.

With CRASH_GATE a run stops in its first reward until that file exists.
"""


@dataclass
class Ended:
    """How one run of the pipeline ended: in `folder` are its log, marker and record of calls."""

    folder: Path
    code: int

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text()

    @property
    def calls(self) -> Counter[str]:
        """How often each response was sampled (by its seed), and how often one was rewarded.

        And how often one was scored, by its step.
        """
        log = self.folder / "calls.log"
        return Counter(log.read_text().splitlines() if log.exists() else ())

    @property
    def died_at(self) -> tuple[str, str, str]:
        return tuple(json.loads((self.folder / "marker.json").read_text()))

    @property
    def events(self) -> list[tuple[str, str, str]]:
        return [tuple(event) for event in json.loads((self.folder / "events.json").read_text())]


class Lab:
    """A model, prompts and a reward; a warm process that forks runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        materials(folder)
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("crash_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._answer() == "ready"

    def settings(self, run_dir: Path, **more: Any) -> dict[str, Any]:
        return settings(self.folder, run_dir, **more)

    def run(
        self,
        run_dir: Path,
        *,
        die_at: int | None = None,
        by: int = signal.SIGKILL,
        drift: bool = False,
        **more: Any,
    ) -> Ended:
        """The pipeline in a child, to its end or to the signal `by` at event `die_at`.

        With `drift` a restored checkpoint comes back a little different.
        """
        settings = self.settings(run_dir, **more)
        return self._do("run", settings=settings, die_at=die_at, by=int(by), drift=drift)

    def relax(self, *words: str) -> Ended:
        """The command `relax` in a child."""
        return self._do("relax", words=words)

    def train(self, run_dir: Path, **more: Any) -> Ended:
        """`relax train --no-prefect` in a child."""
        return self.relax("train", "--no-prefect", *flags(self.settings(run_dir, **more)))

    def start(self, run_dir: Path, gate: Path, **more: Any) -> subprocess.Popen[str]:
        """`relax train --no-prefect` as a process of its own, which waits in its first reward."""
        process = subprocess.Popen(
            [RELAX, "train", "--no-prefect", *flags(self.settings(run_dir, **more))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(CRASH_GATE=str(gate), CRASH_LOG=str(gate.with_name("calls.log"))),
        )
        while not gate.with_name(gate.name + ".reached").exists():
            assert process.poll() is None, process.stdout and process.stdout.read()
            time.sleep(0.01)
        return process

    def inspect(self, run_dir: Path) -> dict[str, Any]:
        """What is committed, hashed anew from the files."""
        ended = self._do("inspect", run_dir=str(run_dir))
        assert ended.code == 0, ended.output
        return json.loads((ended.folder / "inspected.json").read_text())

    def copy(self, run_dir: Path, target: Path) -> Path:
        """A copy of a run in the place of `target`: nothing in a run knows where it is."""
        self.clear(target)
        return shutil.copytree(run_dir, target)

    def clear(self, run_dir: Path) -> None:
        """No such run."""
        shutil.rmtree(run_dir, ignore_errors=True)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _do(self, command: str, **arguments: Any) -> Ended:
        self._number += 1
        folder = self.folder / "ended" / str(self._number)
        folder.mkdir(parents=True)
        assert self._process.stdin is not None
        line = {"command": command, "folder": str(folder), **arguments}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return Ended(folder, int(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def committed(run_dir: Path) -> set[tuple[int, str]]:
    """Stages that exist for a reader."""
    found = run_dir.glob("steps/*/[a-z]*/manifest.json")
    return {(int(path.parts[-3]), path.parts[-2]) for path in found}


def first_of(events: list[tuple[str, str, str]], step: int) -> int:
    """The first event in a step's folder."""
    return next(i for i, event in enumerate(events) if event[2].startswith(f"steps/{step:06d}"))


def materials(folder: Path) -> None:
    """A random model with its tokenizer, prompts, and the reward, below `folder`."""
    from relax.data.tasks import build_model, write_task

    write_task("max3", folder / "task", seed=1)
    build_model(
        folder / "base",
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        seed=1,
    )
    (folder / "reward.py").write_text(REWARD)


def settings(folder: Path, run_dir: Path, **more: Any) -> dict[str, Any]:
    """Three steps of four responses, a checkpoint after each, the newest kept."""
    return {
        "run_dir": str(run_dir),
        "hf_checkpoint": str(folder / "base"),
        "prompt_data": str(folder / "task" / "train.jsonl"),
        "custom_rm_path": f"{folder / 'reward.py'}:reward",
        "num_rollout": NUM_STEPS,
        "rollout_batch_size": NUM_PROMPTS,
        "n_samples_per_prompt": GROUP_SIZE,
        "rollout_max_response_len": 4,
        "lr": 1e-3,
        "save_interval": 1,
        "max_actor_ckpt_to_keep": 1,
        "min_free_gib": 0,
        **more,
    }


def flags(settings: dict[str, Any]) -> list[str]:
    """The same as words of a command line; True needs no value."""
    words = []
    for name, value in settings.items():
        words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return words


def environment(**more: str) -> dict[str, str]:
    """This checkout first, one thread, no log of calls unless asked for."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CRASH_LOG": os.devnull,
        **more,
    }
