"""Which sequences share a micro-batch, and how the ranks share the micro-batches.

A plan is a pure function of lengths and families, so that every rank computes the same one alone.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence

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
    for index in longest_first(lengths):
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


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length, those of equal length in their order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def level(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Bins of nearly equal load: longest first, each into the least loaded bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for index in longest_first(lengths):
        load, number = loads[0]
        bins[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return bins


def plan_tokens(lengths: Sequence[int], budget: int, num_ranks: int) -> list[list[list[int]]]:
    """Micro-batches of at most budget tokens, equally many on each rank: [rank][micro-batch][i].

    Bins of level load are taken where as few as possible keep the budget, or as many as
    best-fit-decreasing needs, else its tight ones; the count is a multiple of the ranks. A rank
    may get empty micro-batches: it still takes part in every collective.
    """
    if lengths and max(lengths) > budget:
        raise ConfigError(
            f"--max-tokens-per-gpu = {budget}; the longest sequence has {max(lengths)} "
            f"tokens and is never split: raise it to {max(lengths)} or more and run the same "
            "command again: nothing that is committed is lost"
        )

    def levelled(num_bins: int) -> list[list[int]] | None:
        bins = level(lengths, num_bins)
        overfull = any(sum([lengths[i] for i in members]) > budget for members in bins)
        return None if overfull else bins

    fewest = _multiple(-(-sum(lengths) // budget), num_ranks)
    bins = levelled(fewest)
    if bins is None:
        tight = best_fit(lengths, budget)
        num_bins = _multiple(len(tight), num_ranks)
        tight += [[] for _ in range(num_bins - len(tight))]
        bins = (num_bins > fewest and levelled(num_bins)) or tight
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
    size = max(map(len, families), default=1)
    if size == 1:
        return plan_tokens(lengths, budget, num_ranks)
    family_of, own = [0] * len(lengths), list(lengths)
    for number, family in enumerate(families):
        for i in family:
            family_of[i] = number
            own[i] -= shared[number]

    def computed(members: Sequence[int]) -> int:
        """Tokens that a micro-batch computes: of each family its shared ones once."""
        together = {family_of[i] for i in members}
        return sum([own[i] for i in members]) + sum([shared[number] for number in together])

    fewest = computed(range(len(lengths)))
    plans = []
    while size >= 1:
        units = [family[i : i + size] for family in families for i in range(0, len(family), size)]
        loads = [sum([lengths[i] for i in unit]) for unit in units]
        if size == 1 or max(loads) <= budget:
            plan = [
                [[i for unit in members for i in units[unit]] for members in rank]
                for rank in plan_tokens(loads, budget, num_ranks)
            ]
            fullest = max(sum(map(computed, rank)) for rank in plan)
            plans.append((fullest, plan))
            if fullest * num_ranks <= 1.02 * fewest:
                break
        size = -(-size // 2) if size > 1 else 0
    return min(plans, key=lambda found: found[0])[1]


def plan_count(
    lengths: Sequence[int], order: Sequence[int], size: int, num_ranks: int
) -> list[list[list[int]]]:
    """Micro-batches of at most `size` sequences in the order given: [rank][micro-batch][i]."""
    bins = [list(order[i : i + size]) for i in range(0, len(order), size)]
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    return _deal(bins, lengths, num_ranks)


def _multiple(count: int, num_ranks: int) -> int:
    """The next multiple of num_ranks."""
    return -(-count // num_ranks) * num_ranks


def _deal(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal bins to ranks heaviest first, there and back, so that rank totals stay level."""
    heaviest_first = sorted(bins, key=lambda members: -sum(lengths[i] for i in members))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for place, members in enumerate(heaviest_first):
        lap, position = divmod(place, num_ranks)
        ranks[position if lap % 2 == 0 else num_ranks - 1 - position].append(members)
    return ranks
