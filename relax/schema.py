"""Every Arrow column of the project: name, type, unit, meaning. No column is named anywhere else.

Tables are made with `TABLE.table(column=values, ...)` and read back as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 2

ID, COUNT, REAL, TEXT = pa.int64(), pa.int32(), pa.float64(), pa.string()
TOKENS, REALS, BOOLS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, its unit ("" where it has none) and what it means."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """One kind of Arrow file."""

    name: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema; kind and version travel in the file."""
        kind = {"relax.table": self.name, "relax.version": str(SCHEMA_VERSION)}
        fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns]
        return pa.schema(fields, metadata=kind)

    def table(self, **columns: Sequence[Any] | np.ndarray) -> pa.Table:
        """A table of this kind, one keyword argument a column; nullable ones may be left out."""
        empty = [None] * len(next(iter(columns.values())))
        unknown = columns.keys() - {c.name for c in self.columns}
        assert not unknown, f"{self.name}: unknown columns {sorted(unknown)}"
        arrays = [
            pa.array(columns.get(c.name, empty) if c.nullable else columns[c.name], c.type)
            for c in self.columns
        ]
        return pa.Table.from_arrays(arrays, schema=self.schema)


SAMPLE = Column("sample_id", ID, "", "step * 1,000,000 + place of the response in its step")
GROUP = Column("group_id", ID, "", "step * 1,000,000 + place of the prompt in its step")
IDS_PER_STEP = 1_000_000

PROMPT = Column("prompt_id", ID, "", "row of the prompt in the prompt source, from 0")
TEXT_OF_PROMPT = Column("prompt", TEXT, "", "the prompt as the tokenizer got it")
TOKENS_OF_PROMPT = Column("prompt_tokens", TOKENS, "token ids", "the prompt's tokens")
LABEL = Column("label", TEXT, "", "the right answer, as the prompt source gives it")

SOURCE_PROMPTS = Table("source_prompts", (PROMPT, TEXT_OF_PROMPT, TOKENS_OF_PROMPT, LABEL))
"""All prompts of a source: no table of a stage, what a run keeps of the source for its jobs."""

PROMPTS = Table(
    "prompts",
    (
        GROUP,
        PROMPT,
        Column("epoch", COUNT, "", "pass over the prompt source, from 0"),
        Column("position", ID, "", "place in that epoch's order, from 0"),
        Column("cursor", ID, "", "place in the stream of all epochs: prompts drawn before it"),
        TEXT_OF_PROMPT,
        TOKENS_OF_PROMPT,
        Column("prompt_len", COUNT, "tokens", "length of the prompt"),
        LABEL,
    ),
)

RESPONSES = Table(
    "responses",
    (
        SAMPLE,
        GROUP,
        Column("sample_index", COUNT, "", "place of the response in its group, from 0"),
        Column("policy_version", COUNT, "", "policy that sampled: k was published by update k - 1"),
        Column("seed", ID, "", "sampling seed, a function of run seed, step, prompt and index"),
        Column("response", TEXT, "", "the response, special tokens left out"),
        Column("tokens", TOKENS, "token ids", "the response's tokens, end token included"),
        Column("mask", BOOLS, "", "true where the policy sampled the token and it counts"),
        Column("rollout_logp", REALS, "nats", "log-probability of each token, by the engine"),
        Column("response_len", COUNT, "tokens", "valid tokens of the response"),
        Column("rollout_logp_sum", REAL, "nats", "sum of rollout_logp over valid tokens"),
        Column("finish_reason", TEXT, "", "stop: an end token or text; length: the limit"),
        Column("truncated", pa.bool_(), "", "true where the limit cut the response"),
        Column("num_turns", COUNT, "", "times the policy was asked: 1, or more with tools"),
        Column(
            "full_support",
            pa.bool_(),
            "",
            "true: sampled from the distribution that rollout_logp is of; "
            "false: from its top-p, top-k or min-tokens part",
        ),
    ),
)

CANDIDATES = Table(
    "candidates",
    (
        GROUP,
        Column("round", COUNT, "", "round of dynamic sampling that drew the group, from 1"),
        Column("prompt_id", ID, "", "row of the prompt in the prompt source, from 0"),
        Column("epoch", COUNT, "", "pass over the prompt source, from 0"),
        Column("cursor", ID, "", "place in the stream of all epochs"),
        Column("reward_mean", REAL, "", "mean reward of the group"),
        Column("reward_min", REAL, "", "lowest reward of the group"),
        Column("reward_max", REAL, "", "highest reward of the group"),
        Column("passed", pa.bool_(), "", "whether the filter let the group through"),
        Column("reason", TEXT, "", "why not: the filter, and too easy or too hard; empty: passed"),
    ),
)

REWARDS = Table(
    "rewards",
    (
        SAMPLE,
        GROUP,
        Column("raw_reward", REAL, "", "what the verifier gave"),
        Column("reward", REAL, "", "the reward after post-processing: what advantages are made of"),
    ),
)

SCORES = Table(
    "scores",
    (
        SAMPLE,
        Column("old_logp", REALS, "nats", "log-probabilities before the updates", True),
        Column("ref_logp", REALS, "nats", "log-probabilities of the reference model", True),
        Column("teacher_logp", REALS, "nats", "log-probabilities of the teacher", True),
        Column("value", REALS, "", "the critic's values", True),
        Column("top_k_overlap", REALS, "", "share of the k likeliest tokens as the teacher", True),
    ),
)

ADVANTAGES = Table(
    "advantages",
    (
        SAMPLE,
        GROUP,
        Column("advantage", pa.float32(), "", "advantage; its mean where tokens differ"),
        Column("token_advantage", REALS, "", "per token, where tokens differ", True),
        Column("token_return", REALS, "", "what the critic's values are fitted to", True),
    ),
)

