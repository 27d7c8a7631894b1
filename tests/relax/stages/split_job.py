"""Every row of the table through `optimizer_steps`, cut in several ways: one process or ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from process_group import joined, meeting_point
from stage_cases import VOCABULARY, holed_mask, ragged_lengths

from relax.algorithms import masking, rules
from relax.algorithms.whole_rollout import compute
from relax.config import Config
from relax.flags import load_config
from relax.stages.columns import padded
from relax.stages.training import Learners
from relax.stages.update import optimizer_steps
from relax.trainer.actor import Actor
from relax.trainer.critic import Critic
from relax.trainer.learner import Learner
from relax.trainer.numerics import make_deterministic
from relax.trainer.options import TrainerOptions
from relax.trainer.sequences import TrainSequence

GROUP, GROUPS, LIMIT = 7, 2, 9  # 14 responses in an optimizer step: 1, 2, 3 and 7 micro-batches
CUTS = {1: 14, 2: 7, 3: 5, 7: 2}  # micro-batches -> responses in each
TWO = {"num_steps_per_rollout": 2, "rollout_batch_size": 2 * GROUPS}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "r"}
WHITE = {"normalize_advantages": True}

# Name -> overrides. Each row of the table once by itself, then what may change its update.
ROWS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "rloo": {"calculate_per_token_loss": True},
    "ppo": {},
    "cispo": {},
    "gspo": {},
    "sapo": {},
    "m2po": {},
    "reinforce_plus_plus": {**WHITE, "kl_coef": 0.1, "ref_load": "r"},
    "reinforce_plus_plus_baseline": {**WHITE, **KL},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo all at once": {
        **TWO,
        **KL,
        "use_unbiased_kl": True,
        "entropy_coef": 0.01,
        "use_tis": True,
        "use_opsm": True,
        "eps_clip_c": 1.5,
        "eps_clip_high": 0.3,
    },
    "grpo per token": {**WHITE, "calculate_per_token_loss": True, "use_icepop": True},
    "grpo distilled": {**TWO, "use_opd": True, "opd_teacher_load": "t", "opd_log_prob_top_k": 2},
    "dr_grpo two steps": {**TWO, "entropy_coef": 0.01},
    "ppo two steps": {**TWO, "kl_coef": 0.1, "ref_load": "r", "gamma": 0.9, "lambd": 0.8},
    "cispo two steps": {**TWO, **KL, "kl_loss_type": "low_var_kl"},
    "gspo two steps": {**TWO, "use_opsm": True, "use_rollout_logprobs": True},
    "sapo two steps": {**TWO, "use_icepop": True},
    "m2po two steps": {**TWO, "m2po_kl2_budget": 1e-4, "m2po_miniclip_low": 0.001},
    "m2po engine's": {"use_rollout_logprobs": True, "m2po_kl2_budget": 0.05},
    "reinforce_plus_plus two steps": {**TWO, **WHITE, "kl_coef": 0.1, "ref_load": "r"},
    "reinforce_plus_plus_baseline two steps": {**TWO, **WHITE, **KL, "use_tis": True},
}
CASES = ROWS | VARIANTS


def config_of(name: str) -> Config:
    """The configuration of a case, checked like any other."""
    config = load_config(
        None,
        {
            "advantage_estimator": name.split(" ", maxsplit=1)[0],
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": GROUP,
            "rollout_max_response_len": LIMIT,
            **CASES[name],
        },
    )
    rules.check(config)
    return config


def made_sequences(count: int) -> list[TrainSequence]:
    """Ragged responses whose mask alone is known."""
    rng = np.random.default_rng(3)
    return [
        TrainSequence(
            sample_id=place,
            tokens=rng.integers(3, VOCABULARY, 2 + place % 4 + length),
            response_len=length,
            fields={"mask": holed_mask(length, place, rng).astype(np.float32)},
        )
        for place, length in enumerate(ragged_lengths(count, LIMIT, rng))
    ]


def made_groups(config: Config, logp_B: list[np.ndarray]) -> list[list[TrainSequence]]:
    """What `training_groups` would read: every column drifted from logp, NaN outside the mask."""
    rng = np.random.default_rng(11)
    sequences = made_sequences(config.responses_per_rollout)
    wanted = rules.scores_needed(config)
    lists: dict[str, list[np.ndarray]] = {"mask": [s.fields["mask"] for s in sequences]}
    for name in ("rollout_logp", "old_logp", "ref_logp", "teacher_logp", "value"):
        drawn = [rng.normal(0, 0.3, s.response_len).astype(np.float32) for s in sequences]
        if name not in wanted | {"rollout_logp"}:
            continue
        if name != "value":
            drawn = [noise + logp for noise, logp in zip(drawn, logp_B, strict=False)]
        lists[name] = [
            np.where(mask != 0, x, np.nan) for x, mask in zip(drawn, lists["mask"], strict=True)
        ]
    reward_B = torch.tensor(rng.choice([0.0, 1.0, 0.25], len(sequences)))
    batch = {f"{name}_BT": padded(values) for name, values in lists.items()}
    batch |= {"reward_B": reward_B, "group_id_B": torch.arange(len(sequences)) // GROUP}
    found = compute(rules.row_of(config), batch, config.algorithm.model_dump())
    made = {"advantage": found.advantage_BT, "return": found.return_BT}
    if config.algorithm.opd_log_prob_top_k:
        lists["top_k_overlap"] = [np.full(s.response_len, 0.5, np.float32) for s in sequences]
    if "value" in lists:
        lists["old_value"] = lists.pop("value")
    groups: list[list[TrainSequence]] = [[] for _ in range(config.rollout.rollout_batch_size)]
    for place, sequence in enumerate(sequences):
        fields = {name: values[place] for name, values in lists.items()}
        for name, value_BT in made.items():
            if value_BT is not None:
                fields[name] = value_BT[place, : sequence.response_len].numpy()
        groups[place // GROUP].append(dataclasses.replace(sequence, fields=fields))
    return groups


def mixed(groups: list[list[TrainSequence]], config: Config) -> list[list[TrainSequence]]:
    """The same optimizer steps with their samples in another order."""
    turned = [list(reversed(group)) for group in groups]
    return turned if config.optimizer_steps > 1 else list(reversed(turned))


class Bench:
    """One actor and one critic that go back to their start before each case."""

    def __init__(self, models: Path, dtype: str) -> None:
        options = TrainerOptions(
            lr=1e-4, weight_decay=0.1, temperature=0.9, micro_batch_size=14, dtype=dtype
        )
        self.options = options
        self.actor = Actor.load(models / "policy", options, num_schedule_steps=2)
        self.critic = Critic.load(models / "critic", options, num_schedule_steps=2)
        self.start = {id(x): {n: w.detach().clone() for n, w in x._trained.items()}
                      for x in (self.actor, self.critic)}  # fmt: skip

    def run(self, config: Config, groups: list[list[TrainSequence]], size: int) -> dict[str, Any]:
        """Metrics of every optimizer step; weights and first moments after the last."""
        critic = self.critic if "critic" in rules.row_of(config).needs else None
        learners = Learners(self.actor, critic)
        for learner in learners.parts.values():
            self._reset(learner, size)
        metrics = optimizer_steps(learners, config, 0, groups)
        tensors = {}
        for part, learner in learners.parts.items():
            for name, weight in learner._trained.items():
                moment = learner._optimizer.state[weight]["exp_avg"]
                tensors[f"{part} {name}"] = whole(weight)
                tensors[f"{part} {name} gradient"] = whole(moment)
        return {"metrics": metrics, "tensors": tensors}

    def _reset(self, learner: Learner, size: int) -> None:
        learner._model.options = dataclasses.replace(self.options, micro_batch_size=size)
        learner.step = 0
        with torch.no_grad():
            for name, weight in learner._trained.items():
                weight.copy_(self.start[id(learner)][name])
                for moment in learner._optimizer.state[weight].values():
                    moment.zero_()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return full.clone()


@contextlib.contextmanager
def all_in(dtype: str) -> Iterator[None]:
    """Let objectives and Qwen3's norms, both float32 whatever the model's dtype, be in dtype."""
    from transformers.models.qwen3 import modeling_qwen3

    if dtype == "float32":
        yield
        return
    norm = modeling_qwen3.Qwen3RMSNorm

    def forward(self, x):
        square = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(square + self.variance_epsilon))

    with (
        mock.patch.object(norm, "forward", forward),
        mock.patch.object(masking, "DTYPE", torch.float64),
    ):
        yield


def all_cases(models: Path, dtype: str) -> dict[str, dict[str, Any]]:
    """case -> layout -> result on this many ranks.

    Layouts: R ranks, M micro-batches; 3 in another order.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    logp_B = torch.load(models / "logp.pt", weights_only=False)
    found: dict[str, dict[str, Any]] = {}
    with all_in(dtype):
        bench = Bench(models, dtype)
        for name in CASES:
            config = config_of(name)
            groups = made_groups(config, logp_B)
            layouts = {
                f"{ranks} ranks, {m} cuts": (mixed(groups, config) if m == 3 else groups, size)
                for m, size in CUTS.items()
            }
            found[name] = {
                layout: bench.run(config, *arguments) for layout, arguments in layouts.items()
            }
    return found


