"""Packing 8,192 sequences under a token budget: milliseconds, and bins over the lower bound.

    python benchmarks/packing.py

Lengths are lognormal with mean 1.5k, capped at 16k, as of long chains of thought.
"""

import time

import numpy as np

from relax.trainer.packing import best_fit, plan_families, plan_tokens

BUDGET, COUNT, GROUP = 16_384, 8_192, 8


def draw_lengths() -> list[int]:
    """Lognormal, sigma 1, mean 1.5k tokens, 16 to 16k."""
    draws = np.random.default_rng(0).lognormal(np.log(1500) - 0.5, 1.0, COUNT)
    return draws.astype(int).clip(16, BUDGET).tolist()


def seconds(call) -> float:
    """Best of ten, CPU time."""
    best = float("inf")
    for _ in range(10):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    """Print one line a case."""
    lengths = draw_lengths()
    bound = -(-sum(lengths) // BUDGET)
    families = [list(range(i, i + GROUP)) for i in range(0, COUNT, GROUP)]
    shared = [min(lengths[i] for i in family) // 4 for family in families]
    cases = {
        "best fit, 1 rank": lambda: [best_fit(lengths, BUDGET)],
        "plan, 1 rank": lambda: plan_tokens(lengths, BUDGET, 1),
        "plan, 64 ranks": lambda: plan_tokens(lengths, BUDGET, 64),
        "plan of families, 1 rank": lambda: plan_families(lengths, families, shared, BUDGET, 1),
        "plan of families, 64 ranks": lambda: plan_families(lengths, families, shared, BUDGET, 64),
    }
    print(f"{COUNT} lengths, {sum(lengths)} tokens, budget {BUDGET}: at least {bound} bins")
    for name, call in cases.items():
        bins = [members for rank in call() for members in rank]
        print(f"{name:28} {1000 * seconds(call):6.1f} ms   {len(bins)} bins")


if __name__ == "__main__":
    main()
