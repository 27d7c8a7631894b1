"""CPU time of the algorithms' mathematics on one thread, beside verl and OpenRLHF where installed.

python benchmarks/algorithms.py [--responses 4096] [--positions 1024] [--repeats 5]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from relax.algorithms import advantages, objectives

GROUP = 8
TARGETS_MS = {
    "group_normalized": 5,
    "leave_one_out": 5,
    "group_centered": 5,
    "kl_to_go_return": 100,
    "gae": 100,
    "ppo_clip": 80,
    "cispo": 60,
}
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = make_data(given.responses, given.positions)
    peers = {**verl(data), **openrlhf(data)}
    print(f"{given.responses:,} responses x {given.positions:,} positions, one thread, CPU time:")
    print(f"best of {given.repeats}; load average {os.getloadavg()[0]:.1f}")
    print(f"{'function':34}{'ms':>9}{'target':>8}{'peer ms':>9}{'ratio':>7}")
    for name, call in ours(data).items():
        spent = best(call, given.repeats)
        target = TARGETS_MS.get(name.split(" ")[0], "")
        line = f"{name:34}{spent:9.1f}{target:>8}"
        if name in peers:
            peer_spent = best(peers[name], given.repeats)
            line += f"{peer_spent:9.1f}{peer_spent / spent:7.1f}"
        print(line)
    for package in ("verl", "openrlhf"):
        if importlib.util.find_spec(package) is None:
            print(f"{package}: not installed here, so there is no column of it")


def best(call: Call, repeats: int) -> float:
    """Least CPU time of a call, in ms, after one that warms up."""
    call()
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return min(spent) * 1e3


def make_data(num_responses: int, num_positions: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_responses, num_positions)
    lengths_B = torch.randint(
        num_positions // 4, num_positions + 1, (num_responses,), generator=generator
    )
    mask_BT = (torch.arange(num_positions) < lengths_B[:, None]).float()
    noise = lambda scale: torch.randn(shape, generator=generator) * scale  # noqa: E731
    old_BT = -torch.rand(shape, generator=generator)
    return {
        "reward_B": torch.randint(0, 2, (num_responses,), generator=generator).float(),
        "group_id_B": torch.arange(num_responses) // GROUP,
        "mask_BT": mask_BT,
        "holes_BT": mask_BT * (torch.rand(shape, generator=generator) > 0.1),
        "last_B": lengths_B - 1,
        "old_BT": old_BT,
        "new_BT": old_BT + noise(0.05),
        "value_BT": noise(0.1),
        "advantage_BT": torch.randn(num_responses, 1, generator=generator) * mask_BT,
    }


def ours(data: dict[str, torch.Tensor]) -> dict[str, Call]:
    reward_B, group_id_B, mask_BT = data["reward_B"], data["group_id_B"], data["mask_BT"]
    kl_BT = value_BT = data["value_BT"]
    holes_BT = data["holes_BT"]
    token_BT = advantages.token_rewards(reward_B, None, mask_BT).float()
    decay = {"gamma": 0.99, "lambd": 0.95}
    calls: dict[str, Call] = {
        name: lambda name=name: getattr(advantages, name)(reward_B, group_id_B)
        for name in ("group_normalized", "group_centered", "leave_one_out")
    }
    calls |= {
        "kl_to_go_return": lambda: advantages.kl_to_go_return(
            reward_B, kl_BT, mask_BT, kl_coef=0.1, gamma=0.99
        ),
        "kl_to_go_return (masks with holes)": lambda: advantages.kl_to_go_return(
            reward_B, kl_BT, holes_BT, kl_coef=0.1, gamma=0.99
        ),
        "gae": lambda: advantages.gae(token_BT, value_BT, mask_BT, **decay),
        "gae (masks with holes)": lambda: advantages.gae(token_BT, value_BT, holes_BT, **decay),
        "whiten_tokens": lambda: advantages.whiten_tokens(value_BT, mask_BT),
    }
    for name in ("ppo_clip", "cispo", "gspo", "sapo", "reinforce"):
        calls[f"{name} forward+backward"] = lambda name=name: step(getattr(objectives, name), data)
    calls["m2po_bounds"] = lambda: objectives.m2po_bounds(
        data["new_BT"], data["old_BT"], data["advantage_BT"], mask_BT
    )
    return calls


def step(objective: Callable, data: dict[str, torch.Tensor]) -> None:
    logp_BT = data["new_BT"].detach().requires_grad_()
    loss_BT, _ = objective(logp_BT, data["old_BT"], data["advantage_BT"], data["mask_BT"])
    loss_BT.sum().backward()


def verl(data: dict[str, torch.Tensor]) -> dict[str, Call]:
    """The same work by verl's functions, under the names of ours; nothing where it is missing."""
    if importlib.util.find_spec("verl") is None:
        return {}
    import verl.trainer.ppo.core_algos as core
    from omegaconf import OmegaConf
    from verl.workers.config import FSDPActorConfig

    reward_BT, mask_BT = torch.zeros_like(data["mask_BT"]), data["mask_BT"]
    reward_BT[torch.arange(len(reward_BT)), data["last_B"]] = data["reward_B"]
    index = data["group_id_B"].numpy().astype(object)
    actor = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
    )

    def loss(name: str, mean: str = "token-mean") -> Call:
        def call() -> None:
            logp_BT = data["new_BT"].detach().requires_grad_()
            found, _ = core.get_policy_loss_fn(name)(
                old_log_prob=data["old_BT"],
                log_prob=logp_BT,
                advantages=data["advantage_BT"],
                response_mask=mask_BT,
                loss_agg_mode=mean,
                config=actor,
            )
            found.backward()

        return call

    whole = "seq-mean-token-mean"
    discount = OmegaConf.create({"gamma": 0.99})
    return {
        "group_normalized": lambda: core.compute_grpo_outcome_advantage(reward_BT, mask_BT, index),
        "leave_one_out": lambda: core.compute_rloo_outcome_advantage(reward_BT, mask_BT, index),
        "kl_to_go_return": lambda: core.compute_reinforce_plus_plus_outcome_advantage(
            reward_BT, mask_BT, config=discount
        ),
        "gae": lambda: core.compute_gae_advantage_return(
            reward_BT, data["value_BT"], mask_BT, 0.99, 0.95
        ),
        "ppo_clip forward+backward": loss("vanilla"),
        "cispo forward+backward": loss("cispo"),
        "gspo forward+backward": loss("gspo", whole),
        "sapo forward+backward": loss("sapo", whole),
    }


def openrlhf(data: dict[str, torch.Tensor]) -> dict[str, Call]:
    """OpenRLHF's PPO loss, where it is installed and verl is not."""
    if importlib.util.find_spec("openrlhf") is None or importlib.util.find_spec("verl") is not None:
        return {}
    from openrlhf.models.loss import PolicyLoss

    policy_loss = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2)

    def call() -> None:
        logp_BT = data["new_BT"].detach().requires_grad_()
        tensors = logp_BT, data["old_BT"], data["advantage_BT"]
        policy_loss(*tensors, action_mask=data["mask_BT"])[0].backward()

    return {"ppo_clip forward+backward": call}


if __name__ == "__main__":
    main()
