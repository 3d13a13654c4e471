"""The kernels of float8_weight_only without a GPU: compiled for Hopper, and run by Triton's interpreter."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import checkouts
import pytest

from worklog import problem
from worklog.nvcc import HOPPER

pytest.importorskip("torch")

Python = Callable[..., "subprocess.CompletedProcess[str]"]
HERE = Path(__file__).parent
FOLDER = problem.load("float8_weight_only").folder
SOURCES = [FOLDER, checkouts.REPOSITORY / "src"]


def ptxas_words(nvcc: str, out: Path) -> str:
    import hopper

    argv = [nvcc, *HOPPER, "-Xptxas", "-v", "-o", str(out), *map(str, hopper.SOURCES)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_cuda_kernels_do_not_spill_and_are_not_serialised(nvcc: str, tmp_path: Path) -> None:
    words = ptxas_words(nvcc, tmp_path / "all.so")
    entries = re.findall(r"Compiling entry function '(\w+)' for 'sm_90a'", words)
    assert sum("float8_gemm" in entry for entry in entries) == 2  # gated or not
    assert len(re.findall(r"\b0 bytes spill stores, 0 bytes spill loads", words)) == len(entries)
    assert "C7510" not in words  # ptxas's warning that it made the asynchronous wgmma wait for each other
    assert "warning" not in words.lower()


@pytest.mark.usefixtures("nvcc")
def test_cuda_kernels_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hopper

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hopper.load(hopper.compile_sources()).float8_gemm_launch


@pytest.fixture(scope="module")
def hopper_code(python: Python, triton: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Each launch of the Triton kernels: call, kernel, ptx, sass."""
    folder = tmp_path_factory.mktemp("hopper")
    script = HERE / "hopper_code.py"
    path = [triton, *SOURCES]
    done = python(script, folder, path=path, TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return [
        {**launch, "ptx": (folder / f"{i}.ptx").read_text(), "sass": (folder / f"{i}.sass").read_text()}
        for i, launch in enumerate(json.loads(done.stdout))
    ]


def of(launches: list[dict[str, str]], kernel: str) -> list[dict[str, str]]:
    found = [launch for launch in launches if launch["kernel"] == kernel]
    assert found
    return found


def instructions(launch: dict[str, str]) -> list[str]:
    """SASS without predicates, in order: LDG.E.128 R4, desc[...]"""
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P[T\d]+ )?([A-Z][^;]*?)\s*;", launch["sass"])


def test_each_call_takes_its_kernels(hopper_code) -> None:
    taken: dict[str, list[str]] = {}
    for launch in hopper_code:
        taken.setdefault(launch["call"], []).append(launch["kernel"])
    expected = {
        ("_gemv",): ("wqkv", "wo", "w13", "w2", "output", "bf16 weights"),
        ("_to_half", "_skinny", "_add_parts"): ("2 tokens", "32 tokens", "64 tokens"),
        ("_to_half", "_gemm"): ("prefill", "gated prefill", "ragged prefill"),
        ("_attention", "_rope_prompt"): ("attention",),
    }
    assert taken == {call: list(kernels) for kernels, calls in expected.items() for call in calls}


def test_no_triton_kernel_spills_or_outgrows_shared_memory(hopper_code) -> None:
    for launch in hopper_code:
        local = [line for line in instructions(launch) if line.startswith(("LDL", "STL"))]
        assert local == [], (launch["call"], launch["kernel"])
        assert int(launch["shared_bytes"]) <= 232_448


