"""One row an algorithm. A row names functions of the modules beside it; adding one is a row.

Nothing else in the project asks for an algorithm by its name. Importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """A row: which advantage, objective and reduction make up the algorithm called `name`."""

    name: str
    paper: str
    advantage: str
    """Function of relax.algorithms.advantages."""
    objective: str
    """Function of relax.algorithms.objectives."""
    reduction: str
    """Function of relax.algorithms.reduce, unless calculate_per_token_loss is given."""
    kl: str
    """KL estimator that kl_loss_type stands for when it is unset."""
    needs: frozenset[str]
    """What it asks of the run: `groups`."""


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="grpo",
            paper="arXiv:2402.03300",
            advantage="group_normalized",
            objective="ppo_clip",
            reduction="response_mean_weights",
            kl="k3",
            needs=frozenset({"groups"}),
        ),
    )
}
