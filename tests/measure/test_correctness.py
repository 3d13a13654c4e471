from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.measure import correctness
from worklog.measure.correctness import relative_error, verdict


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]), chunk=st.integers(1, 40))
def test_is_the_relative_frobenius_norm_whatever_the_chunk(seed, scale, chunk):
    generator = np.random.default_rng(seed)
    truth = generator.standard_normal((5, 7)) * scale
    ours = truth * (1 + 1e-3 * generator.standard_normal((5, 7)))
    before, correctness.CHUNK = correctness.CHUNK, chunk
    try:
        error = relative_error(torch.tensor(ours), torch.tensor(truth))
    finally:
        correctness.CHUNK = before
    assert math.isclose(error, np.linalg.norm(ours - truth) / np.linalg.norm(truth), rel_tol=1e-9)


def test_is_computed_in_float64_from_what_the_result_holds():
    truth = torch.full((1000,), 1.0, dtype=torch.float64)
    assert relative_error(torch.full((1000,), 1.0078125, dtype=torch.bfloat16), truth) == 0.0078125


def test_sees_a_transposed_result():
    truth = torch.arange(9.0).reshape(3, 3)
    assert relative_error(truth.t(), truth) > 0.1
    assert relative_error(truth.t().contiguous().t(), truth) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_error_none(bad):
    truth, ours = torch.ones(1000), torch.ones(1000)
    ours[777] = bad
    assert relative_error(ours, truth) is None


def test_zero_reference():
    zero = torch.zeros(4)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(zero + 1e-9, zero) is None


def test_reference_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="the reference is not finite"):
        relative_error(torch.ones(2), torch.tensor([1.0, math.nan]))


def test_other_shape_is_refused_even_where_it_would_broadcast():
    with pytest.raises(ValueError, match=r"shape \(1, 3\), the reference \(2, 3\)"):
        relative_error(torch.ones(1, 3), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("error", "said"),
    [(None, "the result is not finite"), (1.1e-3, "above the limit 1e-03"), (1e-3, None), (0.0, None)],
)
def test_verdict(error, said):
    found = verdict(error, 1e-3)
    assert found == said if said is None else said in found
