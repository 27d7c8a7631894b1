"""What is light stays light: the head node loads no torch, the wheel holds relax only."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "vllm", "transformers")


def loaded_by(code):
    """Top-level modules in a fresh interpreter after `code`."""
    program = (
        f"{code}\nimport sys\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import flows.train", HEAVY),
        ("import flows.evaluate, flows.sft", HEAVY),
        ("import tasks.stage", (*HEAVY, "prefect")),
        ("import relax", (*HEAVY, "prefect", "submitit", "duckdb", "pyarrow", "pydantic")),
        ("import relax.cli", (*HEAVY, "prefect", "submitit", "duckdb", "pyarrow")),
        ("import relax; relax.open_run", (*HEAVY, "prefect", "submitit")),
        ("import relax.algorithms, relax.config, relax.schema", (*HEAVY, "prefect", "submitit")),
        ("import relax.doctor.cli", (*HEAVY, "prefect", "submitit")),
        ("import slurm.entry", (*HEAVY, "prefect", "relax", "submitit")),
    ],
)
def test_importing_loads_nothing_heavy(code, absent):
    assert not set(absent) & loaded_by(code)


def test_open_run_is_importable_from_relax():
    import relax
    from relax.analytics.views import open_run

    assert relax.open_run is open_run
    with pytest.raises(AttributeError, match="module 'relax' has no attribute 'opn_run'"):
        _ = relax.opn_run


def test_the_wheel_is_told_to_hold_relax_only():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert told["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["relax"]


@pytest.mark.integration
def test_the_wheel_holds_relax_only(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"relax"}
