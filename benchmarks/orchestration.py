"""Seconds from "stage i committed" to "stage i+1's code runs", for each way to place stages.

    python benchmarks/orchestration.py [--steps 3] [--prefect] [--modes inline local ...]

A tiny run per mode: inline, same (a step's stages in one local job), local (a job a stage), slurm
(the same on the cluster that SLURM_CONF names, or the tests' own, started and stopped). `code
runs` is the entry of relax.stages.perform in the process that computes; commit is the rename of
the stage's directory. A job's gap holds interpreter start and imports; sbatch's own share is
measured beside it with a script that only writes the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax.data.tasks import build_model, build_tokenizer, write_task
from relax.flags import load_config
from relax.store import Run
from relax.store.commit import step_dir
from tasks.stage import perform

ORDER = ("rollout", "reward", "advantage", "update")
ALL = {f"{stage}_allocation": "all" for stage in ORDER}
MODES: dict[str, dict[str, Any]] = {
    "inline": {},
    "same": {"placement": "job", "allocations": {"all": {"minutes": 10}}, **ALL},
    "local": {"placement": "job"},
    "slurm": {"placement": "job", "executor": "slurm"},
}
TARGETS = {"inline": 0.030, "same": 0.050, "slurm": 1.5}
"""Seconds; `same` counts the gaps inside a job, `slurm` what is over sbatch's own time."""


def main() -> None:
    """Run the modes and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prefect", action="store_true", help="through the Prefect flow")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, cluster("slurm" in given.modes):
        base = prepare(Path(scratch))
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        own = sbatch_s(Path(scratch)) if "slurm" in given.modes else 0.0
        for mode in given.modes:
            run, cpu_s = trained(base, Path(scratch) / mode, mode, given.steps, given.prefect)
            tell(mode, gaps(run, given.steps, mode), cpu_s / (4 * given.steps), own)


def prepare(root: Path) -> dict[str, Any]:
    """A model of hidden size 32 and its prompts; the settings that all modes share."""
    write_task("max3", root, seed=1)
    build_tokenizer(root / "base")
    build_model(root / "base", seed=1, hidden_size=32)
    return {
        "hf_checkpoint": str(root / "base"),
        "prompt_data": str(root / "train.jsonl"),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 4,
        "min_free_gib": 0,
    }


def trained(
    base: dict[str, Any], root: Path, mode: str, steps: int, with_prefect: bool
) -> tuple[Run, float]:
    """The run of a mode, and the CPU seconds that the flow's process took for it."""
    from flows import train

    overrides = {**base, **MODES[mode], "run_dir": str(root), "num_rollout": steps}
    before = cpu_seconds()
    if with_prefect:
        train.train(overrides=overrides)
    else:
        train.run(load_config(None, overrides), perform)
    return Run.open(root), cpu_seconds() - before


def gaps(run: Run, steps: int, mode: str) -> list[float]:
    """Seconds between each commit and the next stage's start, the first step left out."""
    found = []
    places = [(step, stage) for step in range(steps) for stage in ORDER]
    for before, after in itertools.pairwise(places):
        inside = before[0] == after[0]
        if after[0] == 0 or (mode == "same" and not inside):
            continue
        committed = (step_dir(run.root, before[0]) / before[1]).stat().st_ctime
        timing = {m: v for m, v, _ in run.committed(*after).timing}
        found.append(timing["started"] - committed)
    return found


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sbatch_s(root: Path, repeats: int = 5) -> float:
    """Median seconds from calling sbatch to the first line of its script."""
    found = []
    for number in range(repeats):
        script, told = root / "empty.sh", root / f"told-{number}"
        script.write_text(f"#!/bin/bash\nsrun bash -c 'date +%s.%N' > {told}.part\n")
        start = time.time()
        words = ["sbatch", "--wait", "-t", "1", "--mem=100M", "-o", "/dev/null", str(script)]
        subprocess.run(words, check=True, capture_output=True)
        found.append(float(Path(f"{told}.part").read_text()) - start)
    return statistics.median(found)


def tell(mode: str, found: list[float], cpu_s: float, own: float) -> None:
    """One line: median, worst, CPU of the flow per stage, and the target where there is one."""
    median = statistics.median(found)
    line = f"{mode:7} median {median * 1e3:7.1f} ms  worst {max(found) * 1e3:7.1f} ms"
    line += f"  n {len(found):2}  flow CPU per stage {cpu_s * 1e3:6.1f} ms"
    if mode == "slurm":
        line += f"  sbatch's own {own * 1e3:.0f} ms, over it {(median - own) * 1e3:.0f} ms"
        median -= own
    if mode in TARGETS:
        verdict = "within" if median <= TARGETS[mode] else "OVER"
        line += f"  {verdict} the target of {TARGETS[mode] * 1e3:.0f} ms"
    print(line)


@contextmanager
def cluster(needed: bool) -> Iterator[None]:
    """The cluster that the environment names, else the tests' own for the time being."""
    if not needed or "SLURM_CONF" in os.environ:
        yield
        return
    path = Path(__file__).parents[1] / "tests" / "cluster" / "lab.py"
    spec = importlib.util.spec_from_file_location("lab", path)
    assert spec is not None and spec.loader is not None
    lab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab)
    lab.install()
    lab.start()
    os.environ.update(lab.environment())
    try:
        yield
    finally:
        lab.stop()


if __name__ == "__main__":
    main()
