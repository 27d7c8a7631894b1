"""The table is literal, complete, and names only what exists."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relax.algorithms import ALGORITHMS, KNOBS, binding, table
from relax.algorithms.binding import inputs, resolve
from relax.config import section_of

REPOSITORY = Path(__file__).parents[3]
CONTRACT = {  # advantage, whitening of normalize_advantages, objective, reduction, KL default
    "grpo": ("group_normalized", "whiten_unbiased", "ppo_clip", "response_mean_weights", "k3"),
    "dr_grpo": ("group_centered", "", "ppo_clip", "constant_weights", "k3"),
    "rloo": ("leave_one_out", "", "reinforce", "token_mean_weights", "k3"),
    "ppo": ("gae", "whiten_unbiased", "ppo_clip", "response_mean_weights", "k1"),
    "cispo": ("group_normalized", "whiten_unbiased", "cispo", "token_mean_weights", "k3"),
    "gspo": ("group_normalized", "whiten_unbiased", "gspo", "response_mean_weights", "k3"),
    "sapo": ("group_normalized", "whiten_unbiased", "sapo", "response_mean_weights", "k3"),
    "m2po": ("group_normalized", "whiten_unbiased", "m2po", "response_mean_weights", "k3"),
    "reinforce_plus_plus": (
        "kl_to_go_return",
        "whiten_tokens",
        "ppo_clip",
        "response_mean_weights",
        "k1",
    ),
    "reinforce_plus_plus_baseline": (
        "group_centered",
        "whiten_tokens",
        "ppo_clip",
        "response_mean_weights",
        "k2",
    ),
}
NOT_OF_THE_FUNCTIONS = {  # used beside the row's own functions
    "eps_low",
    "eps_high",
    "std_normalization",
}


def test_the_table_is_the_contracts():
    found = {
        row.name: (row.advantage, row.whitening, row.objective, row.reduction, row.kl)
        for row in ALGORITHMS.values()
    }
    assert found == CONTRACT


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_each_name_resolves_and_the_knobs_are_those_of_the_functions(row):
    functions = [
        resolve(row.advantage, "advantages"),
        resolve(row.objective, "objectives"),
        resolve(row.reduction, "reduce"),
    ]
    if row.whitening:
        resolve(row.whitening, "advantages")
    for optional in (row.bounds, row.value_objective):
        functions += [resolve(optional, "objectives")] if optional else []
    assert inputs(functions[1]) == ["logp_BT", "old_logp_BT", "advantage_BT", "mask_BT"]
    taken = {p.name for f in (*functions[:2], *functions[3:]) for p in binding._knobs(f)}
    assert taken - NOT_OF_THE_FUNCTIONS <= row.uses
    if "std_normalization" in taken:
        assert "disable_grpo_std_normalization" in row.uses
    assert ("groups" in row.needs) == ("group_id_B" in inputs(functions[0]))
    assert ("critic" in row.needs) == bool(row.value_objective)


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_settings_and_papers_are_real(row):
    known = section_of().keys()
    assert row.uses | row.required.keys() | row.refused.keys() <= known
    assert not row.required.keys() & row.refused.keys()
    assert not row.uses & row.refused.keys()
    assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", row.paper)
    assert row.name in ALGORITHMS and row.uses <= KNOBS


def test_importing_table_and_rules_loads_no_torch():
    code = (
        "import sys, relax.algorithms, relax.algorithms.rules, relax.algorithms.inheritance, "
        "relax.stages.functions; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_no_other_place_asks_for_an_algorithm_by_name():
    """No comparison with an algorithm's name anywhere in the four packages."""
    names, found = set(ALGORITHMS), []
    for package in ("relax", "flows", "tasks", "slurm"):
        for path in (REPOSITORY / package).rglob("*.py"):
            if path == Path(table.__file__):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare | ast.MatchValue):
                    constants = {
                        n.value for n in ast.walk(node) if isinstance(n, ast.Constant)
                    } & names
                    found += [f"{path}:{node.lineno}: {constants}"] if constants else []
    assert not found
