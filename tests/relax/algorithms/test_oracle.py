"""Every function against an oracle: plain Python in double precision, written from the formulas.

The oracle sees lists of valid tokens only and shares no code with the package; the package sees
padded tensors with holes, empty and one-token responses, shuffled groups, and NaN and Inf planted
wherever the mask is 0.
"""

import math
import random
import statistics

import pytest
import torch

from relax.algorithms import advantages, corrections, kl, objectives, reduce

NAN, INF = float("nan"), float("inf")
SEEDS = range(8)


def ragged(seed):
    """(mask, planted tensors by name, the same as lists of valid tokens), 12 x 9, groups of 3."""
    rng = random.Random(seed)
    lengths = [0, 1, 1, *(rng.randint(1, 9) for _ in range(9))]
    rng.shuffle(lengths)
    mask = [[t < n and rng.random() > 0.25 for t in range(9)] for n in lengths]
    group_id = [i // 3 for i in range(12)]
    rng.shuffle(group_id)
    draws = {
        "logp": lambda: -rng.random() * 3,
        "old": lambda: -rng.random() * 3,
        "ref": lambda: -rng.random() * 3,
        "advantage": lambda: rng.choice([rng.gauss(0, 1), 0.0, -0.5, 2.0]),
        "value": lambda: rng.gauss(0, 1),
        "return": lambda: rng.gauss(0, 1),
    }
    lists, tensors = {}, {}
    for name, draw in draws.items():
        rows = [[draw() for _ in range(9)] for _ in mask]
        lists[name] = [
            [x for x, m in zip(row, where, strict=True) if m]
            for row, where in zip(rows, mask, strict=True)
        ]
        planted = [
            [x if m else rng.choice([NAN, INF, -INF, 1e30]) for x, m in zip(r, w, strict=True)]
            for r, w in zip(rows, mask, strict=True)
        ]
        tensors[name] = torch.tensor(planted, dtype=torch.float64)
    reward = [rng.choice([0.0, 1.0, 0.3, rng.gauss(0, 5)]) for _ in mask]
    return torch.tensor(mask), tensors, lists, reward, group_id


def compare(found_BT, mask_BT, wanted, *, rtol=2e-5, atol=2e-6):
    """Valid tokens equal the oracle's lists, all others are exactly 0."""
    assert found_BT[~mask_BT].abs().sum() == 0
    for row_T, where_T, expected in zip(found_BT, mask_BT, wanted, strict=True):
        got = row_T[where_T].tolist()
        assert got == pytest.approx(expected, rel=rtol, abs=atol)


# --- advantages ----------------------------------------------------------------------------------


def others(reward, group_id, i):
    return [r for j, r in enumerate(reward) if group_id[j] == group_id[i] and j != i]


def members(reward, group_id, i):
    return [r for j, r in enumerate(reward) if group_id[j] == group_id[i]]


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed):
    _, _, _, reward, group_id = ragged(seed)
    tensors = torch.tensor(reward, dtype=torch.float64), torch.tensor(group_id)
    every = range(len(reward))
    mean = [statistics.fmean(members(reward, group_id, i)) for i in every]
    std = [statistics.stdev(members(reward, group_id, i)) for i in every]
    assert advantages.leave_one_out(*tensors).tolist() == pytest.approx(
        [reward[i] - statistics.fmean(others(reward, group_id, i)) for i in every], abs=1e-6
    )
    assert advantages.group_centered(*tensors).tolist() == pytest.approx(
        [reward[i] - mean[i] for i in every], abs=1e-6
    )
    assert advantages.group_normalized(*tensors).tolist() == pytest.approx(
        [(reward[i] - mean[i]) / (std[i] + 1e-6) for i in every], abs=1e-6
    )


