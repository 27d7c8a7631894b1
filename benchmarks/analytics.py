"""Questions to a generated run, beside what people use otherwise: JSONL, pandas, polars.

    python benchmarks/analytics.py              100 steps x 1,024 responses, 33 M tokens, ~0.5 GB
    python benchmarks/analytics.py --steps 10   a tenth of it

pandas and polars are measured where they are installed (pip install pandas polars); nothing
else needs them. Times are the best of --repeats, in this process, files in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import generated_run

import relax
from relax.analytics.questions import QUESTIONS
from relax.schema import IDS_PER_STEP

JSONL_STEPS = 10
REWARD_BY_STEP = "SELECT step, avg(reward), avg(response_len) FROM responses GROUP BY 1 ORDER BY 1"
LARGEST_MS = {"reward-by-step": 60.0}
ANY_QUESTION_MS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--mean-len", type=int, default=325)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", type=Path, help="kept there, and used again when it exists")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.run or Path(scratch) / "run"
        if not (root / "run.json").exists():
            generate(root, given)
        measure(root, Path(scratch), given.repeats)


def generate(root: Path, given: argparse.Namespace) -> None:
    start = time.perf_counter()
    generated_run.generate(
        root,
        num_steps=given.steps,
        num_groups=given.groups,
        group_size=given.group_size,
        mean_len=given.mean_len,
    )
    print(f"generated in {time.perf_counter() - start:.1f} s")


def measure(root: Path, scratch: Path, repeats: int) -> None:
    run = relax.open_run(root)
    steps, responses, tokens = run.sql(
        "SELECT count(*), sum(responses), sum(tokens) FROM steps"
    ).fetchall()[0]
    print(f"{steps} steps, {responses} responses, {tokens / 1e6:.1f} M tokens, {size_of(root)}\n")
    report("open_run", best(lambda: relax.open_run(root), repeats))
    times = {}
    for question in QUESTIONS.values():
        query = question.sql(1)
        times[question.name] = best(lambda q=query: run.sql(q).to_arrow_table(), repeats)
        limit = LARGEST_MS.get(question.name, ANY_QUESTION_MS)
        mark = "" if times[question.name] <= limit else f"   over {limit:.0f} ms"
        report(f"relax sql --question {question.name}", times[question.name], mark)
    print(
        f"\nslowest question {max(times.values()):.1f} ms, "
        f"median {statistics.median(times.values()):.1f} ms\n"
    )
    print("mean reward and length by step, the same answer from:")
    report("relax sql", best(lambda: run.sql(REWARD_BY_STEP).fetchall(), repeats))
    for name, ask in others(root, scratch, steps).items():
        report(name, best(ask, min(repeats, 3)))


def others(root: Path, scratch: Path, steps: int) -> dict[str, Callable[[], object]]:
    """The same question by other means; those that are not installed are left out."""
    found: dict[str, Callable[[], object]] = {}
    some = min(steps, JSONL_STEPS)
    lines = jsonl(root, scratch / "rollouts.jsonl", some)
    found[f"python, JSONL ({some} of {steps} steps)"] = lambda: by_step_jsonl(lines)
    if importlib.util.find_spec("pandas"):
        found["pandas"] = lambda: by_step_pandas(root)
    if importlib.util.find_spec("polars"):
        found["polars"] = lambda: by_step_polars(root)
    return found


def jsonl(root: Path, path: Path, steps: int) -> Path:
    """The first steps as peers log them: a JSON object a response, with tokens and log-probs."""
    rows = relax.open_run(root).sql(
        f"SELECT step, reward, response_len, prompt, response, label, tokens, rollout_logp "
        f"FROM responses WHERE step < {steps} ORDER BY sample_id"
    )
    with path.open("w") as file:
        for row in rows.to_arrow_table().to_pylist():
            file.write(json.dumps(row) + "\n")
    return path


def by_step_jsonl(path: Path) -> dict[int, float]:
    rewards: dict[int, list[float]] = {}
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            rewards.setdefault(row["step"], []).append(row["reward"])
    return {step: sum(values) / len(values) for step, values in rewards.items()}


def by_step_pandas(root: Path) -> object:
    import pandas

    def read(name: str, columns: list[str]):
        paths = sorted(root.glob(f"steps/*/*/{name}.arrow"))
        return pandas.concat([pandas.read_feather(p, columns=columns) for p in paths])

    rewards = read("rewards", ["sample_id", "reward"])
    responses = read("responses", ["sample_id", "response_len"])
    joined = responses.merge(rewards, on="sample_id")
    return joined.groupby(joined.sample_id // IDS_PER_STEP)[["reward", "response_len"]].mean()


def by_step_polars(root: Path) -> object:
    import polars

    def read(name: str):
        return polars.scan_ipc(sorted(root.glob(f"steps/*/*/{name}.arrow")))

    rewards = read("rewards").select("sample_id", "reward")
    joined = read("responses").select("sample_id", "response_len").join(rewards, on="sample_id")
    step = (polars.col("sample_id") // IDS_PER_STEP).alias("step")
    means = polars.col("reward", "response_len").mean()
    return joined.group_by(step).agg(means).sort("step").collect()


def best(ask: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the quickest of `repeats`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def report(name: str, milliseconds: float, mark: str = "") -> None:
    print(f"  {name:44} {milliseconds:9.1f} ms{mark}")


def size_of(root: Path) -> str:
    size = sum(f.stat().st_size for f in root.rglob("*.arrow"))
    return f"{size / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
