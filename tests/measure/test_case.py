"""Order and outcome of one case: a wrong result is never timed, what is timed is what was checked."""

from __future__ import annotations

import pytest
import torch

from worklog.measure.case import explain, measure
from worklog.problem import Case


class Counting:
    """Gives `right` except in the calls from number `wrong_from` on."""

    def __init__(self, wrong_from: int = 10**9) -> None:
        self.calls, self.wrong_from = 0, wrong_from

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return torch.full((3,), 1.0 if self.calls < self.wrong_from else 2.0)


def reference() -> torch.Tensor:
    return torch.ones(3, dtype=torch.float64)


def case(run: Counting, **changes: object) -> Case:
    return Case(**{"name": "c", "run": run, "reference": reference, "limit": 0.1, "samples": 4, "warmup": 2, **changes})


def test_sound_case_is_checked_timed_and_checked_again():
    run = Counting()
    result = measure(case(run), "cpu")
    assert (result.status, result.correctness.value, len(result.timing.samples_us)) == ("ok", 0.0, 4)
    assert run.calls == 2 + 2 + 4 + 1


def test_wrong_result_is_not_timed():
    run = Counting(wrong_from=1)
    result = measure(case(run), "cpu")
    assert (result.status, result.timing, result.correctness.value) == ("wrong_result", None, 1.0)
    assert run.calls == 1


def test_result_that_turns_wrong_while_it_is_timed_loses_its_time():
    result = measure(case(Counting(wrong_from=6)), "cpu")
    assert (result.status, result.timing) == ("wrong_result", None)
    assert result.message == "after it was timed, relative error 1.00e+00 is above the limit 1e-01"


def test_largest_error_is_kept():
    result = measure(case(Counting(wrong_from=2), limit=2.0), "cpu")
    assert (result.status, result.correctness.value) == ("ok", 1.0)


def test_case_without_reference_has_no_correctness():
    result = measure(case(Counting(), reference=None), "cpu")
    assert (result.status, result.correctness) == ("ok", None)


def test_runs_in_inference_mode():
    seen = []

    def run() -> torch.Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return torch.ones(3)

    assert measure(case(run), "cpu").status == "ok"
    assert all(seen)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (MemoryError(), "out_of_memory", "out of memory"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.35 GiB. GPU 0 has a total of 139.72 GiB"),
            "out_of_memory",
            "out of memory when it asked for 7.35 GiB",
        ),
        (RuntimeError("\n  first line\nsecond line"), "error", "RuntimeError: first line"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (AssertionError(), "error", "AssertionError"),
    ],
)
def test_explain(error, status, message):
    assert explain(error) == (status, message)