def to_go(reward, gaps, kl_coef, gamma):
    """Sum over s >= t of gamma^(s - t) times the reward of s, by the definition."""
    own = [-kl_coef * gap for gap in gaps]
    if own:
        own[-1] += reward
    return [sum(gamma ** (s - t) * own[s] for s in range(t, len(own))) for t in range(len(own))]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_to_go_return(seed, gamma):
    mask_BT, tensors, lists, reward, _ = ragged(seed)
    gap_BT = tensors["old"] - tensors["ref"]
    found_BT = advantages.kl_to_go_return(
        torch.tensor(reward), gap_BT, mask_BT, kl_coef=0.3, gamma=gamma
    )
    gaps = [
        [o - r for o, r in zip(old, ref, strict=True)]
        for old, ref in zip(lists["old"], lists["ref"], strict=True)
    ]
    compare(found_BT, mask_BT, [to_go(r, g, 0.3, gamma) for r, g in zip(reward, gaps, strict=True)])


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae(seed, gamma, lambd):
    mask_BT, tensors, lists, _, _ = ragged(seed)
    rewards, values = lists["return"], lists["value"]
    wanted = []
    for own, value in zip(rewards, values, strict=True):
        after = [*value[1:], 0.0][: len(value)]
        delta = [r + gamma * n - v for r, n, v in zip(own, after, value, strict=True)]
        wanted.append(
            [
                sum((gamma * lambd) ** (s - t) * delta[s] for s in range(t, len(delta)))
                for t in range(len(delta))
            ]
        )
    advantage_BT, return_BT = advantages.gae(
        tensors["return"], tensors["value"], mask_BT, gamma=gamma, lambd=lambd
    )
    compare(advantage_BT, mask_BT, wanted)
    returns = [
        [a + v for a, v in zip(x, y, strict=True)] for x, y in zip(wanted, values, strict=True)
    ]
    compare(return_BT, mask_BT, returns)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening(seed):
    mask_BT, tensors, lists, _, _ = ragged(seed)
    every = [a for row in lists["advantage"] for a in row]
    mean = statistics.fmean(every)
    for function, root in (
        (advantages.whiten_tokens, math.sqrt(statistics.pvariance(every))),
        (advantages.whiten_unbiased, math.sqrt(statistics.variance(every) + 1e-8)),
    ):
        wanted = [[(a - mean) / root for a in row] for row in lists["advantage"]]
        compare(function(tensors["advantage"], mask_BT), mask_BT, wanted)


# --- objectives: (loss, d loss / d logp, clipped) of one token ----------------------------------


def clipped_surrogate(r, a, low, high, cap=None):
    bounded = min(max(r, low), high)
    loss, slope, clipped = -r * a, -r * a, False
    if -bounded * a > loss:
        loss, slope, clipped = -bounded * a, 0.0, True
    if cap is not None and a < 0 and loss > -cap * a:
        loss, slope = -cap * a, 0.0
    return loss, slope, clipped


def ppo(lp, old, a):
    return [
        clipped_surrogate(math.exp(x - y), w, 0.8, 1.3, 2.5)
        for x, y, w in zip(lp, old, a, strict=True)
    ]


def reinforce(lp, old, a):
    return [(-w * x, -w, False) for x, w in zip(lp, a, strict=True)]


def cispo(lp, old, a):
    found = []
    for x, y, w in zip(lp, old, a, strict=True):
        r = math.exp(x - y)
        c = min(max(r, 0.8), 1.3)
        found.append((-c * w * x, -c * w, c != r))
    return found


def gspo(lp, old, a):
    if not lp:
        return []
    s = math.exp(sum(x - y for x, y in zip(lp, old, strict=True)) / len(lp))
    return [clipped_surrogate(s, w, 0.8, 1.3) for w in a]


def sapo(lp, old, a):
    found = []
    for x, y, w in zip(lp, old, a, strict=True):
        r, tau = math.exp(x - y), 0.8 if w > 0 else 1.4
        g = 1 / (1 + math.exp(-tau * (r - 1)))
        found.append((-4 / tau * g * w, -4 * g * (1 - g) * r * w, 4 * g * (1 - g) < 0.9))
    return found


def m2po(lp, old, a):
    return [
        clipped_surrogate(math.exp(x - y), w, 0.75, 1.4) for x, y, w in zip(lp, old, a, strict=True)
    ]


