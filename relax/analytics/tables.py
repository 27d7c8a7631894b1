"""What a run has committed, as Arrow tables.

Files are memory-mapped: a column that no question names is never read, and opening a run costs no
more than the files' schemas.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from relax.schema import (
    ADVANTAGES,
    GROUP,
    RESPONSES,
    REWARDS,
    SAMPLE,
    SCORES,
    STAGE,
    STEP,
    TABLES,
    TIMING,
    VIEWS,
    Column,
    columns_beside,
)
from relax.stages import is_round
from relax.store import Manifest, Run, read_table

PLACED = ("metrics", "evals")
"""Kinds without a key of their own: the step and stage that they belong to are put in front."""


def committed(run: Run) -> list[tuple[Path, Manifest]]:
    """Every committed stage of a run with its directory, in the order of steps."""
    found = ((folder, run.manifest(step, name)) for step, name, folder in run.stages())
    return [(folder, manifest) for folder, manifest in found if manifest is not None]


def tables(run: Run) -> dict[str, pa.Table]:
    """Table name -> all that is committed of that kind; `responses` with the tables beside it."""
    stages = committed(run)
    parts: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    wide = []
    for _, of_step in itertools.groupby(stages, lambda stage: stage[1].step):
        found: dict[str, pa.Table] = {}
        for folder, manifest in of_step:
            for name in manifest.tables:
                if is_round(manifest.stage) and name not in OF_ROUNDS:
                    continue  # what a step was trained on stands in its rollout and reward
                part = read_table(folder / f"{name}.arrow", TABLES[name])
                found[name] = part
                parts[name].append(_placed(part, manifest) if name in PLACED else part)
        if "responses" in found:
            wide.append(_widened(found))
    joined = {name: _joined(parts[name], TABLES[name].columns) for name in SEPARATE}
    manifests = [manifest for _, manifest in stages]
    return {
        **joined,
        "responses": _joined(wide, WIDE),
        "timing": timing_table(manifests),
        "jobs": jobs_table(run, manifests),
    }


def _widened(found: dict[str, pa.Table]) -> pa.Table:
    """A step's responses with the columns of BESIDE; nothing is copied where the rows agree."""
    responses = found["responses"]
    ids = responses.column(SAMPLE.name)
    arrays = list(responses.columns)
    for kind in BESIDE:
        new = columns_beside(kind, SAMPLE, GROUP)
        if kind.name not in found:
            arrays += [pa.nulls(len(ids), c.type) for c in new]
            continue
        table = found[kind.name]
        if not table.column(SAMPLE.name).equals(ids):
            places = pc.index_in(ids, table.column(SAMPLE.name))  # pyright: ignore[reportAttributeAccessIssue]
            table = table.take(places)
        arrays += table.select([c.name for c in new]).columns
    return pa.Table.from_arrays(arrays, names=[c.name for c in WIDE])


BESIDE = (REWARDS, ADVANTAGES, SCORES)
WIDE = (*RESPONSES.columns, *(c for kind in BESIDE for c in columns_beside(kind, SAMPLE, GROUP)))
SEPARATE = ("prompts", "candidates", *PLACED)
OF_ROUNDS = ("candidates", *PLACED)
"""What is read of rounds of dynamic sampling."""


def timing_table(manifests: Sequence[Manifest]) -> pa.Table:
    """What all stages measured: it stands in their manifests, outside every hash."""
    entries = [(m.step, m.stage, *entry) for m in manifests for entry in m.timing]
    columns = (STEP, STAGE, *TIMING.columns)
    values = zip(*entries, strict=True) if entries else ((),) * len(columns)
    arrays = [pa.array(v, c.type) for v, c in zip(values, columns, strict=True)]
    return pa.Table.from_arrays(arrays, names=[c.name for c in columns])


def _placed(table: pa.Table, manifest: Manifest) -> pa.Table:
    stage = pa.repeat(manifest.stage, table.num_rows)
    step = pa.repeat(pa.scalar(manifest.step, pa.int64()), table.num_rows)
    return table.add_column(0, STAGE.name, stage).add_column(0, STEP.name, step)


def _joined(parts: Sequence[pa.Table], columns: Sequence[Column]) -> pa.Table:
    if parts:
        return pa.concat_tables([t.replace_schema_metadata(None) for t in parts])
    fields = [pa.field(c.name, c.type) for c in (STEP, STAGE, *columns)]
    return pa.schema(fields).empty_table()


# --- jobs --------------------------------------------------------------------------------------

OF_JOB = ("job_id", "state", "queue_s", "run_s", "gpus", "gpu_s", "num_nodes", "restarts")


def jobs_table(run: Run, manifests: Sequence[Manifest]) -> pa.Table:
    """One row an attempt at a stage: those that made it, and submissions that did not."""
    submissions = list(_submissions(run.root / "jobs"))
    made = {(m.step, m.stage): m for m in manifests}
    entries = [_measured(m) | _facts(_maker(m, submissions)) for m in manifests]
    for record in submissions:
        for stage in record["stages"]:
            winner = made.get((record["step"], stage))
            if winner is None or not _made_by(winner, record):
                place = {"step": record["step"], "stage": stage, "attempt": record["attempt"]}
                entries.append({**place, **_facts(record), "committed": False})
    columns = [pa.field(c.name, c.type) for c in VIEWS["jobs"].columns if c.name != "run"]
    return pa.Table.from_pylist(entries, schema=pa.schema(columns))


def _submissions(jobs: Path) -> Iterator[dict]:
    """What the records of each RUN/jobs/<step>-<stage>-<attempt> say, joined."""
    for folder in sorted(jobs.glob("[0-9]*-*-[0-9]*")):
        step, stage, number = folder.name.split("-")
        record = {"step": int(step), "stages": [stage], "attempt": f"job-{number}"}
        for name in ("claim.json", "job.json", "outcome.json"):
            try:
                record |= json.loads((folder / name).read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                continue  # claimed, but its submitter died before it was submitted
        yield record


def _maker(manifest: Manifest, submissions: list[dict]) -> dict:
    """The submission whose job made a stage; empty where it was made in the flow's process."""
    return next((record for record in submissions if _made_by(manifest, record)), {})


def _made_by(manifest: Manifest, record: dict) -> bool:
    """A job's attempts are called <attempt>-<job id>-<restart>."""
    if manifest.step != record["step"] or manifest.stage not in record["stages"]:
        return False
    return f"{manifest.attempt}-".startswith(f"{record['attempt']}-")


def _facts(record: dict) -> dict:
    return {name: record.get(name) for name in OF_JOB}


def _measured(manifest: Manifest) -> dict:
    """What the manifest's timing says of the attempt that made the stage."""
    value = {measure: number for measure, number, _ in manifest.timing}
    text = {measure: words for measure, _, words in manifest.timing}
    started = value.get("started")
    return {
        "step": manifest.step,
        "stage": manifest.stage,
        "attempt": manifest.attempt,
        "committed": True,
        "host": text.get("host"),
        "started": None if started is None else datetime.fromtimestamp(started, UTC),
        "seconds": value.get("seconds/total"),
    }
