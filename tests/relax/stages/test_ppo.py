"""PPO through the real stages: the critic learns, waits for nobody, and stays in step."""

import shutil
import warnings

import numpy as np
import pytest
from safetensors.torch import load_file
from stage_cases import do, made_rollout, metrics_of, settings_of, started, train

from relax.errors import ArtifactError, TrainingError
from relax.stages import update
from relax.stages.columns import counted_masks, score_lists
from relax.stages.perform import Warm
from relax.stages.training import learners_before, steps_behind, trainer_options
from relax.store import Run, rows
from relax.trainer import learner
from relax.trainer.timing import Stopwatch

LETTERS = '''
def letters(response_text: str, label: str) -> float:
    """Share of the characters that are no digits."""
    return 1 - sum(c.isdigit() for c in response_text) / max(len(response_text), 1)
'''
PPO = {"advantage_estimator": "ppo"}
STAGES_OF_PPO = ["rollout", "reward", "score", "advantage", "update"]


@pytest.fixture(scope="module")
def settings(models, task, tmp_path_factory):
    verifier = tmp_path_factory.mktemp("verifier") / "letters.py"
    verifier.write_text(LETTERS)

    def make(name="run", **changed):
        changed = {**PPO, "custom_rm_path": f"{verifier}:letters", **changed}
        return settings_of(models, task, tmp_path_factory.mktemp("runs") / name, **changed)

    return make


def test_the_critics_loss_falls(settings):
    run = train(settings(num_rollout=8, critic_lr=1e-2, rollout_batch_size=16, lr=1e-5))
    losses = [metrics_of(run, step)[0]["train/critic-value_loss"] for step in range(8)]
    assert np.mean(losses[-2:]) < 0.5 * np.mean(losses[:2]), losses
    assert {metrics_of(run, step)[0]["train/critic-lr"] for step in range(8)} == {1e-2}


def plain_gae(reward, values, gamma, lambd):
    """Section 3 of the contract, one token after another from the end."""
    advantages, after, following = [], 0.0, 0.0
    for place in reversed(range(len(values))):
        earned = reward if place == len(values) - 1 else 0.0
        delta = earned + gamma * following - values[place]
        after = delta + gamma * lambd * after
        following = values[place]
        advantages.append(after)
    return advantages[::-1]


def test_value_targets_are_gae_over_valid_tokens(settings):
    run = started(settings(critic_load="critic", gamma=0.9, lambd=0.8))
    made_rollout(run, 0, np.random.default_rng(1))
    do(run, 0, ["score", "advantage"])
    response = rows(run.table(0, "rollout", "responses"))
    reward_B = rows(run.table(0, "reward", "rewards")).reward
    found = rows(run.table(0, "advantage", "advantages"))
    values, masks = score_lists(run, 0)["value"], counted_masks(response, run.config.algorithm)
    assert any(0 < mask.sum() < len(mask) for mask in masks)
    for place, mask in enumerate(masks):
        valid = mask != 0
        value = values[place][valid].astype(float)
        advantage = plain_gae(reward_B[place], value, 0.9, 0.8)
        assert found.token_advantage[place][valid] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
        target = np.array(advantage) + value
        assert found.token_return[place][valid] == pytest.approx(target, rel=1e-5, abs=1e-6)
        assert not found.token_advantage[place][~valid].any()
        assert not found.token_return[place][~valid].any()


def test_critic_only_rollouts_leave_the_policy_to_the_bit(settings, models):
    run = train(
        settings(
            num_rollout=3, num_critic_only_steps=2, num_steps_per_rollout=2,
            save_interval=1, max_actor_ckpt_to_keep=9,
        )
    )  # fmt: skip
    start = load_file(models / "policy" / "model.safetensors")
    policies = [load_file(run.policy_dir(v) / "model.safetensors") for v in (1, 2, 3)]
    same = [all((policy[n] == start[n]).all() for n in start) for policy in policies]
    assert same == [True, True, False]
    critics = [run.committed(step, "update").notes["critic"] for step in range(3)]
    assert len(set(critics)) == 3
    for step in range(3):
        metrics = metrics_of(run, step)
        assert len(metrics) == 2
        for found in metrics:
            assert ("train/loss" in found) is (step == 2)
            assert found["train/critic-grad_norm"] > 0
    assert steps_behind(run, 3) == {"actor": 2, "critic": 6}


def test_the_actors_schedule_ends_with_the_run(settings):
    changed = dict(num_rollout=4, num_critic_only_steps=2, num_steps_per_rollout=2)
    run = train(settings(**changed, lr_decay_style="linear", lr=1e-3, critic_lr=1e-3))
    rates = {
        name: [found[name] for step in range(4) for found in metrics_of(run, step) if name in found]
        for name in ("train/lr", "train/critic-lr")
    }
    assert rates["train/lr"] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert rates["train/critic-lr"] == pytest.approx([1e-3 * (8 - n) / 8 for n in range(8)])


