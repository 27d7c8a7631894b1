"""Golden weights of the reductions, and that they know only whole-step counts."""

import torch

from relax.algorithms import reduce

MASK_BT = torch.tensor([[1.0, 1, 0, 1], [0, 0, 0, 0], [2, 0, 0, 0]])


def test_token_mean():
    found_BT = reduce.token_mean_weights(MASK_BT, num_tokens=8)
    assert (found_BT * 8).tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_response_mean_counts_empty_responses():
    found_BT = reduce.response_mean_weights(MASK_BT, num_responses=4)
    twelfth = 1 / 12
    wanted_BT = torch.tensor([[twelfth, twelfth, 0, twelfth], [0] * 4, [0.25, 0, 0, 0]])
    torch.testing.assert_close(found_BT, wanted_BT)


def test_constant():
    found_BT = reduce.constant_weights(MASK_BT, num_responses=4, max_response_len=16)
    assert (found_BT * 64).tolist() == [[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_nothing_valid_gives_zeros():
    empty_BT = torch.zeros(2, 3)
    for found_BT in (
        reduce.token_mean_weights(empty_BT, num_tokens=0),
        reduce.response_mean_weights(empty_BT, num_responses=2),
        reduce.constant_weights(empty_BT, num_responses=2, max_response_len=3),
    ):
        assert found_BT.tolist() == [[0] * 3] * 2
