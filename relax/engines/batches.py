"""Several batches at the same time: responses come in any order, batches when they are whole."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from relax.engines.protocol import Request, Response
from relax.engines.stopping import check_finite


def whole_batches(
    batches: Sequence[Sequence[Request]],
    limits: Sequence[int],
    answers: Iterable[tuple[int, Response]],
    policy: Path,
) -> Iterator[tuple[int, list[Response]]]:
    """(place, responses in the order of the requests) of each batch when its last answer is there.

    limits: most response tokens of each request of all batches; `answers` has (number of the
    request among all, response) of those that have room for one, the others stay empty.
    Raises NotFiniteError, naming `policy`.
    """
    ends = list(accumulate(len(batch) for batch in batches))
    parts = [slice(end - len(batch), end) for end, batch in zip(ends, batches, strict=True)]
    responses = [Response([], [], "length") for _ in limits]
    missing = [sum(limit > 0 for limit in limits[part]) for part in parts]
    yield from ((place, responses[part]) for place, part in enumerate(parts) if not missing[place])
    for number, response in answers:
        place = bisect_right(ends, number)
        responses[number] = response
        missing[place] -= 1
        if not missing[place]:
            check_finite(responses[parts[place]], policy, place)
            yield place, responses[parts[place]]
