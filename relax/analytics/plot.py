"""The reward curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from relax.analytics.views import open_run

COLOURS = {"rollouts": "#1f77b4", "sampled": "#ff7f0e", "greedy": "#2ca02c"}


def plot_rewards(run_dir: Path, target: Path) -> Path:
    """Draw reward by step, and the evaluations where there are some, into the PNG `target`."""
    from matplotlib.figure import Figure

    run = open_run(run_dir)
    steps = run.sql("SELECT step, reward FROM steps ORDER BY step").fetchnumpy()
    evals = run.sql(
        "SELECT decoding, policy_version AS version, avg(reward) AS reward "
        "FROM evals GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        steps["step"], steps["reward"], color=COLOURS["rollouts"], linewidth=1.2, label="rollouts"
    )
    for decoding in sorted({e[0] for e in evals}):
        points = [(version, reward) for name, version, reward in evals if name == decoding]
        axes.plot(
            *zip(*points, strict=True),
            "o--",
            color=COLOURS[decoding],
            label=f"held out, {decoding}",
        )
    axes.set(xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02), title=run_dir.as_posix())
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=120)
    return target
