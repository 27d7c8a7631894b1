"""wandb, where it is asked for: the metrics table by step, and some samples now and then."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from relax.config import WandbSection
from relax.errors import ConfigError
from relax.store import Manifest, Run, disk, rows
from relax.store.commit import step_dir

RECORD = "wandb.json"
SAMPLES = 16


class Tracker:
    """Logs a step when the stage that ends it is there. A resumed run goes on in the same one.

    RUN/wandb.json holds the wandb run's id and the last step that was logged.
    """

    def __init__(self, settings: WandbSection, root: Path, last_stage: str) -> None:
        self.settings, self.root, self.last_stage = settings, root, last_stage
        self.record: dict[str, Any] = {"id": secrets.token_hex(4), "logged": -1}
        self.wandb_run: Any = None

    def __enter__(self) -> Tracker:
        if not self.settings.use_wandb:
            return self
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                "wandb.use_wandb = True: wandb is not installed; pip install 'relax-rl[wandb]'"
            ) from None
        self.root.mkdir(parents=True, exist_ok=True)
        if (self.root / RECORD).exists():
            self.record = json.loads((self.root / RECORD).read_text())
        self.wandb_run = wandb.init(
            id=self.record["id"],
            resume="allow",
            mode=self.settings.wandb_mode,
            project=self.settings.wandb_project,
            name=self.settings.wandb_name or self.root.name,
            dir=str(self.root),
            settings=wandb.Settings(silent=True, disable_git=True, x_disable_stats=True),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.wandb_run is not None:
            self.wandb_run.finish(exit_code=0 if error is None else 1)

    def report(self, root: Path, manifest: Manifest, reused: bool) -> None:
        """One finished stage."""
        del reused
        ends_step = manifest.stage == self.last_stage
        if self.wandb_run is None or not ends_step or manifest.step <= self.record["logged"]:
            return
        run = Run.open(root)
        logged: dict[str, Any] = metrics_of(run, manifest.step)
        interval = self.settings.wandb_samples_interval
        if interval and manifest.step % interval == 0:
            logged |= self._samples(run, manifest.step)
        self.wandb_run.log(logged, step=manifest.step)
        self.record["logged"] = manifest.step
        scratch = root / f".{RECORD}"
        disk.write_bytes(scratch, json.dumps(self.record).encode())
        disk.rename(scratch, root / RECORD)

    def _samples(self, run: Run, step: int) -> dict[str, Any]:
        """A table of the step's first responses with their rewards."""
        if run.manifest(step, "reward") is None:
            return {}
        import wandb

        response = rows(run.table(step, "rollout", "responses"))
        prompt = rows(run.table(step, "rollout", "prompts"))
        reward = rows(run.table(step, "reward", "rewards")).reward
        text_of = dict(zip(prompt.group_id.tolist(), prompt.prompt, strict=True))
        lines = [
            [text_of[int(response.group_id[i])], response.response[i], float(reward[i])]
            for i in range(min(SAMPLES, len(reward)))
        ]
        return {"samples": wandb.Table(columns=["prompt", "response", "reward"], data=lines)}


def metrics_of(run: Run, step: int) -> dict[str, float]:
    """All metrics of a step by name; the mean over its optimizer steps."""
    found: dict[str, list[float]] = defaultdict(list)
    for folder in sorted(step_dir(run.root, step).glob("[a-z]*")):
        manifest = run.manifest(step, folder.name)
        if manifest is not None and "metrics" in manifest.tables:
            table = rows(run.table(step, folder.name, "metrics"))
            for name, value in zip(table.metric, table.value.tolist(), strict=True):
                found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}
