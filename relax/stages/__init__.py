"""The stages: what each reads, what it follows, where its code is. Nothing heavy is imported.

A stage's key is made of exactly what its row names; change what a stage computes, raise `code`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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


STAGES: dict[str, Stage] = {
    row.name: row
    for row in (
        Stage(
            "rollout",
            "relax.stages.rollout:run",
            code=2,
            reads=("run", "seeds", "data", "rollout"),
            sources=("policy", "tokenizer", "prompts", "custom_generate_function_path"),
        ),
        Stage(
            "reward",
            "relax.stages.reward:run",
            code=2,
            reads=("rollout", "reward"),
            after=("rollout",),
            sources=("custom_rm_path", "custom_reward_post_process_path"),
        ),
        Stage(
            "advantage",
            "relax.stages.advantage:run",
            code=2,
            reads=("algorithm",),
            after=("rollout", "reward"),
            sources=("custom_advantage_path",),
        ),
        Stage(
            "update",
            "relax.stages.update:run",
            code=2,
            reads=("run", "seeds", "rollout", "algorithm", "update"),
            after=("rollout", "reward", "advantage"),
            sources=("model", "schedule", "custom_loss_path"),
            continues=True,
        ),
        Stage(
            "evaluate",
            "relax.stages.evaluate:run",
            code=2,
            reads=("run", "seeds", "data", "rollout", "reward", "evaluate"),
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
            code=1,
            reads=("run", "seeds", "data", "update", "sft"),
            sources=("model", "tokenizer", "prompts", "schedule"),
            continues=True,
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
        after=(*after, *scored),
    )
