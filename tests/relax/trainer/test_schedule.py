import os

import pytest

from relax.trainer.numerics import make_deterministic
from relax.trainer.options import TrainerOptions
from relax.trainer.schedule import learning_rate


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.86819805, 0.55, 0.23180195, 0.1]),
    ],
)
def test_learning_rates(style, expected):
    options = TrainerOptions(lr=1.0, min_lr=0.1, lr_warmup_iters=2, lr_decay_style=style)
    rates = [learning_rate(options, step, 6) for step in range(7)]
    assert rates == pytest.approx(expected)
    assert learning_rate(options, 60, 6) == pytest.approx(expected[-1])


def test_flash_attention_is_asked_for_its_deterministic_backward_pass(monkeypatch):
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    make_deterministic(1)
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
