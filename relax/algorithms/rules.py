"""What a configuration may be with its algorithm: every rule, before anything is loaded.

Rules read the fields of the algorithm's row and never its name. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax.algorithms.table import ALGORITHMS, CUSTOM_KNOBS, KNOBS, Algorithm
from relax.config import Config, section_of, sections, value_of
from relax.errors import ConfigError
from relax.flags import nearest

OWNER = section_of()
OTHER_WEIGHTS = ("use_tis", "use_icepop", "use_rollout_logprobs")


def check(config: Config) -> list[str]:
    """Warnings about a configuration that may be run; ConfigError with one line a broken rule."""
    row = row_of(config)
    broken = [line for rule in RULES for line in rule(config, row)]
    if broken:
        raise ConfigError("\n".join(broken))
    return [line for rule in WARNINGS for line in rule(config, row)]


def row_of(config: Config) -> Algorithm:
    """The row of the configured algorithm; ConfigError for one that the table does not have."""
    name = config.algorithm.advantage_estimator
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.advantage_estimator = {name!r}: known: {', '.join(ALGORITHMS)}"
            f"{nearest(name, ALGORITHMS)}"
        )
    return ALGORITHMS[name]


def default_of(name: str):
    """The default of a setting."""
    return sections()[OWNER[name]].model_fields[name].default


def scores_needed(config: Config) -> frozenset[str]:
    """Columns of the table `scores` that advantages and updates ask for.

    old_logp may be left out where the update's own log-probabilities are the old ones: with one
    optimizer step per rollout and no KL in the reward, or in true_on_policy_mode.
    """
    row, settings = row_of(config), config.algorithm
    kl_in_reward = settings.kl_coef > 0
    own = settings.true_on_policy_mode or (config.optimizer_steps == 1 and not kl_in_reward)
    wanted = {
        "old_logp": not own and not settings.use_rollout_logprobs,
        "ref_logp": kl_in_reward or settings.use_kl_loss,
        "teacher_logp": settings.use_opd,
        "value": "critic" in row.needs,
    }
    return frozenset(name for name, needed in wanted.items() if needed)


def unused(config: Config, row: Algorithm) -> dict[str, str]:
    """Settings that must stay at their defaults with this row, and why."""
    free = set(row.uses)
    for name, knobs in CUSTOM_KNOBS.items():
        free |= knobs if value_of(config, name) else set()
    knobs = sorted(KNOBS - free - row.refused.keys())
    return dict.fromkeys(knobs, f"{row.name} does not use it: leave it out") | dict(row.refused)


def _line(config: Config, name: str, allowed: str, why: str) -> str:
    return f"{OWNER[name]}.{name} = {value_of(config, name)!r}: {allowed}; {why}"


# --- rules ---------------------------------------------------------------------------------------


def _defaults_kept(config: Config, row: Algorithm) -> Iterator[str]:
    for name, why in unused(config, row).items():
        if value_of(config, name) != default_of(name):
            reason = why if why.startswith(row.name) else f"{row.name}: {why}"
            yield _line(config, name, f"must be {_shown(default_of(name))}", reason)


def _required(config: Config, row: Algorithm) -> Iterator[str]:
    for name, why in row.required.items():
        if not value_of(config, name):
            allowed = "must be on" if default_of(name) is False else "must be above 0"
            yield _line(config, name, allowed, f"{row.name}: {why}")


def _groups(config: Config, row: Algorithm) -> Iterator[str]:
    raw = config.algorithm.disable_rewards_normalization
    if "groups" in row.needs and config.rollout.n_samples_per_prompt < 2 and not raw:
        yield _line(
            config,
            "n_samples_per_prompt",
            "must be at least 2",
            f"{row.name} compares a response with others to the same prompt",
        )


def _one_update(config: Config, row: Algorithm) -> Iterator[str]:
    if "one_update" not in row.needs or config.optimizer_steps == 1:
        return
    why = f"{row.name} updates once per rollout: its objective is unclipped"
    steps = config.update.num_steps_per_rollout
    if steps is not None and steps > 1:
        yield _line(config, "num_steps_per_rollout", "must be unset or 1", why)
    if config.update.global_batch_size is not None:
        whole = config.responses_per_rollout
        allowed = f"must be rollout_batch_size * n_samples_per_prompt = {whole}"
        yield _line(config, "global_batch_size", allowed, why)


def _kl_places(config: Config, row: Algorithm) -> Iterator[str]:
    settings = config.algorithm
    if settings.kl_coef > 0 and settings.kl_loss_coef > 0:
        yield _line(
            config, "kl_coef", "must be 0 where kl_loss_coef is not", "one KL term is enough"
        )
    if settings.kl_loss_coef > 0 and not settings.use_kl_loss:
        yield _line(config, "kl_loss_coef", "must be 0", "it has no effect without use_kl_loss")
    if settings.use_unbiased_kl and not settings.use_kl_loss:
        yield _line(config, "use_unbiased_kl", "must be off", "no effect without use_kl_loss")
    for name in ("kl_coef", "use_kl_loss"):
        if value_of(config, name) and not config.model.ref_load:
            yield _line(config, name, "needs ref_load", "the KL is to a reference model")


def _kl_type(config: Config, row: Algorithm) -> Iterator[str]:
    kind = config.algorithm.kl_loss_type
    if kind is None or kind in row.kl_types:
        return
    why = f"those of {row.name}"
    if kind == "k1" and "use_kl_loss" in row.uses:
        why = "the gradient of k1 as a loss ignores the reference"
    yield _line(config, "kl_loss_type", f"must be unset or {' or '.join(row.kl_types)}", why)


def _weights(config: Config, row: Algorithm) -> Iterator[str]:
    given = [name for name in OTHER_WEIGHTS if value_of(config, name)]
    for name in given[1:]:
        yield _line(
            config, name, f"must be off with {given[0]}", "each answers engine mismatch by itself"
        )
    low, high = config.algorithm.tis_clip_low, config.algorithm.tis_clip
    if low > high:
        yield _line(config, "tis_clip_low", f"must be at most tis_clip = {high}", "it is a band")
    cap = config.algorithm.eps_clip_c
    if cap is not None and not cap > 1:
        yield _line(
            config, "eps_clip_c", "must be above 1", "it caps losses beyond the ordinary clip"
        )


def _truncated_sampling(config: Config, row: Algorithm) -> Iterator[str]:
    given = [name for name in OTHER_WEIGHTS if value_of(config, name)]
    for name in _cut_distributions(config):
        if given:
            why = "the engine's log-probabilities are of another distribution than the trainer's"
            yield _line(config, name, f"must be {default_of(name)} with {given[0]}", why)


def _cut_distributions(config: Config) -> list[str]:
    names = ("rollout_top_p", "rollout_top_k")
    return [name for name in names if value_of(config, name) != default_of(name)]


def _on_policy_mode(config: Config, row: Algorithm) -> Iterator[str]:
    if not config.algorithm.true_on_policy_mode:
        return
    faults = {
        f"{config.optimizer_steps} optimizer steps per rollout": config.optimizer_steps > 1,
        "use_rollout_logprobs": config.algorithm.use_rollout_logprobs,
        f"max_staleness = {config.rollout.max_staleness}": config.rollout.max_staleness > 0,
        "kl_coef": config.algorithm.kl_coef > 0,
    }
    for what in (what for what, found in faults.items() if found):
        why = "it takes the update's own log-probabilities as the old ones"
        yield _line(config, "true_on_policy_mode", f"must be off with {what}", why)


def _asynchronous(config: Config, row: Algorithm) -> Iterator[str]:
    if not config.rollout.fully_async:
        return
    reasons = {
        "normalize_advantages": "there is no whole rollout to whiten over",
        "use_dynamic_global_batch_size": "there is no rollout whose size it could follow",
    }
    for name, why in reasons.items():
        if value_of(config, name):
            yield _line(config, name, "must be off with fully_async", why)


def _distillation(config: Config, row: Algorithm) -> Iterator[str]:
    if config.algorithm.use_opd and not config.model.opd_teacher_load:
        yield _line(config, "use_opd", "needs opd_teacher_load", "the teacher gives the target")
    if config.algorithm.opd_only_reward and not config.algorithm.use_opd:
        yield _line(config, "opd_only_reward", "must be off", "no effect without use_opd")


def _skipping(config: Config, row: Algorithm) -> Iterator[str]:
    if not config.update.skip_zero_advantage:
        return
    for name in ("entropy_coef", "use_kl_loss", "use_opd"):
        if value_of(config, name) != default_of(name):
            allowed = f"needs {name} at {default_of(name)!r}"
            yield _line(config, "skip_zero_advantage", allowed, "it moves every token")
    if "critic" in row.needs:
        why = "the critic learns from every response"
        yield _line(config, "skip_zero_advantage", f"not with {row.name}", why)


RULES = (
    _defaults_kept,
    _required,
    _groups,
    _one_update,
    _kl_places,
    _kl_type,
    _weights,
    _truncated_sampling,
    _on_policy_mode,
    _asynchronous,
    _distillation,
    _skipping,
)


# --- warnings ------------------------------------------------------------------------------------


def _stale(config: Config, row: Algorithm) -> Iterator[str]:
    lag = config.rollout.max_staleness
    if lag == 0:
        return
    start = f"rollout.max_staleness = {lag}"
    if not any(value_of(config, name) for name in OTHER_WEIGHTS):
        yield (
            f"{start}: stale data is not corrected; give use_tis, use_icepop or "
            "use_rollout_logprobs"
        )
    if row.bounds and config.optimizer_steps == 1 and not config.algorithm.use_rollout_logprobs:
        yield (
            f"{start}: with one optimizer step per rollout the ratio is 1, and the bound of "
            f"{row.name} cannot engage"
        )


def _cut_sampling(config: Config, row: Algorithm) -> Iterator[str]:
    for name in _cut_distributions(config):
        yield (
            f"rollout.{name} = {value_of(config, name)}: the trainer's log-probabilities are of "
            "the whole distribution, the samples are not"
        )


DEPENDENT = {
    "tis_clip": ("use_tis", "use_icepop"),
    "tis_clip_low": ("use_tis", "use_icepop"),
    "opsm_delta": ("use_opsm",),
    "opd_kl_coef": ("use_opd",),
    "opd_log_prob_top_k": ("use_opd",),
    "ref_update_interval": ("use_kl_loss", "kl_coef"),
    "kl_loss_type": ("use_kl_loss", "kl_coef"),
    "opd_teacher_load": ("use_opd",),
    "eval_interval": ("eval_prompt_data",),
}


def _without_effect(config: Config, row: Algorithm) -> Iterator[str]:
    for name, switches in DEPENDENT.items():
        on = any(value_of(config, switch) for switch in switches)
        if value_of(config, name) != default_of(name) and not on:
            yield _line(config, name, "no effect", f"without {' or '.join(switches)}")
    if (
        config.algorithm.disable_rewards_normalization
        and config.algorithm.disable_grpo_std_normalization
    ):
        yield _line(config, "disable_grpo_std_normalization", "no effect", "rewards are raw")


def _schedule(config: Config, row: Algorithm) -> Iterator[str]:
    settings, rollouts = config.update, config.run.num_rollout
    steps = rollouts * config.optimizer_steps
    if settings.lr_warmup_iters >= steps:
        why = f"the run takes {steps}, and ends before the rate is lr"
        yield _line(config, "lr_warmup_iters", "as many optimizer steps as the run or more", why)
    if settings.min_lr > settings.lr:
        why = "the rate would end above its peak" if _decays(config) else "and lr does not decay"
        yield _line(config, "min_lr", f"above lr = {settings.lr!r}", why)
    if 0 < rollouts <= config.algorithm.num_critic_only_steps:
        why = f"of num_rollout = {rollouts}: the policy is never trained"
        yield _line(config, "num_critic_only_steps", "all steps of the run", why)


def _decays(config: Config) -> bool:
    return config.update.lr_decay_style != "constant"


WARNINGS = (_stale, _cut_sampling, _without_effect, _schedule)


def _shown(value: object) -> str:
    named = {None: "unset", False: "off", "": "unset"}
    return named.get(value, str(value)) if isinstance(value, str | bool | None) else str(value)
