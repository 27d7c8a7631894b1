"""Which groups an optimizer step takes: seeded, and written down."""

import numpy as np
from stage_cases import do, made_rollout, settings_of, stages_after_reward, started

from relax.stages.update import group_order


def test_the_order_is_a_permutation_and_a_function_of_seed_and_step():
    order = group_order(1, 2, 50)
    assert sorted(order) == list(range(50)) != order.tolist()
    assert np.array_equal(order, group_order(1, 2, 50))
    assert not np.array_equal(order, group_order(1, 3, 50))
    assert not np.array_equal(order, group_order(2, 2, 50))


def test_the_manifest_says_which_groups_each_optimizer_step_took(models, task, tmp_path):
    run = started(settings_of(models, task, tmp_path / "run", num_steps_per_rollout=2, seed=3))
    for step in range(2):
        made_rollout(run, step, np.random.default_rng(step))
        do(run, step, stages_after_reward(run.config))
        order = group_order(3, step, 4).tolist()
        first = run.table(step, "rollout", "prompts")["group_id"].to_pylist()
        told = run.committed(step, "update").notes["groups"]
        assert told == [[first[g] for g in order[:2]], [first[g] for g in order[2:]]]
