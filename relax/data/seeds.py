"""Seeds derived by sha256 from the numbers that name a draw: no state, no rank."""

import hashlib


def digest(purpose: str, *numbers: int) -> bytes:
    """Give 32 bytes = sha256("relax/<purpose>/<n1>/<n2>/..."); purposes keep the streams apart."""
    return hashlib.sha256("/".join(("relax", purpose, *map(str, numbers))).encode()).digest()


def response_seed(seed: int, step: int, prompt_id: int, sample_index: int) -> int:
    """Give the seed of one response, in [0, 2**63).

    A pure function: the same response is sampled on whichever node, in whichever batch it falls.
    Two responses of one step to the same prompt need different sample_index, also when a small
    source gives the prompt twice in a step.
    """
    first = digest("response", seed, step, prompt_id, sample_index)[:8]
    return int.from_bytes(first, "big") >> 1
