"""Measurements on a real GPU: exact bytes, and times with wide margins."""

from __future__ import annotations

import pytest

from worklog.measure import ceilings, energy, memory
from worklog.measure.case import measure
from worklog.measure.timing import prepare, sample, time_case
from worklog.problem import Case

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _inference_mode():
    with torch.inference_mode():
        yield


def buffer(mib: int):
    return torch.ones(mib * MIB // 4, device="cuda")


def test_ceilings_are_those_of_a_gpu():
    found = ceilings.measure("cuda")
    assert 1e11 < found.copy_bytes_per_s < 2e13
    assert 1e13 < found.matmul_flop_per_s < 1e16


def test_peak_is_temporaries_alive_together():
    x = buffer(64)
    x + x
    found = memory.measure(lambda: (x + x) + (x * x), "cuda")
    assert found.allocated_bytes - found.baseline_bytes == 3 * 64 * MIB
    assert found.largest_temporary_bytes == 64 * MIB
    assert found.reserved_bytes >= found.allocated_bytes
    assert found.device_bytes >= found.reserved_bytes


def test_graph_of_n_calls_takes_n_times_one_call():
    x = buffer(256)
    y = torch.empty_like(x)

    def case(calls: int) -> Case:
        def run():
            for _ in range(calls):
                y.copy_(x)
            return y

        return Case(name="copy", run=run, calls=calls, graph=True)

    one, eight = time_case(case(1), "cuda"), time_case(case(8), "cuda")
    assert (one.method, eight.method) == ("cuda_graph", "cuda_graph")
    assert 0.7 < eight.median_us / one.median_us < 1.1
    assert 256 * MIB * 2 / (one.median_us * 1e-6) < 2e13


def test_events_see_the_gpu_s_time_not_only_the_launch():
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    taken = time_case(Case(name="matmul", run=lambda: x @ x), "cuda")
    assert taken.method == "cuda_events"
    assert taken.median_us > 2 * 8192**3 / 1e16 * 1e6


def test_flushed_l2_is_slower_than_a_warm_one():
    x = buffer(16)
    out = torch.empty((), device="cuda")

    def median(flush: bool) -> float:
        return time_case(
            Case(name="sum", run=lambda: torch.sum(x, dim=0, out=out), graph=True, flush_l2=flush), "cuda"
        ).median_us

    assert median(True) > 1.15 * median(False)


def test_short_graph_is_not_charged_for_its_launch():
    x = torch.ones(1, device="cuda")
    taken = time_case(Case(name="tiny", run=lambda: x.add_(1), graph=True), "cuda")
    assert taken.median_us < 8


def test_replay_computes_what_the_case_computes():
    x = buffer(1)
    case = Case(name="c", run=lambda: x + x, graph=True)
    replay = prepare(case, "cuda")
    x.fill_(21.0)
    assert float(replay()[7]) == 42.0


def test_energy_of_a_busy_second_is_that_of_a_gpu():
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    case = Case(name="matmul", run=lambda: x @ x)
    taken = sample(case.run, case, "cuda")
    found = energy.measure(case.run, taken.median_us, 1)
    if found is None:
        pytest.skip("this driver has no energy counter")
    watts = found.joules_per_call / (taken.median_us * 1e-6)
    assert found.seconds > 0.5
    assert 50 < watts < 3000


def test_out_of_memory_is_this_case_s_alone():
    def too_much():
        return torch.empty(1 << 44, dtype=torch.uint8, device="cuda")

    result = measure(Case(name="c", run=too_much), "cuda")
    assert result.status == "out_of_memory"
    assert "16384" in result.message or "GiB" in result.message
    assert measure(Case(name="d", run=lambda: torch.ones(4, device="cuda")), "cuda").status == "ok"


def test_graph_that_cannot_be_captured_is_an_error_of_its_case():
    x = torch.ones(4, device="cuda")

    def run():
        return x * float(x.sum())

    result = measure(Case(name="c", run=run, graph=True), "cuda")
    assert (result.status, result.timing) == ("error", None)
    assert measure(Case(name="d", run=lambda: x + x, graph=True), "cuda").status == "ok"
