"""The commands that README and docs show, as a reader would type them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("relax", "prefect", "make", "python3?", "pip", "sbatch")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
COMMAND = re.compile(rf"(?:\S*bin/)?(?:{'|'.join(PROGRAMS)}) \S")
SHELL = ("", "bash")


def in_blocks(text: str) -> list[str]:
    """Every command of a page's code blocks: lines that go on joined, comments left out."""
    found: list[str] = []
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            if found and found[-1].count("'") % 2:  # a quoted word goes on
                found[-1] += " " + line.strip()
            elif COMMAND.match(line):
                found.append(line.split("  #")[0])
    return [" ".join(line.split()) for line in found]


def in_text(text: str) -> list[str]:
    """Every command between backticks of a page's text; `relax train` alone is but its name."""
    found = [
        word for word in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)) if COMMAND.match(word)
    ]
    return [line for line in found if not line.startswith("relax ") or len(line.split()) > 2]


def commands() -> list[str]:
    """All of them, each once."""
    texts = [page.read_text() for page in PAGES]
    return list(dict.fromkeys(c for t in texts for c in [*in_blocks(t), *in_text(t)]))


def with_prefect() -> dict[str, str]:
    """The README's `prefect` commands by what they begin with."""
    starts = ("work-pool create", "--no-prompt deploy", "worker start", "deployment run")
    lines = [c for c in in_blocks(PAGES[0].read_text()) if c.startswith("prefect ")]
    return {start: one for start in starts for one in lines if one.startswith(f"prefect {start}")}
