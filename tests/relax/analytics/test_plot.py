"""The picture of a run: its size, and a colour for each of its lines."""

import numpy as np
from PIL import Image

from relax.analytics.plot import COLOURS, plot_rewards


def share_of(picture, colour: str) -> float:
    """Share of pixels of a colour, #rrggbb."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(picture.astype(int) - wanted).max(-1) < 12).mean())


def test_rewards_and_evaluations_are_drawn_each_in_its_colour(run, tmp_path):
    target = plot_rewards(run.root, tmp_path / "rewards.png")
    with Image.open(target) as image:
        assert (image.format, image.size) == ("PNG", (840, 480))
        picture = np.asarray(image.convert("RGB"))
    assert share_of(picture, "#ffffff") > 0.8
    assert share_of(picture, COLOURS["rollouts"]) > 0.001  # a line over the whole width
    assert share_of(picture, COLOURS["greedy"]) > 0.0001  # a dot, and its like in the legend
    assert share_of(picture, COLOURS["sampled"]) == 0  # nothing of that kind in this run
