"""Time and memory of log-prob and entropy, forward and backward, each case in its own process.

Prints CPU seconds on one thread and peak resident memory over the inputs'. Usage:
python benchmarks/logprob.py [--case N,H,V] [--naive]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

CASES = ("2048,64,151936", "8192,256,32768", "1536,128,64")


def measure(case: str, method: str) -> None:
    import torch

    from relax.trainer.logprob import linear_logp

    torch.set_num_threads(1)
    num_tokens, hidden, words = (int(part) for part in case.split(","))
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(num_tokens, hidden, generator=generator).requires_grad_()
    weight_VH = (torch.randn(words, hidden, generator=generator) / hidden**0.5).requires_grad_()
    target_N = torch.randint(0, words, (num_tokens,), generator=generator)
    # Loads the kernels, so that what follows is memory of the work alone.
    small = linear_logp(hidden_NH[:8], weight_VH[:8], target_N[:8] % 8, 1.0)
    sum(small).sum().backward()
    hidden_NH.grad = weight_VH.grad = None
    # Linux: 5 sets the high-water mark back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_kib("VmRSS")
    start = time.process_time()
    if method == "naive":
        logp_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
        logp_N = logp_NV.gather(1, target_N[:, None])[:, 0]
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    else:
        logp_N, entropy_N = linear_logp(hidden_NH, weight_VH, target_N, 1.0)
    (logp_N.sum() + 0.1 * entropy_N.sum()).backward()
    seconds = time.process_time() - start
    used = resident_kib("VmHWM") - before
    print(f"{method:6} N,H,V={case:16} {seconds:6.2f} s CPU {used / 1024:7.1f} MB peak over inputs")


def resident_kib(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append")
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--measure", choices=("tiled", "naive"))
    options = parser.parse_args()
    for case in options.case or CASES:
        if options.measure:
            measure(case, options.measure)
            continue
        for method in ("tiled", "naive") if options.naive else ("tiled",):
            command = [sys.executable, __file__, "--case", case, "--measure", method]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
