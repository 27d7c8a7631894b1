"""The models that a run is given, where this process reads them from."""

from __future__ import annotations

from pathlib import Path

from relax.store import Run
from relax.store.local import local_model


def given_model(run: Run, source: str) -> Path:
    """Directory of a given model by its name in Run.sources, the node's own copy where asked."""
    settings = run.config.model
    directory = {
        "model": settings.hf_checkpoint,
        "reference": settings.ref_load,
        "critic_load": settings.critic_load,
        "opd_teacher_load": settings.opd_teacher_load,
    }[source]
    if not run.config.slurm.local_models:
        return Path(directory)
    return local_model(Path(directory), run.sources[source])
