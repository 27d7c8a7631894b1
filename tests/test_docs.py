"""README and docs: links resolve, `relax ...` commands parse, generated pages are up to date."""

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import documented
from documented import FENCE, ROOT, in_blocks, in_text

from relax import cli
from relax.errors import ArtifactError, ConfigError
from relax.flags import build_parser, parse_flags
from relax.reference import PAGES, with_blocks

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RUNS = {"sql", "show", "verify", "export"}
"""Commands that take a run: what follows is checked by their own parsers."""
SETTINGS = {"train", "sft", "evaluate", "check"}
"""Commands that take every setting as a flag. Of any other it is checked that it exists."""


def commands(text):
    """Every `relax ...` command line of a page: in code blocks and in the text."""
    return [c for c in in_blocks(text) + in_text(text) if c.startswith("relax ")]


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", documented.PAGES, ids=lambda p: p.name)
def test_links_resolve(path):
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target) if target else path
        assert there.exists(), f"{path.name}: {link}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{path.name}: {link}"


@pytest.mark.parametrize("path", documented.PAGES, ids=lambda p: p.name)
def test_commands_parse(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where none of the runs is that the pages speak of
    for line in commands(path.read_text()):
        check(line)


def check(line):
    """Parse a command as `relax` would, without running it."""
    words = [w for w in shlex.split(line.split(" #")[0]) if w != "..."][1:]
    words = words[: words.index("|")] if "|" in words else words
    if not words or words[0] in ("COMMAND", "--help", "--version", "help"):
        return
    name = words[0]
    cli.command(name)  # there is such a command
    if name in RUNS:
        with contextlib.suppress(SystemExit, ArtifactError):
            cli.command(name)([w.replace("RUN", "no-such-run") for w in words[1:]])
        return
    if name not in SETTINGS:
        return
    parser = build_parser(f"relax {name}", "")
    own = ("--no-prefect", "--dry-run", "--cluster", "--run", "--format", "--ranks", "--gpu", "-h")
    for flag in own:
        with contextlib.suppress(Exception):
            parser.add_argument(flag, nargs="?")
    with contextlib.suppress(SystemExit):
        parse_flags(parser, words[1:])
    for word in words[1:]:
        if word.startswith("recipes/"):
            assert (ROOT / word).exists(), f"{line}: {word} is not there"


@pytest.mark.parametrize(
    "line",
    ["relax trian x.toml", "relax train --lrr 3", "relax sql runs/x", "relax show runs/x --stp 1"],
)
def test_a_wrong_command_would_be_found(line):
    with pytest.raises(ConfigError):
        check(line)


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_what_the_code_says(name):
    written = (ROOT / "docs" / name).read_text()
    assert written == PAGES[name](), f"docs/{name}: run `python -m relax.reference`"


def test_the_readmes_tables_are_what_the_code_says():
    written = (ROOT / "README.md").read_text()
    assert written == with_blocks(written), "README.md: run `python -m relax.reference`"
    assert with_blocks(written.replace("| `grpo` |", "| `grpoo` |")) == written