BAND = {"eps_clip": 0.2, "eps_clip_high": 0.3}
OBJECTIVES = {
    "ppo_clip": (ppo, BAND | {"eps_clip_c": 2.5}),
    "reinforce": (reinforce, {}),
    "cispo": (cispo, BAND),
    "gspo": (gspo, BAND),
    "sapo": (sapo, {"sapo_tau_pos": 0.8, "sapo_tau_neg": 1.4}),
    "m2po": (m2po, {"eps_low": 0.25, "eps_high": 0.4}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", SEEDS)
def test_objectives(name, seed):
    oracle, given = OBJECTIVES[name]
    mask_BT, tensors, lists, _, _ = ragged(seed)
    logp_BT = tensors["logp"].requires_grad_()
    loss_BT, clipped_BT = getattr(objectives, name)(
        logp_BT, tensors["old"], tensors["advantage"], mask_BT, **given
    )
    weight_BT = torch.linspace(0.5, 1.5, mask_BT.numel()).view_as(mask_BT)
    (gradient_BT,) = torch.autograd.grad((loss_BT * weight_BT).sum(), logp_BT)
    wanted = [
        oracle(lp, old, a)
        for lp, old, a in zip(lists["logp"], lists["old"], lists["advantage"], strict=True)
    ]
    compare(loss_BT.detach(), mask_BT, [[w[0] for w in row] for row in wanted])
    compare(gradient_BT / weight_BT, mask_BT, [[w[1] for w in row] for row in wanted])
    compare(clipped_BT.float(), mask_BT, [[float(w[2]) for w in row] for row in wanted])


@pytest.mark.parametrize("seed", SEEDS)
def test_value_clip(seed):
    mask_BT, tensors, lists, _, _ = ragged(seed)
    value_BT = tensors["value"].requires_grad_()
    loss_BT, clipped_BT = objectives.value_clip(
        value_BT, tensors["old"], tensors["return"], mask_BT, value_clip=0.4
    )
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), value_BT)
    losses, slopes, flags = [], [], []
    for row in zip(lists["value"], lists["old"], lists["return"], strict=True):
        losses.append([])
        slopes.append([])
        flags.append([])
        for v, old, target in zip(*row, strict=True):
            near = min(max(v, old - 0.4), old + 0.4)
            inside = abs(v - old) <= 0.4
            plain, bounded = (v - target) ** 2, (near - target) ** 2
            losses[-1].append(max(plain, bounded))
            slopes[-1].append(2 * (v - target) if inside or plain >= bounded else 0.0)
            flags[-1].append(float(not inside))
    compare(loss_BT.detach(), mask_BT, losses)
    compare(gradient_BT, mask_BT, slopes)
    compare(clipped_BT.float(), mask_BT, flags)


# --- the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_kl(seed):
    mask_BT, tensors, lists, _, _ = ragged(seed)
    formulas = {
        "k1": (lambda q: q, lambda q: 1.0),
        "k2": (lambda q: q * q / 2, lambda q: q),
        "k3": (lambda q: math.exp(-q) - 1 + q, lambda q: 1 - math.exp(-q)),
    }
    for kind, (value, slope) in formulas.items():
        logp_BT = tensors["logp"].detach().requires_grad_()
        kl_BT = kl.estimate(logp_BT, tensors["ref"], kind, mask_BT=mask_BT)
        (gradient_BT,) = torch.autograd.grad(kl_BT.sum(), logp_BT)
        gaps = [
            [x - y for x, y in zip(a, b, strict=True)]
            for a, b in zip(lists["logp"], lists["ref"], strict=True)
        ]
        compare(kl_BT.detach(), mask_BT, [[value(q) for q in row] for row in gaps])
        compare(gradient_BT, mask_BT, [[slope(q) for q in row] for row in gaps])