def save_logp(models: Path) -> None:
    """Log-probabilities that every process starts from, of as many responses as a case may have."""
    options = TrainerOptions(temperature=0.9)
    actor = Actor.load(models / "policy", options, num_schedule_steps=1)
    found = [actor.logp(made_sequences(count), 0.9) for count in (14, 28)]
    torch.save(found[1], models / "logp.pt")


# --- ranks --------------------------------------------------------------------------------------

CONTEXT = multiprocessing.get_context("spawn")


def in_ranks(num_ranks: int, models: Path, directory: Path, dtypes: tuple[str, ...]) -> None:
    """One job of num_ranks processes through all cases; results in directory/DTYPE.RANK.pt."""
    port = meeting_point()
    processes = [
        CONTEXT.Process(target=_rank, args=((rank, num_ranks, port), models, directory, dtypes))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    logs = [file.read_text() for file in sorted(directory.glob("rank*.log"))]
    assert all(process.exitcode == 0 for process in processes), "\n".join(logs)


def _rank(
    place: tuple[int, int, int], models: Path, directory: Path, dtypes: tuple[str, ...]
) -> None:
    rank, num_ranks, port = place
    log = os.open(directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    make_deterministic(1)
    with joined(rank, num_ranks, port, timeout_s=60):
        for dtype in dtypes:
            torch.save(all_cases(models, dtype), directory / f"{dtype}.{rank}.pt")
