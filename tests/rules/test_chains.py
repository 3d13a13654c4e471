"""dequantise_then_matmul, unfused_elementwise and layout_conversions: recorded captures and simulated programs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Program, finding, gain, reasons

from worklog.diagnose import diagnose

REPORTS = Path(__file__).resolve().parents[2] / "reports"
CAST = "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda, at::native::memory::LoadWithCast<1>>"
MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, MulFunctor<float>>>"
NARROW = "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>"
GEMM = "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>"
BNB = "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>"
Kernels = Sequence[tuple[str, int]]


def layers(kernels: Kernels, count: int = 8, host: int = 0) -> Program:
    """A run of these (name, ns) for each layer, with a norm between that is no part of any chain."""
    program = Program()
    for _ in range(count):
        program.kernel(NORM, 30_000)
        for name, ns in kernels:
            program.host(host)
            program.kernel(name, ns)
    return program


def recorded(slug: str) -> Path:
    found = sorted(REPORTS.glob(f"float8_weight_only/*-h200-*/nsys.{slug}.sqlite"))
    if not found:
        pytest.skip(f"no capture of {slug} is recorded")
    return found[-1]


def test_torchao_0_13_0_dequantises_before_every_linear_layer() -> None:
    """Three decoding steps of 4 layers with 5 linear ones (wqkv, wo, w1, w3, w2) and the output layer: 63 products, and
    four kernels before each: cast, expanded scale, product, cast back. The other 24 products are those of attention."""
    found = diagnose(recorded("torchao_0_13_0_eager"))
    (dequantise,) = found["findings"]
    assert dequantise["rule"] == "dequantise_then_matmul"
    evidence = dequantise["evidence"]
    assert (evidence["products_after_a_conversion"], evidence["products"]) == (63, 87)
    assert evidence["converting_kernels"] == 63 * 4
    assert evidence["converting_ns"] > 15 * evidence["their_products_ns"]
    assert 0.85 < dequantise["share"] <= dequantise["gain_upper_bound"] < 0.95


def test_bf16_eager_has_neither_conversions_nor_costly_chains() -> None:
    found = diagnose(recorded("bf16_eager"))
    assert [one["rule"] for one in found["findings"]] == ["host_bound", "launch_bound"]
    assert found["abstained"] == []


def test_conversions_longer_than_their_product_are_found_with_a_true_bound(tmp_path: Path) -> None:
    slow = layers([(CAST, 80_000), (MUL, 70_000), (NARROW, 30_000), (GEMM, 20_000)]).diagnosis(tmp_path)
    found = finding(slow, "dequantise_then_matmul")
    assert found is not None
    assert found["evidence"]["converting_ns"] == 8 * 180_000
    assert found["evidence"]["products_after_a_conversion"] == found["evidence"]["products"] == 8
    assert found["evidence"]["their_products_ns"] == 8 * 20_000
    assert found["where"] == [CAST, MUL, NARROW]
    assert "regex:^(unrolled_elementwise_kernel|vectorized_elementwise_kernel)$" in found["next"]
    assert finding(slow, "unfused_elementwise") is None  # what one rule counts the other does not
    fast = layers([(GEMM, 20_000)]).diagnosis(tmp_path)
    assert finding(fast, "dequantise_then_matmul") is None
    assert found["share"] < gain(slow, fast) <= found["gain_upper_bound"]


@pytest.mark.parametrize(
    "kernels",
    [
        [(CAST, 15_000), (MUL, 70_000), (NARROW, 30_000), (GEMM, 20_000)],  # the conversion is an activation's
        [(MUL, 80_000), (NARROW, 80_000), (GEMM, 20_000)],  # mixed precision: to bfloat16
        [(CAST, 80_000), (MUL, 70_000), (NORM, 5_000), (GEMM, 20_000)],  # something else between
        [(GEMM, 20_000), (CAST, 80_000), (MUL, 70_000)],  # after the product
    ],
)
def test_other_conversions_are_not(tmp_path: Path, kernels: Kernels) -> None:
    assert finding(layers(kernels).diagnosis(tmp_path), "dequantise_then_matmul") is None


def test_what_precedes_the_first_long_conversion_is_not_counted(tmp_path: Path) -> None:
    found = finding(
        layers([(MUL, 5_000), (CAST, 80_000), (GEMM, 20_000)]).diagnosis(tmp_path), "dequantise_then_matmul"
    )
    assert found is not None
    assert found["evidence"]["converting_ns"] == 8 * 80_000


def test_a_name_or_an_operator_that_says_so_needs_no_duration(tmp_path: Path) -> None:
    named = finding(layers([(BNB, 15_000), (GEMM, 40_000)]).diagnosis(tmp_path), "dequantise_then_matmul")
    assert named is not None
    assert named["evidence"]["converting_kernels"] == 8
    program = Program()
    for _ in range(8):
        with program.frame("torchao::dequantize_affine_float8", "cpu_op"):
            program.kernel(CAST, 15_000)
        program.kernel(GEMM, 40_000)
    inside = finding(program.diagnosis(tmp_path), "dequantise_then_matmul")
    assert inside is not None
    assert inside["where"] == ["torchao::dequantize_affine_float8", CAST]
    program = Program()
    for _ in range(8):
        with program.frame("quant/dequant_linear.py(9): forward", "python_function"):
            program.kernel(CAST, 15_000)
            program.kernel(GEMM, 40_000)
    assert finding(program.diagnosis(tmp_path), "dequantise_then_matmul") is None


def test_two_conversions_are_no_habit_and_another_stream_is_no_neighbour(tmp_path: Path) -> None:
    two = layers([(CAST, 80_000), (GEMM, 20_000)], count=2)
    assert finding(two.diagnosis(tmp_path), "dequantise_then_matmul") is None
    apart = Program()
    for _ in range(8):
        apart.kernel(CAST, 80_000, stream=9)
        apart.kernel(GEMM, 20_000)
    assert finding(apart.diagnosis(tmp_path), "dequantise_then_matmul") is None


def test_a_memset_before_the_product_is_the_products_own(tmp_path: Path) -> None:
    program = Program()
    for _ in range(8):
        program.kernel(CAST, 80_000)
        program._call("cudaMemsetAsync", 3_000)
        program._work("gpu_memset", "Memset (Device)", 1_000, 7, program.now)
        program.kernel(GEMM, 20_000)
    found = finding(program.diagnosis(tmp_path), "dequantise_then_matmul")
    assert found is not None
    assert found["evidence"]["products_after_a_conversion"] == 8


def test_chains_are_found_with_a_true_bound(tmp_path: Path) -> None:
    chain = [(MUL, 10_000), (MUL, 20_000), (MUL, 10_000)]
    slow = layers(chain).diagnosis(tmp_path)
    found = finding(slow, "unfused_elementwise")
    assert found is not None
    assert found["evidence"]["chains"] == 8
    assert found["evidence"]["median_length"] == 3
    assert found["evidence"]["chains_ns"] == 8 * 40_000
    assert found["evidence"]["all_but_the_longest_ns"] == 8 * 20_000
    assert found["share"] == pytest.approx(160_000 / slow["devices"][0]["span_ns"])
    fused = layers([(MUL, 20_000)]).diagnosis(tmp_path)
    assert finding(fused, "unfused_elementwise") is None
    assert found["share"] < gain(slow, fused) <= found["gain_upper_bound"]
    less = layers([(MUL, 8_000)]).diagnosis(tmp_path)  # and the intermediate results stay in registers
    assert gain(slow, less) <= found["gain_upper_bound"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((MUL, CAST, NORM, GEMM)), st.integers(1, 99), st.sampled_from((7, 9)))))
def test_chains_and_conversions_are_those_counted_kernel_by_kernel(kernels: Sequence[tuple[str, int, int]]) -> None:
    program, streams = Program(), {7: [], 9: []}  # type: ignore[var-annotated]
    for name, us, stream in kernels:
        program.kernel(name, us * 1_000, stream)
        streams[stream].append((name, us * 1_000))
    chains, conversions = [], []
    for rows in streams.values():
        run: list[tuple[str, int]] = []
        for name, ns in [*rows, (NORM, 0)]:
            if name in (MUL, CAST):
                run.append((name, ns))
                continue
            begins = [at for at, (one, spent) in enumerate(run) if name == GEMM and one == CAST and spent > ns]
            rest = run[: begins[0]] if begins else run
            conversions += run[len(rest) :]
            chains += [rest] * (len(rest) > 1)
            run = []
    with tempfile.TemporaryDirectory() as folder:
        found = program.diagnosis(Path(folder)) if kernels else {"findings": []}
    if (chained := finding(found, "unfused_elementwise")) is not None:
        assert chained["evidence"]["chains"] == len(chains)
        assert chained["evidence"]["chains_ns"] == sum(ns for chain in chains for _, ns in chain)
        shorter = [sorted(ns for _, ns in chain)[:-1] for chain in chains]
        assert chained["evidence"]["all_but_the_longest_ns"] == sum(sum(chain) for chain in shorter)
    if (converted := finding(found, "dequantise_then_matmul")) is not None:
        assert converted["evidence"]["converting_kernels"] == len(conversions)


def test_single_kernels_and_inductors_own_are_no_chains(tmp_path: Path) -> None:
    alone = layers([(MUL, 90_000), (NORM, 5_000), (MUL, 90_000)])
    assert finding(alone.diagnosis(tmp_path), "unfused_elementwise") is None
    poi = "triton_poi_fused_add_mul_3"
    assert finding(layers([(poi, 90_000), (poi, 90_000)]).diagnosis(tmp_path), "unfused_elementwise") is None
    mixed = finding(layers([(poi, 90_000), (MUL, 90_000)]).diagnosis(tmp_path), "unfused_elementwise")
    assert mixed is not None
    copied = Program()
    for _ in range(8):
        copied.kernel(MUL, 50_000)
        copied.copy("HtoD (Pinned -> Device)", 5_000, wait=False)
    assert finding(copied.diagnosis(tmp_path), "unfused_elementwise") is None


def test_chains_of_two_streams_that_interleave_are_two(tmp_path: Path) -> None:
    program = Program()
    for _ in range(8):
        program.kernel(MUL, 50_000, stream=7)
        program.kernel(MUL, 50_000, stream=9)
    found = finding(program.diagnosis(tmp_path), "unfused_elementwise")
    assert found is not None
    assert (found["evidence"]["chains"], found["evidence"]["median_length"]) == (2, 8)
    assert found["gain_upper_bound"] <= 1


CONV = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc"
TO, BACK = (f"void cudnn::ops::{way}Kernel<__half, __half, float>" for way in ("nchwToNhwc", "nhwcToNchw"))


def test_layout_conversions_are_found_with_a_true_bound(tmp_path: Path) -> None:
    slow = layers([(TO, 20_000), (CONV, 60_000), (BACK, 10_000)]).diagnosis(tmp_path)
    found = finding(slow, "layout_conversions")
    assert found is not None
    assert (found["evidence"]["converting_ns"], found["evidence"]["converting_kernels"]) == (8 * 30_000, 16)
    assert found["where"] == [TO, BACK]
    fast = layers([(CONV, 60_000)]).diagnosis(tmp_path)
    assert finding(fast, "layout_conversions") is None
    assert gain(slow, fast) <= found["gain_upper_bound"]


def test_a_copy_of_contiguous_converts_and_any_other_copy_may_not(tmp_path: Path) -> None:
    copy = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>"
    for operator, expected in (
        ("aten::contiguous", True),
        ("aten::contiguous, op_id = 5", True),
        ("aten::repeat_interleave", False),
    ):
        program = Program()
        for _ in range(8):
            program.kernel(NORM, 50_000)
            frames = (("net.py(5): forward", "python_function"), (operator, "cpu_op"), ("aten::copy_", "cpu_op"))
            with ExitStack() as inside:
                for name, cat in frames:
                    inside.enter_context(program.frame(name, cat))
                program.kernel(copy, 40_000)
        found = finding(program.diagnosis(tmp_path), "layout_conversions")
        assert (found is not None) is expected
        if found is not None:
            assert found["where"] == [f"net.py:5 forward, {operator}", copy]


@pytest.mark.parametrize("rule", ["dequantise_then_matmul", "unfused_elementwise", "layout_conversions"])
def test_graphs_without_rows_for_their_kernels_hide_them(tmp_path: Path, rule: str) -> None:
    program = layers([(CAST, 80_000), (MUL, 70_000), (GEMM, 20_000), (TO, 50_000)])
    program._call("cudaGraphLaunch", 9_000)
    found = program.diagnosis(tmp_path)
    assert finding(found, rule) is None
    assert "--cuda-graph-trace=node" in reasons(found, rule)[0]


@pytest.mark.parametrize("call", [None, "launchSomethingNew"])
def test_without_known_calls_kernels_still_say_what_they_are(tmp_path: Path, call: str | None) -> None:
    program = layers([(CAST, 80_000), (GEMM, 20_000), (MUL, 50_000), (MUL, 50_000), (TO, 50_000)])
    calls = [event for event in program.events if event["cat"] == "cuda_runtime"]
    for event in calls:
        event["name"] = call
    program.events = [event for event in program.events if event["name"] is not None]
    found = program.diagnosis(tmp_path)
    for rule in ("dequantise_then_matmul", "unfused_elementwise", "layout_conversions"):
        assert finding(found, rule) is not None
