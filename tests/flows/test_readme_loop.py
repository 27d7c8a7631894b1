"""The loop that the README shows is the flow's own."""

import inspect
import re
from pathlib import Path

from flows import train


def test_the_readmes_loop_is_the_flows():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```", text, re.S | re.M).group(1)
    lines = [line.split("  #")[0].strip() for line in shown.splitlines()]
    source = [line.strip() for line in inspect.getsource(train.steps).splitlines()]
    start = source.index(lines[0])
    assert source[start : start + len(lines)] == lines
