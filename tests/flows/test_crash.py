"""Kill the run before and after everything that it does to the disk; run it again; compare.

The undisturbed run beside it must hold the same bits, and what was committed at the death must not
have been sampled, rewarded or scored a second time.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crash_lab import NUM_STEPS, RESPONSES, Ended, Lab, committed, first_of

pytestmark = pytest.mark.integration
LAST = NUM_STEPS - 1


@dataclass(frozen=True)
class Scene:
    """A directory to start from, and what a run from there does when nobody disturbs it."""

    lab: Lab
    start: Path | None
    settings: dict[str, Any]
    undisturbed: Ended
    holds: dict[str, Any]

    def faults(self, event: int) -> list[str]:
        """Die at `event`, run again: everything that is not as it should be."""
        where = f"{event}: {' '.join(self.undisturbed.events[event])}"
        run_dir = self.lab.folder / "killed"
        self.lab.copy(self.start, run_dir) if self.start else self.lab.clear(run_dir)
        killed = self.lab.run(run_dir, die_at=event, **self.settings)
        assert killed.code == -signal.SIGKILL, f"{where}: not killed\n{killed.output}"
        assert killed.died_at == self.undisturbed.events[event], where
        done = committed(run_dir)
        again = self.lab.run(run_dir, **self.settings)
        if again.code != 0:
            return [f"{where}: does not continue: {again.output}"]
        return [f"{where}: {f}" for f in self._calls(done, again) + self._bits(run_dir)]

    def _calls(self, done: set[tuple[int, str]], again: Ended) -> list[str]:
        """The second run asked for exactly what was not committed, each response once."""
        missing = {step for step in range(NUM_STEPS) if (step, "rollout") not in done}
        wanted = {f"sample {seed}": 1 for step in missing for seed in self.holds["seeds"][step]}
        unrewarded = sum((step, "reward") not in done for step in range(NUM_STEPS))
        if unrewarded:
            wanted["reward"] = unrewarded * RESPONSES
        scored = {step for step in range(NUM_STEPS) if f"{step}-score" in self.holds}
        wanted |= {f"score {n}": RESPONSES for n in scored if (n, "score") not in done}
        calls = dict(again.calls)
        return [] if calls == wanted else [f"asked for {calls}, missing were {wanted}"]

    def _bits(self, run_dir: Path) -> list[str]:
        """Hashes of tables, policies and restored checkpoints, and the names of all files."""
        found = self.lab.inspect(run_dir)
        return [
            f"{name} is {found.get(name)}, undisturbed {wanted}"
            for name, wanted in self.holds.items()
            if found.get(name) != wanted
        ]


def scene(lab: Lab, start: Path | None, **settings: Any) -> Scene:
    run_dir = lab.folder / "undisturbed"
    lab.copy(start, run_dir) if start else lab.clear(run_dir)
    undisturbed = lab.run(run_dir, **settings)
    assert undisturbed.code == 0, undisturbed.output
    return Scene(lab, start, settings, undisturbed, lab.inspect(run_dir))


def at_last_step(lab: Lab, **settings: Any) -> Path:
    """A run that was killed as it began its last step."""
    whole = scene(lab, None, **settings)
    first = first_of(whole.undisturbed.events, LAST)
    run_dir = lab.folder / "at-last-step"
    lab.clear(run_dir)
    assert lab.run(run_dir, die_at=first, **settings).code == -signal.SIGKILL
    return lab.copy(run_dir, lab.folder / "start")


def thinned(events: list[tuple[str, str, str]]) -> list[int]:
    """All but the copying of each source file: of that the first and the last two of a kind."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, (phase, operation, path) in enumerate(events):
        kind = (phase, operation) if path.startswith("code") else (str(i), "")
        kinds.setdefault(kind, []).append(i)
    return sorted({i for found in kinds.values() for i in (found[0], *found[-2:])})


def turning_points(events: list[tuple[str, str, str]]) -> list[int]:
    """Where recovery takes another path: around renames, manifests and removals."""
    return [
        i
        for i, (phase, operation, path) in enumerate(events)
        if operation == "rename"
        or (operation == "remove_tree" and "ATTEMPT" in path and "." not in Path(path).name[0])
        or (operation == "write_file" and path.endswith("manifest.json") and phase == "after")
        or (operation == "make_dir" and "checkpoints" in path and phase == "after")
    ]


def check(found: Scene, events: list[int]) -> None:
    assert events
    faults = [fault for event in events for fault in found.faults(event)]
    assert not faults, "\n".join(faults)


def test_killed_where_recovery_takes_another_path(lab):
    """The last of three steps: earlier steps, an old checkpoint and old policies exist."""
    last = scene(lab, at_last_step(lab))
    events = last.undisturbed.events
    begin = first_of(events, LAST)
    check(last, [i for i in turning_points(events) if i >= begin])


def test_killed_while_a_run_is_created(lab):
    """The first records of a run, its lease and its copy of the code."""
    fresh = scene(lab, None)
    events = fresh.undisturbed.events
    before = events[: first_of(events, 0)]
    check(fresh, [i for i in turning_points(before) if i in thinned(before)])


def test_killed_without_a_checkpoint_redoes_the_updates(lab):
    """No checkpoint before the end: updates 0 and 1 are redone from their advantages."""
    settings = {"save_interval": 0}
    last = scene(lab, at_last_step(lab, **settings), **settings)
    events = last.undisturbed.events
    renames = [i for i, e in enumerate(events) if e[:2] == ("before", "rename")]
    check(last, [i for i in renames if events[i][2].startswith(("policies", "steps/000002"))])


SCORED = {"num_steps_per_rollout": 2}


def test_killed_around_a_score(lab):
    """Two optimizer steps a rollout: what the score committed is not computed again."""
    last = scene(lab, at_last_step(lab, **SCORED), **SCORED)
    assert last.undisturbed.calls[f"score {LAST}"] == RESPONSES
    commits = tuple(f"steps/{LAST:06d}/.staging-{s}-" for s in ("score", "advantage", "update"))
    events = enumerate(last.undisturbed.events)
    check(
        last, [i for i, (_, what, path) in events if what == "rename" and path.startswith(commits)]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_before_and_after_everything_in_a_first_step(lab):
    fresh = scene(lab, None)
    events = fresh.undisturbed.events
    check(fresh, thinned(events[: first_of(events, 1)]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "settings", [{}, {"save_interval": 0}, SCORED], ids=["saved", "unsaved", "scored"]
)
def test_killed_before_and_after_everything_in_a_last_step(lab, settings):
    last = scene(lab, at_last_step(lab, **settings), **settings)
    events = last.undisturbed.events
    check(last, list(range(first_of(events, LAST), len(events))))
