from __future__ import annotations

import time

import torch

from worklog.measure.timing import prepare, sample, time_case
from worklog.problem import Case


class Sleeper:
    """Takes `seconds`; counts its calls; the call number `slow` takes ten times as long."""

    def __init__(self, seconds: float, slow: int = -1) -> None:
        self.seconds, self.slow, self.calls = seconds, slow, 0

    def __call__(self) -> torch.Tensor:
        time.sleep(self.seconds * (10 if self.calls == self.slow else 1))
        self.calls += 1
        return torch.zeros(())


def test_samples_are_the_runs_after_the_warmup():
    run = Sleeper(0.002)
    timing = time_case(Case(name="c", run=run, samples=7, warmup=3), "cpu")
    assert run.calls == 10
    assert (len(timing.samples_us), timing.warmup, timing.method) == (7, 3, "perf_counter")
    assert all(2000 <= us < 50_000 for us in timing.samples_us)


def test_slow_sample_is_kept():
    timing = time_case(Case(name="c", run=Sleeper(0.002, slow=4), samples=5, warmup=2), "cpu")
    assert timing.samples_us[2] >= 20_000
    assert timing.median_us < 20_000


def test_slow_warmup_is_no_sample():
    timing = time_case(Case(name="c", run=Sleeper(0.004, slow=0), samples=3, warmup=1), "cpu")
    assert max(timing.samples_us) < 40_000


def test_time_of_one_call_is_the_run_divided_by_its_calls():
    timing = time_case(Case(name="c", run=Sleeper(0.02), samples=3, warmup=0, calls=10), "cpu")
    assert timing.calls == 10
    assert all(2000 <= us < 15_000 for us in timing.samples_us)


def test_repeated_runs_are_one_sample_and_divide_it_too():
    run = Sleeper(0.005)
    timing = time_case(Case(name="c", run=run, samples=3, warmup=1, calls=2, repeat=4), "cpu")
    assert run.calls == 1 + 3 * 4
    assert (timing.calls, len(timing.samples_us)) == (8, 3)
    assert all(2500 <= us < 15_000 for us in timing.samples_us)


def test_cpu_has_neither_graph_nor_l2_flush():
    case = Case(name="c", run=Sleeper(0.001), graph=True, flush_l2=True, samples=1)
    assert prepare(case, "cpu") is case.run
    timing = sample(case.run, case, "cpu")
    assert (timing.method, timing.flush_l2, timing.profiled) == ("perf_counter", False, False)
