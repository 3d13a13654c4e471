"""A program's findings do not depend on who recorded it, as far as both tools tell the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Program

from worklog.diagnose import diagnose

CAST = "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda, at::native::memory::LoadWithCast<1>>"
MUL = "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>"
GEMM = "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"
LAYOUT = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>"
SAME = ("rule", "title", "share", "gain_upper_bound", "evidence")
short = st.integers(0, 60_000)
STEPS = st.one_of(
    st.tuples(st.just("kernel"), st.sampled_from((CAST, MUL, GEMM, LAYOUT)), short, st.sampled_from((7, 9))),
    st.tuples(st.just("copy"), st.sampled_from(("DtoH (Device -> Pageable)",)), short, st.just(True)),
    st.tuples(
        st.just("copy"), st.sampled_from(("HtoD (Pageable -> Device)", "HtoD (Pinned -> Device)")), short, st.booleans()
    ),
    st.tuples(st.just("synchronize")),
    st.tuples(st.just("host"), short),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=10), st.integers(1, 6))
def test_nsys_and_torch_profiler_say_the_same(body: list[tuple[str, object]], steps: int) -> None:
    program = Program()
    for _ in range(steps):
        with program.frame("step"):
            for what, *arguments in body:
                getattr(program, what)(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        theirs = program.diagnosis(Path(folder))
        ours = diagnose(program.export(Path(folder) / "export.sqlite"))
    assert ours["devices"] == theirs["devices"]
    assert [{key: one[key] for key in SAME} for one in ours["findings"]] == [
        {key: one[key] for key in SAME} for one in theirs["findings"]
    ]
    assert {one["rule"] for one in ours["abstained"]} == {one["rule"] for one in theirs["abstained"]}
