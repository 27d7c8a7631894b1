"""The stages: what each reads, what it follows, where its code is. Nothing heavy is imported.

A stage's key is made of exactly what its row names; change what a stage computes, raise `code`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """One row: the stage called `name`."""

    name: str
    entry: str
    code: int
    reads: tuple[str, ...]
    """Sections of the configuration that its result depends on."""
    writes: tuple[str, ...]
    """Tables it writes, and `policy` where it publishes one."""
    after: tuple[str, ...] = ()
    """Stages of the same step whose tables it reads (`score` only where there is one)."""
    sources: tuple[str, ...] = ()
    """Files it reads: names of Run.sources, or `policy` for the policy of its step."""
    continues: str = ""
    """The stage of the step before that it goes on from."""
    runs_on: Literal["rank 0", "every rank"] = "rank 0"
    """Which ranks of a job compute it; the others wait."""


STAGES: dict[str, Stage] = {
    row.name: row
    for row in (
        Stage(
            "rollout",
            "relax.stages.rollout:run",
            code=2,
            reads=("run", "seeds", "data", "rollout"),
            writes=("prompts", "responses", "metrics"),
            sources=("policy", "tokenizer", "prompts", "custom_generate_function_path"),
        ),
        Stage(
            "reward",
            "relax.stages.reward:run",
            code=2,
            reads=("rollout", "reward"),
            writes=("rewards", "metrics"),
            after=("rollout",),
            sources=("custom_rm_path", "custom_reward_post_process_path"),
        ),
        Stage(
            "score",
            "relax.stages.score:run",
            code=2,
            reads=("run", "seeds", "rollout", "update"),
            writes=("scores", "metrics"),
            after=("rollout",),
            sources=("columns", "model", "reference", "opd_teacher_load", "critic_load"),
            continues="update",
            runs_on="every rank",
        ),
        Stage(
            "advantage",
            "relax.stages.advantage:run",
            code=2,
            reads=("algorithm",),
            writes=("advantages", "metrics"),
            after=("rollout", "reward", "score"),
            sources=("custom_advantage_path",),
        ),
        Stage(
            "update",
            "relax.stages.update:run",
            code=4,
            reads=("run", "seeds", "rollout", "algorithm", "update"),
            writes=("metrics", "policy"),
            after=("rollout", "reward", "score", "advantage"),
            sources=("model", "critic_load", "schedule", "custom_loss_path"),
            continues="update",
            runs_on="every rank",
        ),
        Stage(
            "evaluate",
            "relax.stages.evaluate:run",
            code=2,
            reads=("run", "seeds", "data", "rollout", "reward", "evaluate"),
            writes=("evals", "metrics"),
            sources=(
                "policy",
                "tokenizer",
                "eval_prompts",
                "custom_rm_path",
                "custom_generate_function_path",
            ),
        ),
        Stage(
            "sft",
            "relax.stages.sft:run",
            code=2,
            reads=("run", "seeds", "data", "update", "sft"),
            writes=("metrics", "policy"),
            sources=("model", "tokenizer", "prompts", "schedule"),
            continues="sft",
            runs_on="every rank",
        ),
    )
}


def is_round(name: str) -> bool:
    """Whether it is a round of dynamic sampling: `rollout.2` or `reward.2`."""
    return "." in name


def round_row(name: str) -> Stage:
    """The row of a round: that of its stage, after the rounds that it goes on from."""
    stage, number = name.split(".")
    row = STAGES[stage]
    if stage == "rollout":
        before = (f"rollout.{int(number) - 1}",) if int(number) > 1 else ()
        return replace(row, name=name, after=before)
    return replace(
        row,
        name=name,
        entry="relax.stages.selection:reward_round",
        writes=(*row.writes, "candidates"),
        after=tuple(f"{above}.{number}" for above in row.after),
        sources=(*row.sources, "dynamic_sampling_filter_path"),
    )


def selection_row(name: str, num_rounds: int) -> Stage:
    """The row of `rollout` or `reward` where a step is put together from rounds."""
    numbers = range(1, num_rounds + 1)
    scored = tuple(f"reward.{n}" for n in numbers)
    after = {"rollout": tuple(f"rollout.{n}" for n in numbers), "reward": ("rollout",)}[name]
    return Stage(
        name,
        f"relax.stages.selection:{name}",
        code=1,
        reads=("rollout",),
        writes=STAGES[name].writes,
        after=(*after, *scored),
    )
