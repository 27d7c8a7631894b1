"""Before a run is opened: the algorithm's rules, the user's functions, what is not built yet."""

import pytest

from relax.doctor.plan import engine_fact
from relax.doctor.settings import checked, warnings_of
from relax.errors import ConfigError
from relax.flags import load_config


def refused(**given):
    with pytest.raises(ConfigError) as caught:
        checked(load_config(None, given))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("fully_async", True),
        ("hybrid", True),
        ("partial_rollout", True),
        ("use_dynamic_global_batch_size", True),
        ("max_staleness", 2),
    ],
)
def test_not_built_yet(setting, value):
    (line,) = refused(**{setting: value})
    assert f"{setting} = {value}: not built yet; leave it at" in line


def test_the_rules_come_first():
    (line,) = refused(advantage_estimator="rloo", fully_async=True, calculate_per_token_loss=True)
    assert line.startswith("rollout.fully_async = True: must be off; rloo:")


def test_warnings_leave_out_what_is_refused_in_any_case():
    (line,) = warnings_of(load_config(None, {"rollout_top_p": 0.9}))
    assert line.startswith("rollout.rollout_top_p = 0.9")
    (line,) = warnings_of(load_config(None, {"rollout_top_p": 0.9, "max_staleness": 1}))
    assert line.startswith("rollout.rollout_top_p = 0.9")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"min_lr": 1.0}, "update.min_lr = 1.0: above lr = 1e-06; and lr does not decay"),
        (
            {"min_lr": 1.0, "lr_decay_style": "linear"},
            "update.min_lr = 1.0: above lr = 1e-06; the rate would end above its peak",
        ),
        (
            {"lr_warmup_iters": 100, "num_rollout": 2},
            "update.lr_warmup_iters = 100: as many optimizer steps as the run or more; the run "
            "takes 2, and ends before the rate is lr",
        ),
        (
            {"advantage_estimator": "ppo", "num_critic_only_steps": 10, "num_rollout": 2},
            "algorithm.num_critic_only_steps = 10: all steps of the run; of num_rollout = 2: the "
            "policy is never trained",
        ),
        (
            {"eval_interval": 3},
            "evaluate.eval_interval = 3: no effect; without eval_prompt_data",
        ),
        ({"opd_teacher_load": "x"}, "model.opd_teacher_load = 'x': no effect; without use_opd"),
    ],
)
def test_settings_without_effect_are_warned_of(given, said):
    assert warnings_of(load_config(None, given)) == [said]
    assert warnings_of(load_config(None, given), "sft") == []


def test_a_missing_file_is_named(tmp_path):
    (line,) = refused(custom_loss_path=f"{tmp_path}/none.py:loss")
    assert line.startswith("--custom-loss-path = ") and "no file" in line


def test_a_time_limit_that_nothing_keeps_is_told():
    given = {"rollout_timeout_s": 60.0}
    (line,) = warnings_of(load_config(None, given))
    assert line.startswith("rollout.rollout_timeout_s = 60: no effect on an engine in the stage's")
    assert line.endswith("set rollout_num_engines = 1")
    assert warnings_of(load_config(None, {**given, "rollout_num_engines": 1})) == []
    assert warnings_of(load_config(None, {**given, "rollout_engine": "vllm"})) == []
    assert warnings_of(load_config(None, {})) == []


EIGHT = {
    "rollout_placement": "job",
    "rollout_allocation": "gpu",
    "allocations": {"gpu": {"gpus_per_node": 8, "tasks_per_node": 8}},
    "rollout_engine": "vllm",
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {},
            "vllm, 1 of 8 GPUs of a node sample; "
            "rollout_num_engines says how many engines there are",
        ),
        ({"rollout_num_engines": 8}, "vllm, 8 of 8 GPUs of a node sample"),
        (
            {"rollout_num_engines": 4, "rollout_num_gpus_per_engine": 2},
            "vllm, 8 of 8 GPUs of a node sample",
        ),
        ({"rollout_placement": "inline"}, "vllm"),
    ],
)
def test_the_plan_says_how_many_gpus_sample(given, told):
    assert engine_fact(load_config(None, {**EIGHT, **given})) == told


def test_more_engines_than_gpus():
    (line,) = [
        line
        for line in refused(**EIGHT, rollout_num_engines=5, rollout_num_gpus_per_engine=2)
        if "engines" in line
    ]
    assert line == (
        "--rollout-num-engines = 5: 10 GPUs, 2 an engine; a node of the allocation 'gpu' has 8"
    )