def test_a_critic_step_that_is_not_finite_is_counted_and_its_batch_kept(
    settings, monkeypatch, capsys
):
    def endless(row, algorithm, counts):
        return lambda tensors: (tensors["value_BT"].sum() * float("nan"), {})

    monkeypatch.setattr(update, "critic_loss", endless)
    run = started(settings(num_steps_per_rollout=4, num_critic_only_steps=1))
    with pytest.raises(TrainingError, match=r"3 in a row: stopped; the batch is in .*000000"):
        do(run, 0, STAGES_OF_PPO)
    assert len(list((run.root / "inspect/000000").glob("sample-*.npz"))) == 4
    run = started(settings(num_steps_per_rollout=2, num_critic_only_steps=1))
    capsys.readouterr()
    do(run, 0, STAGES_OF_PPO)
    assert capsys.readouterr().err.count("warning: trainer: optimizer step 0: loss = nan") == 2
    for found in metrics_of(run, 0):
        assert found["train/critic-skipped_steps"] == 1
        assert "train/critic-lr" not in found


@pytest.fixture(scope="module")
def runs(settings):
    """The same three steps, straight through and with everything forgotten before each stage."""
    changed = dict(num_rollout=9, num_steps_per_rollout=2, save_interval=2, critic_load="critic",
                   critic_lr=3e-3)  # fmt: skip

    def go(name):
        run, warm = started(settings(name, **changed)), Warm()
        for step in range(4):
            for stage in STAGES_OF_PPO:
                do(run, step, [stage], warm if name == "straight" else Warm())
        return run

    return go("straight"), go("forgetful")


@pytest.fixture
def copies(runs, tmp_path):
    """Copies of both, to be damaged."""
    return [Run.open(shutil.copytree(run.root, tmp_path / run.root.name)) for run in runs]


def test_resuming_gives_the_same_actor_and_critic_to_the_bit(runs):
    straight, forgetful = runs
    for step in range(4):
        for stage in STAGES_OF_PPO:
            one, other = (run.committed(step, stage) for run in runs)
            assert one.content == other.content, (step, stage)
        assert straight.committed(step, "update").notes == (
            forgetful.committed(step, "update").notes
        )
    assert straight.policy_hash(4) != straight.policy_hash(3)


def learners_at(run, step):
    options = trainer_options(run.config, temperature=1.0)
    return learners_before(run, step, Warm(), options, lambda *_: pytest.fail("nothing to redo"))


def test_parts_of_different_steps_are_refused_with_both_named(copies):
    run, _ = copies
    versions = {version: path for version, path, _ in run.checkpoints(4)}
    assert sorted(versions) == [2, 4]
    learners = learners_at(run, 4)
    assert (learners.actor.step, learners.critic.step) == (8, 8)
    shutil.rmtree(versions[4] / "critic")
    shutil.copytree(versions[2] / "critic", versions[4] / "critic")
    told = (
        "000004.*actor at optimizer step 8, critic at optimizer step 4; the 4 updates before it "
        "left actor at optimizer step 8, critic at optimizer step 8"
    )
    with pytest.raises(ArtifactError, match=told):
        learners_at(run, 4)


def test_a_damaged_part_is_passed_over(copies, capsys):
    straight, run = copies
    (path,) = [path for version, path, _ in run.checkpoints(4) if version == 4]
    damaged = max((path / "critic").iterdir(), key=lambda file: file.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    do(run, 4, ["rollout", "reward", "score"])  # redoes updates 2 and 3 from the checkpoint at 2
    told = capsys.readouterr().err
    assert f"damaged: critic/{damaged.name} has " in told and "; going back" in told
    do(straight, 4, ["rollout", "reward", "score"])
    assert run.committed(4, "score").content == straight.committed(4, "score").content


def test_the_critic_starts_where_it_is_told_to(settings):
    values = []
    for name, changed in {"zero": {}, "loaded": {"critic_load": "critic"}}.items():
        run = started(settings(name, **changed))
        made_rollout(run, 0, np.random.default_rng(1))
        do(run, 0, ["score"])
        values.append(np.concatenate(score_lists(run, 0)["value"]))
    assert not values[0].any()
    assert values[1].all()


def test_the_timing_of_an_update_is_of_all_its_optimizer_steps(settings, monkeypatch):
    watches = []

    class Watch(Stopwatch):
        def total(self):
            watches.append(super().total())
            return watches[-1]

    monkeypatch.setattr(learner, "Stopwatch", Watch)
    run = started(settings(num_steps_per_rollout=2))
    made_rollout(run, 0, np.random.default_rng(3))
    do(run, 0, ["score", "advantage", "update"])
    timing = {name: value for name, value, _ in run.committed(0, "update").timing}
    critic_s, actor_s = watches[::2], watches[1::2]
    assert len(watches) == 4
    assert timing["trainer/step_s"] == pytest.approx(sum(actor_s))
    assert timing["trainer/critic-step_s"] == pytest.approx(sum(critic_s))
    lengths = [len(tokens) + 4 for tokens in rows(run.table(0, "rollout", "responses")).tokens]
    assert timing["trainer/tokens_per_s"] * sum(actor_s) == pytest.approx(sum(lengths))


def test_the_value_heads_output_is_no_view(settings):
    """FSDP warns of views: an in-place operation on one would skip its backward hook."""
    run = started(settings())
    made_rollout(run, 0, np.random.default_rng(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view")
        do(run, 0, ["score", "advantage", "update"])
