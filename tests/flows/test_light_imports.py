"""The machine that runs the flow loads nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "transformers", "submitit")


@pytest.mark.parametrize("module", ["flows.train", "flows.sft", "flows.evaluate", "flows.check"])
def test_flows_load_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
