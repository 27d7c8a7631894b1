"""A real vLLM server on a free port, for the tests that ask one."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@contextlib.contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """host:port of a server that holds `model`, until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        f"-m vllm.entrypoints.openai.api_server --model {model} --port {port} "
        "--dtype float32 --enforce-eager --logprobs-mode processed_logprobs"
    )
    process = subprocess.Popen([sys.executable, *command.split()], env=os.environ | SETTINGS)
    try:
        for _ in range(240):
            assert process.poll() is None, "the vLLM server died"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
