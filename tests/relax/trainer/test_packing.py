import numpy as np
import pytest

from relax.errors import ConfigError
from relax.trainer.packing import (
    best_fit,
    level,
    plan_count,
    plan_families,
    plan_tokens,
)


def test_best_fit_takes_the_tightest_bin():
    # 7 opens, 5 opens, 4 fits only beside 5, 3 fits beside 7 exactly, 1 fits beside 5 and 4.
    assert best_fit([3, 5, 1, 7, 4], 10) == [[3, 0], [1, 4, 2]]


def test_level_bins_have_equal_loads():
    bins = level([8, 7, 6, 5, 4], 2)
    assert bins == [[0, 3, 4], [1, 2]]


def test_every_sequence_is_planned_once_and_ranks_have_as_many_micro_batches():
    lengths = np.random.default_rng(0).integers(1, 50, 101).tolist()
    for plan in (plan_tokens(lengths, 64, 3), plan_count(lengths, range(len(lengths)), 7, 3)):
        assert sorted(i for rank in plan for members in rank for i in members) == list(range(101))
        assert len({len(rank) for rank in plan}) == 1
    loads = [sum(lengths[i] for members in rank for i in members) for rank in plan]
    assert max(loads) - min(loads) < 200


def test_budget_holds_and_ranks_are_level():
    lengths = np.random.default_rng(1).integers(1, 50, 400).tolist()
    plan = plan_tokens(lengths, 64, 4)
    assert all(sum(lengths[i] for i in members) <= 64 for rank in plan for members in rank)
    loads = [sum(lengths[i] for members in rank for i in members) for rank in plan]
    assert max(loads) <= 1.03 * min(loads)


def test_fewer_sequences_than_ranks_leave_empty_micro_batches():
    assert plan_tokens([5], 10, 3) == [[[0]], [[]], [[]]]


def test_a_long_sequence_is_refused_not_split():
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu = 10; the longest sequence has 11"):
        plan_tokens([3, 11], 10, 1)


def test_thousands_of_lengths_reach_the_lower_bound():
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(7.0, 0.8, 8192), 1, 16384).astype(int).tolist()
    assert len(best_fit(lengths, 16384)) == -(-sum(lengths) // 16384)


def tokens_of(plan, lengths):
    return [sum(lengths[i] for members in rank for i in members) for rank in plan]


def families_of(count, size):
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def test_families_stay_together_where_ranks_stay_level():
    lengths = np.random.default_rng(2).integers(20, 30, 128).tolist()
    families = families_of(128, 8)
    plan = plan_families(lengths, families, [10] * 16, 1000, 2)
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(128))
    for members in plan[0] + plan[1]:
        assert sum(lengths[i] for i in members) <= 1000
        for family in families:
            assert len(set(family) & set(members)) in (0, 8)
    one, other = tokens_of(plan, lengths)
    assert abs(one - other) <= 0.02 * one


def test_families_are_cut_rather_than_leave_ranks_idle():
    plan = plan_families([10] * 16, families_of(16, 8), [5, 5], 1000, 4)
    assert plan == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]], [[12, 13, 14, 15]]]


@pytest.mark.parametrize(("budget", "siblings"), [(960, 2), (1280, 4), (10_400, 32)])
def test_as_many_siblings_share_a_micro_batch_as_fit(budget, siblings):
    lengths, families = [320] * 256, families_of(256, 32)
    plan = plan_families(lengths, families, [300] * 8, budget, 1)
    computed = sum(300 * len({i // 32 for i in members}) + 20 * len(members)
                   for members in plan[0])  # fmt: skip
    assert computed == 256 // siblings * 300 + 256 * 20


def test_families_that_no_cut_levels_are_dealt_one_by_one():
    lengths = [50, 1, 1, 1, 1, 1, 1, 44]
    assert plan_families(lengths, [list(range(8))], [1], 50, 2) == plan_tokens(lengths, 50, 2)


def test_nothing_to_plan():
    assert plan_families([], [], [], 10, 2) == [[], []]


def test_fixed_count_follows_the_order_given():
    assert plan_count([1] * 5, [4, 0, 3, 1, 2], 2, 1) == [[[4, 0], [3, 1], [2]]]