@pytest.mark.parametrize("seed", SEEDS)
def test_corrections(seed):
    mask_BT, tensors, lists, _, _ = ragged(seed)
    pairs = list(zip(lists["old"], lists["ref"], strict=True))
    ratio = [[math.exp(x - y) for x, y in zip(a, b, strict=True)] for a, b in pairs]
    given = {"tis_clip_low": 0.5, "tis_clip": 2.0}
    weight_BT = corrections.tis_weight(tensors["old"], tensors["ref"], mask_BT, **given)
    compare(weight_BT, mask_BT, [[min(max(r, 0.5), 2.0) for r in row] for row in ratio])
    weight_BT = corrections.icepop_weight(tensors["old"], tensors["ref"], mask_BT, **given)
    compare(weight_BT, mask_BT, [[r if 0.5 <= r <= 2.0 else 0.0 for r in row] for row in ratio])
    kept_BT = corrections.sequence_keep_mask(
        tensors["logp"], tensors["old"], tensors["advantage"], mask_BT, opsm_delta=0.1
    )
    wanted = []
    for lp, old, a in zip(lists["logp"], lists["old"], lists["advantage"], strict=True):
        drifted = bool(lp) and statistics.fmean(y - x for x, y in zip(lp, old, strict=True)) > 0.1
        wanted.append([float(not (drifted and w < 0)) for w in a])
    compare(kept_BT.float(), mask_BT, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_m2po_bounds_by_bisection(seed):
    """The oracle finds tau by halving an interval, not by sorting."""
    mask_BT, tensors, lists, _, _ = ragged(seed)
    squares = [
        (x - y) ** 2
        for row in zip(lists["logp"], lists["old"], lists["advantage"], strict=True)
        for x, y, a in zip(*row, strict=True)
        if (a > 0 and x > y) or (a < 0 and x < y)
    ]
    low, high = 0.0, max(squares)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(s, middle) for s in squares) < len(squares) * 0.2:
            low = middle
        else:
            high = middle
    found = objectives.m2po_bounds(
        tensors["logp"],
        tensors["old"],
        tensors["advantage"],
        mask_BT,
        m2po_kl2_budget=0.2,
        m2po_miniclip_low=0.0,
        m2po_miniclip_high=0.0,
    )
    assert found.m2_before == pytest.approx(statistics.fmean(squares), rel=1e-12)
    assert found.eps_low == pytest.approx(1 - math.exp(-math.sqrt(low)), rel=1e-9)
    assert found.eps_high == pytest.approx(math.exp(math.sqrt(low)) - 1, rel=1e-9)
    assert found.m2_after == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions(seed):
    mask_BT, _, lists, _, _ = ragged(seed)
    counts = [len(row) for row in lists["logp"]]
    whole = [[1 / (max(n, 1) * 20)] * n for n in counts]
    compare(reduce.response_mean_weights(mask_BT, num_responses=20), mask_BT, whole)
    equal = [[1 / 77] * n for n in counts]
    compare(reduce.token_mean_weights(mask_BT, num_tokens=77), mask_BT, equal)
    constant = [[1 / 640] * n for n in counts]
    found_BT = reduce.constant_weights(mask_BT, num_responses=20, max_response_len=32)
    compare(found_BT, mask_BT, constant)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("gap", [99.0, -99.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_of_99_give_finite_values_and_gradients(name, gap, advantage):
    logp_BT = torch.full((2, 3), -100.0, requires_grad=True)
    loss_BT, _ = getattr(objectives, name)(
        logp_BT,
        torch.full((2, 3), -100.0 - gap),
        torch.full((2, 3), advantage),
        torch.ones(2, 3),
        **(OBJECTIVES[name][1] | ({"eps_low": 1.0, "eps_high": INF} if name == "m2po" else {})),
    )
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
    assert torch.isfinite(loss_BT).all() and torch.isfinite(gradient_BT).all()


@pytest.mark.parametrize("gap", [99.0, -99.0])
def test_m2_uses_the_log_ratio_unclamped(gap):
    sign = math.copysign(1.0, gap)
    found = objectives.m2po_bounds(
        torch.tensor([[gap]]), torch.zeros(1, 1), torch.tensor([[sign]]), torch.ones(1, 1)
    )
    assert found.m2_before == 99.0**2
    assert math.isfinite(found.eps_high)
