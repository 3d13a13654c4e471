"""No bound is below what the program gains when the fault is taken out of it, whatever else the program does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulated import Program, finding, gain

CAST = "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda, at::native::memory::LoadWithCast<1>>"
MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float>>>"
GEMM = "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>"
LAYOUT = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>"
Draw = Sequence[int]
Step = Callable[[Program, Draw, bool], None]


def dequantise_then_matmul(program: Program, ns: Draw, fault: bool) -> None:
    program.kernel(NORM, ns[0])
    if fault:
        for name, more in ((CAST, 60_000), (MUL, 0)):
            program.host(ns[1])
            program.kernel(name, ns[2] + more)
    program.kernel(GEMM, 30_000)
    program.host(ns[3])


def unfused_elementwise(program: Program, ns: Draw, fault: bool) -> None:
    program.kernel(NORM, ns[0])
    for each in (ns[1], ns[2], ns[3]) if fault else (min(ns[1:4]) // 2,):
        program.host(ns[4])
        program.kernel(MUL, each)
    program.kernel(GEMM, ns[5])


def layout_conversions(program: Program, ns: Draw, fault: bool) -> None:
    program.kernel(NORM, ns[0])
    if fault:
        program.host(ns[1])
        program.kernel(LAYOUT, ns[2])
    program.host(ns[3])
    program.kernel(GEMM, ns[4])


def sync_every_step(program: Program, ns: Draw, fault: bool) -> None:
    for each in ns[:3]:
        program.host(ns[3])
        program.kernel(GEMM, each)
    program.host(ns[4])
    if fault:
        program.copy("DtoH (Device -> Pageable)", 1_500, wait=True)
        program.synchronize()
    program.host(ns[5])


def blocking_copies(program: Program, ns: Draw, fault: bool) -> None:
    program.host(ns[0])
    if fault:
        program.copy("HtoD (Pageable -> Device)", ns[1], wait=True)
    for each in ns[2:5]:
        program.host(ns[5])
        program.kernel(GEMM, each)


def host_bound(program: Program, ns: Draw, fault: bool) -> None:
    for each in ns[:3]:
        program.host(ns[3] + ns[4] if fault else 0)
        program.kernel(GEMM, each)


@pytest.mark.parametrize(
    "step",
    [dequantise_then_matmul, unfused_elementwise, layout_conversions, sync_every_step, blocking_copies, host_bound],
    ids=lambda step: step.__name__,
)
@settings(max_examples=30, deadline=None)
@given(ns=st.lists(st.integers(0, 60_000), min_size=6, max_size=6), steps=st.integers(4, 7))
def test_the_bound_holds(step: Step, ns: Draw, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        slow, fast = (_run(step, ns, steps, fault).diagnosis(Path(folder)) for fault in (True, False))
    found = finding(slow, step.__name__)
    assume(found is not None)
    assert found is not None
    assert gain(slow, fast) <= found["gain_upper_bound"] + 1e-9


def _run(step: Step, ns: Draw, steps: int, fault: bool) -> Program:
    program = Program()
    program.kernel(NORM, 1_000)  # the window begins alike
    for _ in range(steps):
        step(program, ns, fault)
    program.kernel(NORM, 1_000)
    return program


@settings(max_examples=30, deadline=None)
@given(ns=st.lists(st.integers(0, 12_000), min_size=4, max_size=4))
def test_the_bound_of_launches_holds_for_a_graph_of_them(ns: Draw) -> None:
    """The same kernels, launched at once."""
    with tempfile.TemporaryDirectory() as folder:
        slow, fast = Program(), Program()
        fast._call("cudaLaunchKernel", 5_000)
        for _ in range(10):
            for each in ns[:3]:
                slow.host(ns[3])
                slow.kernel(GEMM, each)
                fast._work("kernel", GEMM, each, 7, fast.now)
        before, after = slow.diagnosis(Path(folder)), fast.diagnosis(Path(folder))
    found = finding(before, "launch_bound")
    assume(found is not None)
    assert found is not None
    assert gain(before, after) <= found["gain_upper_bound"] + 1e-9
