"""Content hashes of everything that a run reads and that is not in it."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from relax.config import Config, ModelSection
from relax.data.rows import content_hash
from relax.stages import STAGES
from relax.stages.functions import FUNCTIONS, source_of
from relax.store.fingerprint import model_fingerprint, tokenizer_hash

EVALUATION = {*STAGES["evaluate"].sources, "model"}


def fingerprints(config: Config, wanted: Container[str] | None = None) -> dict[str, str]:
    """Name of a source -> its hash, of all or of those `wanted`; "" for a function not given."""
    makers: dict[str, Callable[[], str]] = {
        "model": partial(model_fingerprint, config.model.hf_checkpoint),
        "tokenizer": partial(tokenizer_hash, config.model.hf_checkpoint),
        "prompts": partial(content_hash, config.data.prompt_data),
    }
    if path := config.evaluate.eval_prompt_data:
        makers["eval_prompts"] = partial(content_hash, path)
    for name, directory in other_models(config.model).items():
        makers[name] = partial(model_fingerprint, directory)
    for name in FUNCTIONS:
        makers[name] = partial(source_of, config, name)
    return {name: make() for name, make in makers.items() if wanted is None or name in wanted}


def other_models(settings: ModelSection) -> dict[str, str]:
    """The models beside the one that is trained: name of the source -> directory."""
    given = {
        "reference": settings.ref_load,
        "opd_teacher_load": settings.opd_teacher_load,
        "critic_load": settings.critic_load,
    }
    return {name: directory for name, directory in given.items() if directory}
