"""The stages: what each reads, what it follows, where its code is. Nothing heavy is imported.

A stage's key is made of exactly what its row names; change what a stage computes, raise `code`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """One row: the stage called `name`."""

    name: str
    entry: str
    code: int
    reads: tuple[str, ...]
    """Sections of the configuration that its result depends on."""
    after: tuple[str, ...] = ()
    """Stages of the same step whose tables it reads."""
    sources: tuple[str, ...] = ()
    """Files it reads: names of Run.sources, or `policy` for the policy of its step."""
    continues: bool = False
    """Whether it goes on from the update before it."""
    runs_on: Literal["rank 0", "every rank"] = "rank 0"
    """Which ranks of a job compute it; the others wait."""
    numerics: Literal["torch", "python"] = "torch"
    """What computes; a stage without tensors starts seconds sooner."""


STAGES: dict[str, Stage] = {
    row.name: row
    for row in (
        Stage(
            "rollout",
            "relax.stages.rollout:run",
            code=1,
            reads=("run", "seeds", "data", "rollout"),
            sources=("policy", "tokenizer", "prompts"),
        ),
        Stage(
            "reward",
            "relax.stages.reward:run",
            code=1,
            reads=("reward",),
            after=("rollout",),
            sources=("custom_rm_path",),
            numerics="python",
        ),
        Stage(
            "advantage",
            "relax.stages.advantage:run",
            code=1,
            reads=("algorithm",),
            after=("rollout", "reward"),
        ),
        Stage(
            "update",
            "relax.stages.update:run",
            code=1,
            reads=("run", "seeds", "rollout", "algorithm", "update"),
            after=("rollout", "reward", "advantage"),
            sources=("model", "schedule"),
            continues=True,
            runs_on="every rank",
        ),
        Stage(
            "evaluate",
            "relax.stages.evaluate:run",
            code=1,
            reads=("run", "seeds", "data", "rollout", "reward", "evaluate"),
            sources=("policy", "tokenizer", "eval_prompts", "custom_rm_path"),
        ),
        Stage(
            "sft",
            "relax.stages.sft:run",
            code=1,
            reads=("run", "seeds", "data", "update", "sft"),
            sources=("model", "tokenizer", "prompts", "schedule"),
            continues=True,
            runs_on="every rank",
        ),
    )
}
