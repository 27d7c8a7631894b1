"""Which sequences share a micro-batch, and how the ranks share the micro-batches.

A plan is a pure function of lengths and families, so that every rank computes the same one alone.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from relax.errors import ConfigError


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bins: each sequence goes where it leaves the least room.

    Returns index lists whose lengths sum to at most capacity. Free room is kept as one integer
    whose bit c says that a bin with c tokens of room exists, so that the search for the tightest
    bin is a shift and a lowest-bit, whatever the number of bins.
    """
    bins: list[list[int]] = []
    bins_with_room: dict[int, list[int]] = defaultdict(list)
    rooms = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = bins_with_room[room].pop()
            if not bins_with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        bins_with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return bins


def level(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Bins of nearly equal load: longest first, each into the least loaded bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return bins


def plan_tokens(lengths: Sequence[int], budget: int, num_ranks: int) -> list[list[list[int]]]:
    """Micro-batches of at most budget tokens, equally many on each rank: [rank][micro-batch][i].

    The count is best-fit-decreasing's, rounded up to a multiple of the ranks. Where levelling
    the loads keeps the budget, the levelled bins are taken, else the tight ones. A rank may get
    empty micro-batches: it still takes part in every collective.
    """
    if lengths and max(lengths) > budget:
        raise ConfigError(
            f"--max-tokens-per-gpu = {budget}; the longest sequence has {max(lengths)} "
            f"tokens and is never split: raise it to {max(lengths)} or more and run the same "
            "command again: nothing that is committed is lost"
        )
    tight = best_fit(lengths, budget)
    num_bins = -(-len(tight) // num_ranks) * num_ranks
    bins = level(lengths, num_bins)
    if any(sum(lengths[i] for i in members) > budget for members in bins):
        bins = tight + [[] for _ in range(num_bins - len(tight))]
    return _deal(bins, lengths, num_ranks)


def plan_families(
    lengths: Sequence[int],
    families: Sequence[Sequence[int]],
    shared: Sequence[int],
    budget: int,
    num_ranks: int,
) -> list[list[list[int]]]:
    """plan_tokens for families of sequences whose first tokens are computed once a micro-batch.

    shared: how many, by family. Families are tried whole, then cut into units of ever fewer
    sequences: the plan is that whose fullest rank computes the fewest tokens, or the first within
    2 % of an even share of the fewest possible.
    """
    family_of = {i: number for number, family in enumerate(families) for i in family}
    size = max(map(len, families), default=1)
    if size == 1:
        return plan_tokens(lengths, budget, num_ranks)
    fewest = _computed(range(len(lengths)), lengths, family_of, shared)
    plans = []
    while size >= 1:
        units = [family[i : i + size] for family in families for i in range(0, len(family), size)]
        loads = [sum(lengths[i] for i in unit) for unit in units]
        if size == 1 or max(loads) <= budget:
            plan = [
                [[i for unit in members for i in units[unit]] for members in rank]
                for rank in plan_tokens(loads, budget, num_ranks)
            ]
            fullest = max(
                sum(_computed(members, lengths, family_of, shared) for members in rank)
                for rank in plan
            )
            plans.append((fullest, plan))
            if fullest * num_ranks <= 1.02 * fewest:
                break
        size = -(-size // 2) if size > 1 else 0
    return min(plans, key=lambda found: found[0])[1]


def _computed(
    members: Sequence[int],
    lengths: Sequence[int],
    family_of: Mapping[int, int],
    shared: Sequence[int],
) -> int:
    """Tokens that a micro-batch computes: of each family its shared ones once."""
    count = Counter(family_of[i] for i in members)
    again = sum((times - 1) * shared[family] for family, times in count.items())
    return sum(lengths[i] for i in members) - again


def plan_count(
    lengths: Sequence[int], order: Sequence[int], size: int, num_ranks: int
) -> list[list[list[int]]]:
    """Micro-batches of at most `size` sequences in the order given: [rank][micro-batch][i]."""
    bins = [list(order[i : i + size]) for i in range(0, len(order), size)]
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return _deal(bins, lengths, num_ranks)


def _deal(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal bins to ranks heaviest first, there and back, so that rank totals stay level."""
    heaviest_first = sorted(bins, key=lambda members: -sum(lengths[i] for i in members))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for place, members in enumerate(heaviest_first):
        lap, position = divmod(place, num_ranks)
        ranks[position if lap % 2 == 0 else num_ranks - 1 - position].append(members)
    return ranks
