from __future__ import annotations

import pandas as pd
import pytest

from worklog.traces.activity import GEOMETRY, kernel_table, short_name
from worklog.traces.intervals import union_ns, whole


def test_union_counts_overlap_once_and_keeps_every_nanosecond() -> None:
    big = 1_790_857_026_000_000_001  # ns since 1970: a float64 would lose the last digits
    start = [big + 50, big, big + 10, big + 200]
    end = [big + 60, big + 100, big + 20, big + 201]
    assert union_ns(start, end) == 101
    assert union_ns(start, end, whole(big + 90, big + 200)) == 10
    assert union_ns([], []) == 0
    assert union_ns([0, 10], [10, 20]) == 20


FILL = "at::native::FillFunctor<float>"
MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >"
COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}"
)
GEMM = "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8"


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("_dequantize_gemv", "_dequantize_gemv"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        (
            f"void at::native::vectorized_elementwise_kernel<4, {FILL}, std::array<char*, 1ul> >(int, {FILL}, x)",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        (
            f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<{MUL} >(x&, {MUL} const&)>(x)",
            "elementwise_kernel<MulFunctor>",
        ),
        (
            f"void at::native::unrolled_elementwise_kernel<{COPY}, std::array<char*, 2ul>, 4>(int, {COPY})",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 2>(unsigned int*)",
            "CatArrayBatchedCopy",
        ),
        ("std::enable_if<true, void>::type internal::gemvx::kernel<int, bf16, 7>(cublasGemvParamsEx<int>)", "kernel"),
        (f"void cutlass::Kernel2<{GEMM}>(T1::Params)", f"Kernel2<{GEMM}>"),
    ],
)
def test_short_names_tell_copies_of_a_generic_kernel_apart(demangled: str, short: str) -> None:
    assert short_name(demangled) == short


def test_kernels_by_cost_with_the_most_common_geometry() -> None:
    rows = [
        ("a", 0, 10, 1, 1, 1, 32, 1, 1),
        ("a", 20, 50, 2, 1, 1, 64, 1, 1),
        ("a", 60, 80, 2, 1, 1, 64, 1, 1),
        ("b", 100, 200, 7, 8, 9, 128, 2, 1),
    ]
    first, second = kernel_table(pd.DataFrame(rows, columns=["name", "start_ns", "end_ns", *GEOMETRY]))
    assert (first["name"], first["count"], first["total_ns"], first["grid"]) == ("b", 1, 100, [7, 8, 9])
    assert second == {
        "name": "a",
        "full_name": "a",
        "count": 3,
        "total_ns": 60,
        "median_ns": 20,
        "share": 60 / 160,
        "grid": [2, 1, 1],
        "block": [64, 1, 1],
    }
