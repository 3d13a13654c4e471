"""Whatever a trace holds, the rules say something in order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Program

from worklog.rules.coarse import RULES

KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>",
    "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda, LoadWithCast<1>>",
    "nvjet_sm90_tst_64x8_TNT",
    "void cudnn::ops::nchwToNhwcKernel<float>",
    "ncclDevKernel_AllReduce_Sum_f32",
    "triton_poi_fused_add_1",
    "\x1b[2J'; rm -rf /",
)
WAYS = ("DtoH (Device -> Pageable)", "HtoD (Pageable -> Device)", "HtoD (Pinned -> Device)")
CALLS = ("cudaLaunchKernel", "launchSomethingNew", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaDeviceSynchronize")
short = st.integers(0, 40_000)
STEPS = st.one_of(
    st.tuples(st.just("kernel"), st.sampled_from(KERNELS), short, st.sampled_from((7, 9))),
    st.tuples(st.just("copy"), st.sampled_from(WAYS), short, st.booleans()),
    st.tuples(st.just("synchronize")),
    st.tuples(st.just("host"), short),
    st.tuples(st.just("_call"), st.sampled_from(("cudaGraphLaunch", "cudaEventSynchronize", "cudaMemcpyAsync")), short),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    body = draw(st.lists(STEPS, max_size=12))
    for number in range(draw(st.integers(1, 6))):
        with program.frame(draw(st.sampled_from((f"ProfilerStep#{number}", "step", "aten::contiguous")))):
            for what, *arguments in body:
                getattr(program, what)(*arguments)
    for event in draw(st.lists(st.sampled_from(program.events), max_size=4)):
        event["ts"] += draw(st.integers(-100, 100))  # clocks that disagree
    if draw(st.integers(0, 3)) == 0:
        for event in program.events:
            if event["cat"] == "cuda_runtime":
                event["name"] = draw(st.sampled_from(CALLS))
    if draw(st.booleans()):
        program.events = [event for event in program.events if draw(st.booleans())] or program.events[:1]
    return program


@settings(max_examples=100, deadline=None)
@given(programs())
def test_shares_and_bounds_are_fractions_and_every_rule_is_heard_once(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = program.diagnosis(Path(folder))
    for one in found["findings"]:
        assert 0.05 <= one["share"] <= 1
        assert 0.05 <= one["gain_upper_bound"] <= 1 + 1e-9
        assert one["rule"] == "sync_every_step" or one["share"] <= one["gain_upper_bound"] + 1e-9
        assert all(value is None or not isinstance(value, int) or value >= 0 for value in one["evidence"].values())
        assert "rm -rf" not in one["next"]
    own = [one["rule"] for one in (*found["findings"], *found["abstained"]) if one["rule"] in RULES]
    assert len(own) == len(set(own))
    assert [one["share"] for one in found["findings"]] == sorted(
        (one["share"] for one in found["findings"]), reverse=True
    )