def test_gemv_loads_16_bytes_a_thread_and_all_weights_before_it_waits(hopper_code) -> None:
    for launch in of(hopper_code, "_gemv"):
        lines = instructions(launch)
        (wait,) = (i for i, line in enumerate(lines) if line == "ACQBULK")
        (allow,) = (i for i, line in enumerate(lines) if line == "PREEXIT")
        weights = [i for i, line in enumerate(lines) if line.startswith("LDG") and ".EF" in line]  # evict first
        width = 2 if launch["call"] == "bf16 weights" else 1
        threads, rows, columns = (
            128,
            2 if launch["call"] in ("w13", "w2") else 4,
            14336 if launch["call"] == "w2" else 4096,
        )
        rows *= 2 if launch["call"] == "w13" else 1  # gate and up
        assert len(weights) * 16 * threads == rows * columns * width, launch["call"]
        assert all(lines[i].startswith("LDG.E.EF.128") for i in weights)
        assert allow < min(weights) < max(weights) < wait, launch["call"]


def test_programmatic_launches_wait_before_they_read_what_others_write(hopper_code) -> None:
    """In PTX, which keeps the source's order: x, parts and residual come after griddepcontrol.wait."""
    for kernel in ("_gemv", "_to_half", "_skinny", "_add_parts", "_attention"):
        for launch in of(hopper_code, kernel):
            assert launch["ptx"].count("griddepcontrol.wait") == 1, kernel
            assert launch["ptx"].count("griddepcontrol.launch_dependents") == 1, kernel
            before = launch["ptx"].partition("griddepcontrol.wait")[0]
            assert not re.search(r"\b(st|red|atom)\.global", before), kernel
            reads = len(re.findall(r"\b(?:ld\.global|cp\.async)\S*v?\d* ", before))
            assert kernel in ("_gemv", "_skinny") or reads == 0, kernel  # those two: weights and scales
    for kernel in ("_gemm", "_rope_prompt"):
        assert all("griddepcontrol" not in launch["ptx"] for launch in of(hopper_code, kernel))


def test_gemm_keeps_its_tensor_cores_busy(hopper_code) -> None:
    """One wait for all products, after the loop; within it, three stay in flight."""
    for launch in of(hopper_code, "_gemm"):
        waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", launch["sass"])
        assert waits.count("0x0") == 1, launch["call"]
        assert set(waits) == {"0x0", "0x3"}
        assert sum(line.startswith("HGMMA.64x256x16.F32") for line in instructions(launch)) == 4  # 64 k of a step


OURS = """
import torch
from torch import nn
import float8_linear, repro
weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
weight[5] = 0
values, scale = float8_linear.quantize(weight)
assert values.dtype == torch.float8_e4m3fn and scale.shape == (96,)
kept = torch.arange(96) != 5
ours = values.float() * scale[:, None]
assert torch.equal(ours[kept], repro.dequantized("w", weight)[kept]) and not ours[5].any()
gate, up = torch.arange(32), 100 + torch.arange(32)
both = float8_linear.interleave(gate, up)
assert both[:24].tolist() == [*range(8), *range(100, 108), *range(8, 16)]
model = nn.Sequential(nn.Linear(64, 96), nn.Sequential(nn.Linear(96, 32, bias=False), nn.ReLU())).bfloat16()
bias = model[0].bias
assert float8_linear.swap_linears(model) is model
assert [type(m).__name__ for m in model.modules()][1:] == ["Float8Linear", "Sequential", "Float8Linear", "ReLU"]
assert model[0].bias is bias and model[1][0].bias is None
assert sorted(model.state_dict()) == ["0.bias", "0.scale", "0.weight", "1.0.scale", "1.0.weight"]
x = torch.empty(3, 7, 64, dtype=torch.bfloat16, device="meta")
op = torch.ops.float8_weight_only.linear
assert op(x, values.to("meta"), scale.to("meta")).shape == (3, 7, 96)
assert op(x, values.to("meta"), scale.to("meta"), gated=True).shape == (3, 7, 48)
"""


def test_swap_quantise_and_interleave(python: Python, triton: Path) -> None:
    done = python("-c", OURS, path=[triton, *SOURCES])
    assert done.returncode == 0, done.stderr


def test_kernels_compute_what_they_should(python: Python, triton: Path) -> None:
    script = HERE / "float8_interpreted.py"
    path = [triton, *SOURCES]
    done = python("-m", "pytest", "-p", "no:cacheprovider", script, path=path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
