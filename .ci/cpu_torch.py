"""Stop with one line when a machine without a GPU would be given a CUDA build of torch."""

import json
import shutil
import subprocess
import sys

ASK = ["install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-"]


def main() -> None:
    """Ask pip which torch it would install; a CPU build says so in its version."""
    if shutil.which("nvidia-smi"):
        return
    command = [sys.executable, "-m", "pip", *ASK, "-c", "constraints.txt", "torch"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(f"pip cannot resolve torch: {answer.stderr.strip().splitlines()[-1]}")
    found = json.loads(answer.stdout)["install"][0]
    where, version = found["download_info"]["url"], found["metadata"]["version"]
    needs = found["metadata"].get("requires_dist", [])
    if any(need.startswith(("nvidia-", "cuda-")) for need in needs):
        sys.exit(
            f"torch {version} ({where.rsplit('/', 1)[-1]}) is a CUDA build and this machine has no "
            "GPU: install a CPU build into .venv first (see README, Installation), then make again"
        )


if __name__ == "__main__":
    main()
