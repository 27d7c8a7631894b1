"""No file over 400 lines, no function over 60, no room with a meaningless name."""

import ast
import subprocess
import sys
from pathlib import Path

LARGEST_FILE, LARGEST_FUNCTION = 400, 60
BANNED = {"utils", "helpers", "common", "misc", "base"}


def faults(path: Path) -> list[str]:
    """What one file does wrong."""
    text = path.read_text()
    lines = text.count("\n")
    found = [f"{path}: {lines} lines (cap {LARGEST_FILE})"] if lines > LARGEST_FILE else []
    if path.stem in BANNED:
        found.append(f"{path}: a module named {path.stem}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LARGEST_FUNCTION:
                found.append(f"{path}:{node.lineno}: {node.name}: {length} lines (cap 60)")
    return found


def main() -> None:
    """Check every Python file that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    found = [fault for name in listed if Path(name).exists() for fault in faults(Path(name))]
    print("\n".join(found) or f"{len(listed)} files within the caps")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