EVALS = Table(
    "evals",
    (
        Column("eval_name", TEXT, "", "which evaluation"),
        Column("decoding", TEXT, "", "sampled or greedy"),
        Column("policy_version", COUNT, "", "policy that answered"),
        Column("prompt_id", ID, "", "row of the prompt in the evaluation's source, from 0"),
        Column("sample_index", COUNT, "", "which of the prompt's answers, from 0"),
        Column("prompt", TEXT, "", "the prompt as the tokenizer got it"),
        Column("response", TEXT, "", "the answer"),
        Column("label", TEXT, "", "the right answer"),
        Column("reward", REAL, "", "what the verifier gave"),
        Column("response_len", COUNT, "tokens", "length of the answer"),
        Column("finish_reason", TEXT, "", "stop or length"),
    ),
)

METRICS = Table(
    "metrics",
    (
        Column("optimizer_step", COUNT, "", "optimizer step within the stage, from 0"),
        Column("metric", TEXT, "", "name, such as train/loss"),
        Column("value", REAL, "", "its value"),
    ),
)

TIMING = Table(
    "timing",
    (
        Column(
            "measure",
            TEXT,
            "",
            "what was measured: seconds/..., tokens/..., started, host; trainer/...: of rank 0, "
            "seconds and rates over all optimizer steps of the rollout",
        ),
        Column("value", REAL, "as the measure says", "clock- and machine-dependent number", True),
        Column("text", TEXT, "", "machine-dependent text", True),
    ),
)

TABLES = {
    t.name: t
    for t in (
        PROMPTS,
        RESPONSES,
        CANDIDATES,
        REWARDS,
        SCORES,
        ADVANTAGES,
        EVALS,
        METRICS,
        TIMING,
    )
}

# --- views: what `relax sql` offers over the tables above; its queries are in relax/analytics ----

RUN = Column("run", TEXT, "", "name of the run's directory")
STEP = Column("step", ID, "", "step of the run, from 0")
STAGE = Column("stage", TEXT, "", "stage that committed it")


def columns_beside(table: Table, *keys: Column) -> tuple[Column, ...]:
    """What a table that is joined by `keys` adds: its other columns."""
    return tuple(c for c in table.columns if c not in keys)


MEAN_REWARD = Column("reward", REAL, "", "mean reward, as post-processed", True)
MEAN_RAW = Column("raw_reward", REAL, "", "mean of what the verifier gave", True)
MEAN_LEN = Column("response_len", REAL, "tokens", "mean length of the responses")
NUM_RESPONSES = Column("responses", ID, "", "number of responses")

VIEWS = {
    view.name: view
    for view in (
        Table(
            "responses",
            (
                RUN,
                STEP,
                *RESPONSES.columns,
                *columns_beside(PROMPTS, GROUP),
                *columns_beside(REWARDS, SAMPLE, GROUP),
                *columns_beside(ADVANTAGES, SAMPLE, GROUP),
                *columns_beside(SCORES, SAMPLE),
            ),
        ),
        Table(
            "groups",
            (
                RUN,
                STEP,
                GROUP,
                *(
                    c
                    for c in PROMPTS.columns
                    if c.name in ("prompt_id", "epoch", "prompt", "label")
                ),
                NUM_RESPONSES,
                MEAN_RAW,
                MEAN_REWARD,
                Column("reward_min", REAL, "", "lowest reward of the group", True),
                Column("reward_max", REAL, "", "highest reward of the group", True),
                MEAN_LEN,
                Column("has_signal", pa.bool_(), "", "whether its rewards differ", True),
            ),
        ),
        Table(
            "steps",
            (
                RUN,
                STEP,
                Column("policy_version", COUNT, "", "oldest policy that sampled in the step"),
                NUM_RESPONSES,
                Column("tokens", ID, "tokens", "valid tokens of all responses"),
                MEAN_RAW,
                MEAN_REWARD,
                MEAN_LEN,
                Column("truncated", REAL, "", "share of responses that the limit cut"),
                Column("logp", REAL, "nats", "mean log-probability of a token as sampled", True),
            ),
        ),
        Table("metrics", (RUN, STEP, STAGE, *METRICS.columns)),
        Table("timing", (RUN, STEP, STAGE, *TIMING.columns)),
        Table("prompts", (RUN, STEP, *PROMPTS.columns)),
        Table(
            "candidates",
            (RUN, STEP, *CANDIDATES.columns, Column("fate", TEXT, "", "trained, or why not")),
        ),
        Table("evals", (RUN, STEP, *EVALS.columns)),
        Table(
            "jobs",
            (
                RUN,
                STEP,
                Column("stage", TEXT, "", "stage that was attempted"),
                Column("attempt", TEXT, "", "name of the attempt"),
                Column("job_id", TEXT, "", "SLURM job or process; empty: in the flow", True),
                Column("committed", pa.bool_(), "", "whether this attempt made the stage"),
                Column("host", TEXT, "", "machine it ran on", True),
                Column("started", pa.timestamp("s"), "UTC", "when it started", True),
                Column("seconds", REAL, "s", "how long it took", True),
                Column("state", TEXT, "", "of its job: COMPLETED, FAILED, CANCELLED ...", True),
                Column("queue_s", REAL, "s", "its job waited in the queue", True),
                Column("run_s", REAL, "s", "its job ran, all its stages and restarts", True),
                Column("gpus", COUNT, "", "GPUs of its job", True),
                Column("gpu_s", REAL, "GPU s", "its job's run_s times its GPUs", True),
                Column("num_nodes", COUNT, "", "nodes of its job", True),
                Column("restarts", COUNT, "", "times its job was requeued", True),
            ),
        ),
    )
}
