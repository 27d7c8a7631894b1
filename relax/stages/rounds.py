"""Dynamic sampling: how many rounds a step has, and where in the prompt stream each begins.

All of it is read from what is committed, so that a step goes on where it was left. Nothing heavy
is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax.config import Config
from relax.stages import STAGES, Stage, is_round, round_row, selection_row
from relax.store import Run, rows

KEPT = "kept"
"""Note of a scored round: groups that its filter let through."""


def is_dynamic(config: Config) -> bool:
    """Whether steps are put together from rounds."""
    return bool(config.rollout.dynamic_sampling_filter_path)


def rounds(config: Config, run: Run, step: int) -> Iterator[int]:
    """The rounds that a step needs, from 1: each is to be sampled and scored before the next.

    Ends when enough groups passed, or at the cap, which `rollout` then reports.
    """
    if not is_dynamic(config):
        return
    kept = 0
    for number in range(1, config.rollout.dynamic_sampling_max_rounds + 1):
        yield number
        scored = run.manifest(step, f"reward.{number}")
        if scored is None:
            return  # the caller only asks what it would run
        kept += scored.notes[KEPT]
        if kept >= config.rollout.rollout_batch_size:
            return


def num_rounds(run: Run, step: int) -> int:
    """Rounds of a step that are sampled and scored."""
    count = 0
    while run.manifest(step, f"reward.{count + 1}") is not None:
        count += 1
    return count


def row_of(run: Run, step: int, name: str) -> Stage:
    """The row of the stage called `name` at `step`, rounds and what is made from them included."""
    if is_round(name):
        return round_row(name)
    if name in ("rollout", "reward") and is_dynamic(run.config):
        return selection_row(name, num_rounds(run, step))
    return STAGES[name]


def round_of(stage: str) -> int:
    """The round of a stage's name, 0 where it is none."""
    return int(stage.partition(".")[2] or 0)


def prompts_per_round(config: Config) -> int:
    """Prompts that a rollout, or a round of it, draws."""
    return config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size


def first_draw(run: Run, step: int, number: int) -> int:
    """Place in the prompt stream where a round begins (round 0: a step without rounds)."""
    if number > 1:
        return _end(run, step, number - 1)
    if number == 1 or step == run.first_step:
        return _end(run, step - 1, num_rounds(run, step - 1)) if step > 0 else 0
    # A fork may draw more or fewer prompts a step than the run that it came from.
    start = first_draw(run, run.first_step, 0)
    return start + (step - run.first_step) * run.config.rollout.rollout_batch_size


def _end(run: Run, step: int, number: int) -> int:
    """Place behind the last prompt of a step's round, of a step without rounds where it is 0."""
    stage = f"rollout.{number}" if number else "rollout"
    return int(rows(run.table(step, stage, "prompts")).cursor[-1]) + 1
