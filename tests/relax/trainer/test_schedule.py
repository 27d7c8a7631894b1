import pytest

from relax.errors import ConfigError
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
    options = TrainerOptions(lr=1.0, min_lr=0.1, lr_warmup_steps=2, lr_decay_style=style)
    rates = [learning_rate(options, step, 6) for step in range(7)]
    assert rates == pytest.approx(expected)
    assert learning_rate(options, 60, 6) == pytest.approx(expected[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "--lr = 0.0; must be greater than 0"),
        ({"adam_beta2": 1.0}, "--adam-beta2 = 1.0; must be at least 0 and below 1"),
        ({"replicate": 0}, "--num-replicas = 0; must be 1 or more"),
        (
            {"only_train_params": ("a",), "freeze_params": ("b",)},
            r"--freeze-params-name-list = \('b',\); must be empty where "
            "--only-train-params-name-list is given",
        ),
    ],
)
def test_refused_options(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainerOptions(**change)
