import pytest

from relax.data.order import Draw, draw
from relax.errors import ConfigError


def test_the_order_is_frozen():
    ids = [one.prompt_id for one in draw(5, start=0, count=10, seed=0, shuffle=True)]
    assert ids == [2, 0, 1, 3, 4, 4, 0, 3, 2, 1]


def test_unshuffled_is_file_order_with_epoch_and_position():
    assert draw(3, start=2, count=3, seed=9, shuffle=False) == [
        Draw(prompt_id=2, epoch=0, position=2),
        Draw(prompt_id=0, epoch=1, position=0),
        Draw(prompt_id=1, epoch=1, position=1),
    ]


def test_every_prompt_comes_once_an_epoch():
    drawn = draw(97, start=0, count=3 * 97, seed=4, shuffle=True)
    epochs = [[one.prompt_id for one in drawn if one.epoch == epoch] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(97)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("size", [1, 7, 32, 250])
def test_the_stream_does_not_depend_on_how_it_is_cut(size):
    whole = draw(100, start=0, count=250, seed=3, shuffle=True)
    cut = [
        one
        for start in range(0, 250, size)
        for one in draw(100, start=start, count=min(size, 250 - start), seed=3, shuffle=True)
    ]
    assert cut == whole


def test_one_step_may_span_several_epochs():
    drawn = draw(2, start=1, count=6, seed=0, shuffle=False)
    assert [(one.epoch, one.prompt_id) for one in drawn] == [
        (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    ]  # fmt: skip


def test_seeds_give_different_orders():
    first, second = (
        [one.prompt_id for one in draw(50, start=0, count=50, seed=seed, shuffle=True)]
        for seed in (0, 1)
    )
    assert first != second


def test_nothing_is_drawn_when_nothing_is_asked():
    assert draw(10, start=30, count=0, seed=0, shuffle=True) == []


@pytest.mark.parametrize(("num_prompts", "start", "count"), [(0, 0, 1), (3, -1, 1), (3, 0, -1)])
def test_impossible_draws_are_refused(num_prompts, start, count):
    with pytest.raises(ConfigError, match=f"num_prompts = {num_prompts}, start = {start}"):
        draw(num_prompts, start=start, count=count, seed=0, shuffle=True)
