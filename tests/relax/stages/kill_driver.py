"""Runs rollouts in children that are killed at a given place: `kill_driver.py JSON`, JSON out.

For each place a child performs the stage, writes a marker there, forces it to the disk and sends
itself SIGKILL; a second child finishes the stage. What each sampled is logged by its seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import transformers.models.auto.tokenization_auto  # noqa: F401  (before the fork)
from rollout_cases import begin

import relax.stages.rollout  # noqa: F401
from relax.engines.embedded import TransformersEngine
from relax.stages.perform import perform
from relax.store import disk
from relax.store.run import Run


def die(marker: Path, where: str) -> None:
    with marker.open("w") as file:
        file.write(where)
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)


def sampling(log: Path, kill_in: int | None, marker: Path) -> None:
    """Log the seeds of every call; die in the middle of call number `kill_in`."""
    whole, calls = TransformersEngine.sample, []

    def sample(self, requests, params):
        calls.append(1)
        done = whole(self, requests, params)
        if len(calls) - 1 == kill_in:
            die(marker, f"sampling call {kill_in}")
        with log.open("a") as file:
            file.writelines(f"{request.seed}\n" for request in requests)
        return done

    TransformersEngine.sample = sample


def renaming(name: str, phase: str, marker: Path) -> None:
    """Die before or after the rename that commits the directory `name`."""
    whole = disk.rename

    def rename(source, target):
        if target.name == name and phase == "before":
            die(marker, f"before rename of {name}")
        whole(source, target)
        if target.name == name and phase == "after":
            die(marker, f"after rename of {name}")

    disk.rename = rename


def child(run_dir: str, folder: Path, log: str, place: list | None) -> int:
    """The stage in a process of its own; its exit status."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            kind, where, *phase = place or ("sampling", None)
            sampling(folder / log, where if kind == "sampling" else None, folder / "marker")
            if kind == "renaming":
                renaming(where, *phase, folder / "marker")
            perform(run_dir, 0, "rollout", f"{log}-{os.getpid()}")
            code = 0
        except BaseException as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def parts_of(run_dir: Path) -> list[str]:
    """Shards that are whole, and a stage that is."""
    found = run_dir.glob("steps/000000/.rollout.parts/*/[0-9]*/manifest.json")
    return sorted(path.parent.name for path in found)


def facts(run_dir: Path) -> dict:
    manifest = Run.open(run_dir).committed(0, "rollout")
    folder = run_dir / "steps" / "000000"
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "rollout").glob("*.arrow")
    }
    return {
        "key": manifest.key,
        "content": manifest.content,
        "files": files,
        "left": sorted(path.name for path in folder.iterdir()),
    }


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def one(settings: dict, folder: Path, place: list | None) -> dict:
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    begin({**settings, "run_dir": str(run_dir)})
    found: dict = {}
    if place is not None:
        found["first"] = child(str(run_dir), folder, "first", place)
        found["marker"] = (folder / "marker").read_text()
        found["kept"] = parts_of(run_dir)
        found["first sampled"] = lines(folder / "first")
    found["second"] = child(str(run_dir), folder, "second", None)
    found["second sampled"] = lines(folder / "second")
    found |= facts(run_dir)
    shutil.rmtree(run_dir)
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    places = [None, *asked["places"]]
    print(json.dumps([one(asked["settings"], folder / str(i), p) for i, p in enumerate(places)]))


if __name__ == "__main__":
    main()
