"""wandb, where it is asked for: the metrics tables by step, and some samples now and then.

`step` is a metric that the others are drawn over, not wandb's own counter: that one only goes
forward, and drops what `relax train` has to say of a step after `relax evaluate` logged there.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from relax.config import WandbSection
from relax.errors import ConfigError
from relax.stages import is_round
from relax.store import Manifest, Run, disk, rows

RECORD = "wandb.json"
STEP = "step"
SAMPLES = 16


class Tracker:
    """Logs an evaluation once it is there, and the rest of a step with the stage that ends it.

    A resumed run goes on in the same wandb run. RUN/wandb.json holds that one's id, the last step
    that was logged and the evaluations that were.
    """

    def __init__(self, settings: WandbSection, root: Path, last_stage: str) -> None:
        self.settings, self.root, self.last_stage = settings, root, last_stage
        self.record: dict[str, Any] = {"id": secrets.token_hex(4), "logged": -1, "evaluated": []}
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
            self.record |= json.loads((self.root / RECORD).read_text())
        self.wandb_run = wandb.init(
            id=self.record["id"],
            resume="allow",
            mode=self.settings.wandb_mode,
            project=self.settings.wandb_project,
            name=self.settings.wandb_name or self.root.name,
            dir=str(self.root),
            settings=wandb.Settings(silent=True, disable_git=True, x_disable_stats=True),
        )
        self.wandb_run.define_metric("*", step_metric=STEP)
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
        step = manifest.step
        if self.wandb_run is None:
            return
        if manifest.stage == "evaluate" and step not in self.record["evaluated"]:
            logged = metrics_of(Run.open(root), step, ["evaluate"])
            self.record["evaluated"].append(step)
        elif manifest.stage == self.last_stage != "evaluate" and step > self.record["logged"]:
            logged = self._step(Run.open(root), step)
            self.record["logged"] = step
        else:
            return
        self.wandb_run.log({STEP: step, **logged})
        disk.write_whole(root / RECORD, json.dumps(self.record).encode())

    def _step(self, run: Run, step: int) -> dict[str, Any]:
        """All of a step but its evaluation; what rounds drew stands in its rollout and reward."""
        stages = [name for _, name, _ in run.stages(step) if not is_round(name)]
        logged: dict[str, Any] = metrics_of(run, step, [n for n in stages if n != "evaluate"])
        interval = self.settings.wandb_samples_interval
        return logged | (self._samples(run, step) if interval and step % interval == 0 else {})

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


def metrics_of(run: Run, step: int, stages: Iterable[str]) -> dict[str, float]:
    """All metrics of some stages of a step by name; the mean over their optimizer steps."""
    found: dict[str, list[float]] = defaultdict(list)
    for stage in stages:
        manifest = run.manifest(step, stage)
        if manifest is not None and "metrics" in manifest.tables:
            table = rows(run.table(step, stage, "metrics"))
            for name, value in zip(table.metric, table.value.tolist(), strict=True):
                found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}
