"""Batches are given back when they are whole, whatever the order in which responses come."""

import pytest

from relax.engines import NotFiniteError, Request, Response
from relax.engines.batches import whole_batches

EMPTY = Response([], [], "length")


def batches_of(*sizes):
    return [[Request((1,), seed=i) for i in range(size)] for size in sizes]


def response(number, logp=0.0):
    return Response([number], [logp], "stop")


def test_a_batch_comes_with_its_last_answer():
    seen = []

    def answers():
        for number in (4, 0, 5, 2, 1):
            seen.append(number)
            yield number, response(number)

    found = whole_batches(batches_of(3, 0, 1, 2), [9, 9, 9, 0, 9, 9], answers(), "p")
    assert next(found) == (1, [])
    assert next(found) == (2, [EMPTY])  # no room for a response: nothing is waited for
    assert seen == []
    assert next(found) == (3, [response(4), response(5)])
    assert seen == [4, 0, 5]
    assert list(found) == [(0, [response(0), response(1), response(2)])]


def test_bad_numbers_are_those_of_their_batch():
    answers = [(0, response(0)), (1, response(1)), (3, response(3, float("nan"))), (2, response(2))]
    found = whole_batches(batches_of(2, 2), [9] * 4, answers, "here/policy")
    assert next(found) == (0, [response(0), response(1)])
    with pytest.raises(NotFiniteError, match=r"here/policy: .* not finite for request 1; ") as told:
        next(found)
    assert (told.value.batch, told.value.requests) == (1, (1,))
