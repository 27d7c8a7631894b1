"""Loss, metrics, gradients and weights do not depend on how an optimizer step is cut.

Every row of the table, on responses that are ragged (empty, of one token, with holes, wholly
masked, NaN under the mask), in 1, 2, 3 and 7 micro-batches, on 1 and 2 ranks (in one micro-batch
the second rank holds no token) and with the samples in another order.

The proof to 1e-10: model, gradients and optimizer in float64 (TrainerOptions.dtype), and objectives
too. They run in float32 by contract, and there the last bit of an exp depends on the token's place
in a vector register: the proof sets relax.algorithms.masking.DTYPE, the one constant that says so.
"""

import math

import pytest
import torch
from split_job import CASES, ROWS, all_cases, in_ranks, save_logp

from relax.algorithms import ALGORITHMS

pytestmark = pytest.mark.integration

TOLERANCE = {"float32": (1e-5, 1e-6), "float64": (1e-10, 1e-12)}  # relative; of what is 0


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """dtype -> ranks -> case -> layout -> metrics and tensors."""
    directory = tmp_path_factory.mktemp("split")
    save_logp(models)
    in_ranks(2, models, directory, tuple(TOLERANCE))
    return {
        dtype: {
            "one": all_cases(models, dtype),
            **{
                f"rank {rank}": torch.load(directory / f"{dtype}.{rank}.pt", weights_only=False)
                for rank in range(2)
            },
        }
        for dtype in TOLERANCE
    }


def test_every_row_is_among_the_cases():
    assert ROWS.keys() == ALGORITHMS.keys()
    assert {name.split(" ")[0] for name in CASES} == ALGORITHMS.keys()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_the_cut_does_not_matter(results, case, dtype):
    relative, absolute = TOLERANCE[dtype]
    whole = results[dtype]["one"][case]["1 ranks, 1 cuts"]
    assert all(math.isfinite(v) for step in whole["metrics"] for v in step.values())
    others = [
        (where, layout, found)
        for where, cases in results[dtype].items()
        for layout, found in cases[case].items()
    ]
    assert len(others) == 12
    for where, layout, found in others:
        told = f"{case}, {where}, {layout}"
        for ours, theirs in zip(found["metrics"], whole["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=relative, abs=absolute), told
        assert found["tensors"].keys() == whole["tensors"].keys()
        for name, tensor in found["tensors"].items():
            expected = whole["tensors"][name]
            distance = (tensor.double() - expected.double()).norm()
            assert distance <= relative * expected.double().norm(), f"{told}: {name}"


@pytest.mark.parametrize("case", CASES)
def test_there_is_something_to_differ(results, case):
    """The proof would be empty on steps that do nothing."""
    whole = results["float64"]["one"][case]["1 ranks, 1 cuts"]
    first, last = whole["metrics"][0], whole["metrics"][-1]
    assert len(whole["metrics"]) == 2 if "two" in case or "at once" in case else True
    assert first["train/grad_norm"] > 1e-3
    assert first["train/skipped_steps"] == last["train/skipped_steps"] == 0
    for name, gradient in whole["tensors"].items():
        if name.endswith("gradient"):
            assert gradient.norm() > 0, name
