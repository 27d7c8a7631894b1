"""docs/algorithms.md says what the table says."""

import re
from pathlib import Path

from relax.algorithms import ALGORITHMS

PAGE = (Path(__file__).parents[1] / "docs/algorithms.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_every_row_has_a_section_with_its_paper_and_its_settings():
    shared = SECTIONS.get("What", PAGE)
    for row in ALGORITHMS.values():
        section = SECTIONS[row.name]
        assert row.paper in section
        assert "\nWhen:" in section and "Settings:" in section
        for name in (row.uses | row.required.keys()) - {"ref_load"}:
            assert f"`{name}" in section + shared + SECTIONS["grpo"], f"{row.name}: {name}"


def test_the_summary_is_the_table():
    for row in ALGORITHMS.values():
        (line,) = re.findall(rf"^\| `{row.name}` \|.*$", PAGE, re.MULTILINE)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] == f"`{row.advantage}`" and cells[2].startswith(f"`{row.objective}`")
        assert cells[4].startswith(row.kl)
        words = {"token_mean": "tokens", "response_mean": "responses", "constant": "a constant"}
        assert cells[3].startswith(words[row.reduction.removesuffix("_weights")])
