"""Learning rates as a pure function of the optimizer step."""

import math

from relax.trainer.options import TrainerOptions


def learning_rate(options: TrainerOptions, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) in a schedule of num_steps steps.

    Warm-up is linear and its first step already learns: lr * (step + 1) / lr_warmup_iters. After
    it the rate falls from lr to min_lr over the remaining steps and stays there.
    """
    warmup = options.lr_warmup_iters
    if step < warmup:
        return options.lr * (step + 1) / warmup
    if options.lr_decay_style == "constant":
        return options.lr
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    left = 1 - done if options.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return options.min_lr + (options.lr - options.min_lr) * left
