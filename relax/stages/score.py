"""What models say of a step's responses before the update: old, reference and teacher, values.

Shapes: T response positions of one response, K likeliest tokens.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from relax.algorithms import rules
from relax.config import Config
from relax.schema import SCORES
from relax.stages.engines import checked_policy
from relax.stages.metrics import metric_table
from relax.stages.models import given_model
from relax.stages.perform import Inputs, Warm
from relax.stages.training import learners_before, note_drift, trainer_options
from relax.stages.update import response_sequences, update
from relax.store import Output, Run, rows
from relax.trainer.device import free_memory
from relax.trainer.options import TrainerOptions
from relax.trainer.sequences import TrainSequence
from relax.trainer.sharded import ShardedModel

Rows = list[np.ndarray]


def run(config: Config, inputs: Inputs, output: Output, warm: Warm) -> None:
    """Write the table `scores`: the columns that the algorithm and its settings ask for."""
    wanted = rules.scores_needed(config)
    options = trainer_options(config, temperature=config.rollout.rollout_temperature)
    asked, answered = (
        rows(inputs.run.table(inputs.step, "rollout", name)) for name in ("prompts", "responses")
    )
    sequences = response_sequences(asked, answered)
    columns: dict[str, Rows] = {}
    top_k = config.algorithm.opd_log_prob_top_k if "teacher_logp" in wanted else 0
    likeliest = None
    start = time.perf_counter()
    if wanted & {"old_logp", "value"} or top_k:
        learners = learners_before(
            inputs.run,
            inputs.step,
            warm,
            options,
            lambda learners, step: update(learners, config, inputs.run, step, {}),
        )
        note_drift(learners, output)
        if "old_logp" in wanted:
            columns["old_logp"] = learners.actor.logp(sequences, options.temperature)
        if "value" in wanted:
            assert learners.critic is not None
            columns["value"] = learners.critic.values(sequences)
        if top_k:
            likeliest = learners.actor.top_words(sequences, top_k)
    output.measure("seconds/policy", time.perf_counter() - start)
    if "ref_logp" in wanted:
        columns["ref_logp"], _ = frozen(reference_dir(inputs.run, inputs.step), sequences, options)
    if "teacher_logp" in wanted:
        teacher = given_model(inputs.run, "opd_teacher_load")
        columns["teacher_logp"], overlaps = frozen(teacher, sequences, options, likeliest)
        if overlaps:
            columns["top_k_overlap"] = overlaps
    output.write("scores", SCORES.table(sample_id=[s.sample_id for s in sequences], **columns))
    output.write("metrics", metric_table([]))


def reference_dir(run: Run, step: int) -> Path:
    """The model that is the reference at `step`: ref_load, or a policy of this run."""
    version = run.config.reference_version(step)
    return checked_policy(run, version) if version else given_model(run, "reference")


def frozen(
    directory: Path,
    sequences: list[TrainSequence],
    options: TrainerOptions,
    likeliest: Rows | None = None,
) -> tuple[Rows, Rows]:
    """Log-probabilities under a model that is loaded for this call and freed after it.

    And how far its likeliest words are those given for every token (None: an empty list). Models
    of a step are loaded one after another, so that they never share memory.
    """
    model = ShardedModel(directory, options, "logp", use="score")
    logp = model.rows(sequences, "logp", options.temperature)
    overlaps = []
    if likeliest is not None:
        num_top = likeliest[0].shape[1]
        overlaps = model.top_words(
            sequences, num_top, lambda i, theirs_TK: overlap(likeliest[i], theirs_TK)
        )
    del model
    free_memory()
    return logp, overlaps


def overlap(ours_TK: np.ndarray, theirs_TK: np.ndarray) -> np.ndarray:
    """Share of our K likeliest tokens that are among theirs, at each position: float32 [T]."""
    shared_TK = (ours_TK[:, :, None] == theirs_TK[:, None, :]).any(-1)
    return shared_TK.mean(-1, dtype=np.float32)
