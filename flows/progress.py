"""The live display: step, reward, length, tokens per second, time left; plain lines in a log."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from relax.schema import TABLES
from relax.store import Manifest, read_table, rows
from relax.store.commit import step_dir

SHOWN = {
    "rollout/raw_reward": ("reward", "{:.3f}"),
    "rollout/response_len/mean": ("length", "{:.1f}"),
    "sft/loss": ("loss", "{:.3f}"),
    "train/grad_norm": ("grad", "{:.2f}"),
}
LINE_EVERY_S = 10.0


class Progress:
    """Told of every finished stage by the session; draws on a terminal, writes lines elsewhere."""

    def __init__(self, num_steps: int, last_stage: str) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.num_steps, self.last_stage = num_steps, last_stage
        self.computed, self.reused = 0, 0
        self.shown: dict[str, str] = {}
        self._spoke = 0.0
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        word, total = ("policy", 1) if last_stage == "evaluate" else ("step", num_steps)
        self.task = self.bar.add_task(word, total=total, numbers="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, first_step: int) -> None:
        """Steps before it are another run's."""
        if self.last_stage != "evaluate":
            self.bar.reset(self.task, completed=first_step)

    def report(self, root: Path, manifest: Manifest, reused: bool) -> None:
        """One finished stage."""
        self.reused, self.computed = self.reused + reused, self.computed + (not reused)
        if not reused:
            self._read(root, manifest)
        ends_step = manifest.stage == self.last_stage
        self.bar.update(self.task, advance=1 if ends_step else 0, numbers=self.numbers())
        if ends_step and not reused:
            if manifest.stage == "evaluate":
                self.console.print(f"policy {manifest.step}: {self.numbers()}")
            elif not self.console.is_terminal:
                self._line(manifest.step)

    def numbers(self) -> str:
        """The latest numbers in one line."""
        return "  ".join(f"{name} {value}" for name, value in self.shown.items())

    def summary(self, root: Path) -> None:
        """What this call did, once it is over."""
        if self.computed:
            self.console.print(f"{root}: {self.computed} stages computed, {self.reused} reused")
        else:
            self.console.print(f"{root}: finished already; nothing computed ({self.reused} stages)")

    def _read(self, root: Path, manifest: Manifest) -> None:
        path = step_dir(root, manifest.step) / manifest.stage / "metrics.arrow"
        metrics = rows(read_table(path, TABLES["metrics"]))
        for name, value in zip(metrics.metric, metrics.value, strict=True):
            if name in SHOWN:
                label, form = SHOWN[name]
                self.shown[label] = form.format(value)
            elif name.startswith("eval/") and name.endswith("/reward_mean"):
                self.shown[name.split("/")[2]] = f"{value:.3f}"
        for measure, value, _ in manifest.timing:
            if measure == "tokens/s" and value is not None:
                self.shown["tok/s"] = f"{value:,.0f}"

    def _line(self, step: int) -> None:
        """In a log: the first and last step, and one line every ten seconds between."""
        now = time.monotonic()
        if now - self._spoke >= LINE_EVERY_S or step + 1 == self.num_steps:
            self._spoke = now
            self.console.print(f"step {step + 1}/{self.num_steps}  {self.numbers()}")
