"""The U-Net's kernels without a GPU: the CUDA C++ kernel's own text, run on the CPU thread by thread and compiled for
Hopper; the Triton kernels, interpreted and compiled."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import checkouts
import numpy as np
import pytest

from worklog.measure.correctness import relative_error
from worklog.nvcc import HOPPER

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
FOLDER = checkouts.REPOSITORY / "problems" / "unet_conv_inference"
sys.path.insert(0, str(FOLDER))

from kernels import layers, persistent, phase, step_library, trace  # noqa: E402
from kernels.launch import ADDRESSES, NUMBERS, SHARED, VALUES, Args  # noqa: E402

from worklog.workloads import unet1d  # noqa: E402

Python = Callable[..., "subprocess.CompletedProcess[str]"]
ODD = unet1d.UnetShape(cond_dim=1028, step_dim=32, widths=(48, 64, 160), action_dim=3)
SOURCES = [FOLDER, checkouts.REPOSITORY / "problems" / "float8_weight_only", checkouts.REPOSITORY / "src", HERE]
FOLDED = ("final_conv.1", "down_modules.0.0.residual_conv")  # computed where they are used, never published


def reference(shape, dtype):
    return unet1d.build(0, dtype, shape=shape).double()


# The CUDA C++ kernel's own text, on the CPU


class OnCpu:
    """unet_step.cu compiled by g++; counts its launches. Each takes another order of blocks, warps and copies."""

    def __init__(self, library: Path) -> None:
        self.library, self.launches = ctypes.CDLL(str(library)), 0

    def __call__(self, args: Args, weights: int, shared_bytes: int) -> int:
        self.launches += 1
        return self.library.unet_step_emulate(ctypes.byref(args), weights, shared_bytes, self.launches)

    def unet(self, model) -> persistent.PersistentUnet:
        return persistent.PersistentUnet(model, self, persistent.not_planned)


def compiled_for_cpu(folder: Path, *flags: str) -> OnCpu:
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    library = folder / "unet_on_cpu.so"
    argv = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", *flags, "-o", library, HERE / "unet_on_cpu.cpp"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return OnCpu(library)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    return compiled_for_cpu(tmp_path_factory.mktemp("cpu"))


def test_sizes_are_the_kernels() -> None:
    text = step_library.SOURCE.read_text()
    for name in ("SLICES", "BLOCKS", "FRAGMENT", "CHUNK", "ELEMENTS"):
        assert int(re.search(rf"\b{name} = (\d+)[,;]", text).group(1)) == getattr(phase, name)
    assert re.search(r"WARPS = 8, THREADS = WARPS \* 32", text)
    assert phase.THREADS == 256


def test_structures_are_the_kernels(on_cpu: OnCpu) -> None:
    assert on_cpu.library.unet_step_sizes(0) == ctypes.sizeof(Args)
    assert on_cpu.library.unet_step_sizes(1) == 4 * phase.PHASE_WORDS
    text = re.sub(r"//.*", "", step_library.SOURCE.read_text())

    def members(name: str) -> list[str]:
        body = re.search(rf"struct (?:alignas\(16\) )?{name} {{(.*?)\n}};", text, re.S).group(1)
        return re.findall(r"(\w+)(?:\[\d+\])?(?=[,;])", body)

    assert members("Phase") == [*phase.PHASE_FIELDS, "unused"]
    assert members("Shared") == list(SHARED)
    assert members("Args") == [*ADDRESSES, *NUMBERS, "shared"]


@pytest.mark.parametrize(
    ("shape", "dtype", "values", "horizon", "batch"),
    [
        (unet1d.TINY, torch.float32, torch.float32, 16, 1),
        (unet1d.TINY, torch.float32, torch.float32, 8, 2),
        (unet1d.TINY, torch.bfloat16, torch.float32, 16, 1),
        (unet1d.TINY, torch.bfloat16, torch.bfloat16, 16, 1),
        (unet1d.TINY, torch.float16, torch.float32, 8, 1),
        (ODD, torch.float16, torch.float16, 16, 1),
        pytest.param(unet1d.PUSH_T, torch.float32, torch.float32, 16, 1, marks=pytest.mark.slow),
        pytest.param(unet1d.PUSH_T, torch.bfloat16, torch.float32, 16, 1, marks=pytest.mark.slow),
    ],
)
def test_kernel_computes_the_network_layer_by_layer(on_cpu, shape, dtype, values, horizon, batch) -> None:
    model, exact = unet1d.build(0, dtype, shape=shape), reference(shape, dtype)
    unet = on_cpu.unet(model)
    limit = {torch.float32: 3e-6, torch.bfloat16: 2e-5, torch.float16: 3e-6}[dtype]
    for seed in (0, 1):  # the second launch uses the other half of the workspace, which the first one cleared
        sample, timestep, cond = unet1d.inputs(shape, batch, horizon, seed=seed, dtype=values)
        found = unet(sample, timestep, cond)
        expected = exact(sample.double(), timestep, cond.double())
        rounding = 0 if values == torch.float32 else torch.finfo(values).eps
        assert relative_error(found, expected) < limit + rounding
        each = layers.outputs(exact, sample[-1:].double(), timestep, cond[-1:].double())
        errors = layers.errors(
            unet.launcher(horizon).layers(), {name: y for name, y in each.items() if name not in FOLDED}
        )
        assert sum("block.0" in name for name in errors) == 25  # all of them
        assert max(errors.values(), key=lambda e: np.inf if e is None else e) < limit, errors
    workspace = unet.launcher(horizon).tensors["workspace"].view(torch.int32)
    assert (workspace[0] == -1).all() if batch == 1 else True  # cleared by the second launch
    assert on_cpu.launches


@pytest.mark.parametrize("timestep", [7, 7.5, torch.tensor([7]), torch.tensor(7.5, dtype=torch.float64)])
def test_kernel_takes_any_timestep(on_cpu, timestep) -> None:
    shape = unet1d.TINY
    unet, exact = on_cpu.unet(unet1d.build(0, shape=shape)), reference(shape, torch.float32)
    sample, _, cond = unet1d.inputs(shape)
    found = unet(sample, timestep, cond)
    assert relative_error(found, exact(sample.double(), timestep, cond.double())) < 3e-6


@pytest.mark.parametrize("where", ["sample", "cond", "timestep", "weight"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_nan_comes_out_as_nan_and_nobody_waits_for_it(on_cpu, where, value) -> None:
    shape = unet1d.TINY
    model = unet1d.build(0, shape=shape)
    sample, timestep, cond = unet1d.inputs(shape)
    if where == "weight":
        model.get_submodule("mid_modules.0.blocks.0.block.0").weight[3, 2, 1] = value
    elif where == "timestep":
        timestep = torch.tensor(value)
    else:
        (sample if where == "sample" else cond).view(-1)[5] = value
    sample.view(torch.int32).copy_(torch.where(sample.isnan(), -1, sample.view(torch.int32)))  # the NaN that marks
    found = on_cpu.unet(model)(sample, timestep, cond)
    assert not found.isfinite().any()


@pytest.mark.parametrize(("dtype", "batch", "horizon"), [(torch.float32, 1, 16), (torch.bfloat16, 2, 8)])
def test_kernel_samples(on_cpu, dtype, batch, horizon) -> None:
    shape, steps = unet1d.TINY, 4
    model, exact = unet1d.build(0, dtype, shape=shape), reference(shape, dtype)
    coefficients = unet1d.ddpm_coefficients(steps)
    sampler = on_cpu.unet(model).sampler(coefficients)
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(steps + 1, batch, horizon, shape.action_dim, generator=generator)
        cond = torch.randn(batch, shape.cond_dim, generator=generator)
        before, found = on_cpu.launches, sampler(noise, cond)
        assert on_cpu.launches == before + batch  # all steps in one
        expected = unet1d.sample_actions(exact, noise.double(), cond.double(), coefficients.double())
        assert relative_error(found, expected) < 1e-4


def test_a_sum_that_never_comes_is_noticed(on_cpu) -> None:
    """A sum that nobody publishes: the plan's row says that the layer has no channels."""
    shape = unet1d.TINY
    unet = on_cpu.unet(unet1d.build(0, shape=shape))
    launcher = unet.launcher(16)
    table = launcher.tensors["phases"]
    row = next(i for i, p in enumerate(launcher.plan.phases) if p.name == "mid_modules.0.blocks.0.block.0")
    table[row, phase.PHASE_FIELDS.index("out_channels")] = 0
    with pytest.raises(RuntimeError, match="error -1"):  # nobody can go on: the CPU says so at once, a GPU gives up
        unet(*unet1d.inputs(shape))


def test_trace_has_each_phase_in_its_order(tmp_path: Path) -> None:
    shape = unet1d.TINY
    launch = compiled_for_cpu(tmp_path, "-DUNET_TRACE")
    seen = trace.trace(launch.unet(unet1d.build(0, shape=shape)), *unet1d.inputs(shape), warmup=0, launch=launch)
    rows = seen.table()
    assert [row["phase"] for row in rows[:3]] == ["diffusion_step_encoder.1", "diffusion_step_encoder.3", "condition"]
    products = [i for i, row in enumerate(rows) if row["multiply"]]
    assert len(products) == 30 == len(rows) - 2  # all but the condition and the last convolution
    assert (seen.cycles[:, products] > 0).all()


# Falling back


def test_without_a_gpu_eager_runs_with_one_warning() -> None:
    shape = unet1d.TINY
    model = unet1d.build(0, shape=shape)
    inputs = unet1d.inputs(shape, batch=2)
    assert "GPU" in persistent.supported(model, inputs[0])
    unet = persistent.build(model)
    with pytest.warns(UserWarning, match="falls back to eager: the sample is not on a CUDA GPU"):
        assert torch.equal(unet(*inputs), model(*inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(unet(*inputs), model(*inputs))


def test_horizons_without_a_plan_run_eagerly(on_cpu) -> None:
    shape = unet1d.TINY
    model = unet1d.build(0, shape=shape)
    inputs, before = unet1d.inputs(shape, horizon=32), on_cpu.launches
    with pytest.warns(UserWarning, match="horizon 32"):
        assert torch.equal(on_cpu.unet(model)(*inputs), model(*inputs))
    assert on_cpu.launches == before


def test_mixed_weights_are_not_supported() -> None:
    model = unet1d.build(0, shape=unet1d.TINY)
    model.final_conv.bfloat16()
    sample = unet1d.inputs(unet1d.TINY)[0]
    assert "weights" in persistent.not_planned(model, sample)
    assert "samples" in persistent.not_planned(unet1d.build(0, shape=unet1d.TINY), sample.half())


# The CUDA C++ kernel, compiled for Hopper


@pytest.fixture(scope="module")
def compiled(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """ptxas's words, and the library."""
    out = tmp_path_factory.mktemp("nvcc") / "unet_step.so"
    argv = [nvcc, *HOPPER, "-Xptxas", "-v", "-o", str(out), str(step_library.SOURCE)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, out


def test_kernel_has_one_entry_for_each_weight_type_and_none_spills(compiled) -> None:
    words = compiled[0]
    assert len(re.findall(r"Compiling entry function '\w*unet\w*' for 'sm_90a'", words)) == len(VALUES)
    assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(VALUES)
    assert "warning" not in words.lower()
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", words)]
    assert max(registers) * 320 <= 65536  # all ten warps of a block fit


def test_compiled_structures_are_the_callers(compiled) -> None:
    library = ctypes.CDLL(str(compiled[1]))
    assert library.unet_step_sizes(0) == ctypes.sizeof(Args)
    assert library.unet_step_sizes(1) == 4 * phase.PHASE_WORDS


def sass(triton: Path, library: Path, kernel: str) -> list[str]:
    """Instructions of the entry whose name holds `kernel`, in order."""
    tool = triton / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-sass", library], capture_output=True, text=True, check=True).stdout
    (function,) = (part for part in text.split("Function : ")[1:] if kernel in part.partition("\n")[0])
    return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P[T\d]+ )?([A-Z][^;]*?)\s*;", function)


@pytest.mark.parametrize(
    ("kernel", "product"),
    [("Float32", "HMMA.1688.F32.TF32"), ("Bf16", "HMMA.16816.F32.BF16"), ("F16", "HMMA.16816.F32")],
)
def test_machine_code_is_what_was_meant(triton, compiled, kernel, product) -> None:
    lines = sass(triton, compiled[1], kernel)
    products = [line for line in lines if line.startswith("HMMA")]
    assert products
    assert all(line.startswith(product) for line in products)
    copies = [line for line in lines if line.startswith("UBLKCP")]
    assert len(copies) == 2  # the ring's first round, before all else, and the rest
    weights = [line for line in lines if line.startswith("LDS.128")]
    assert len(weights) >= 2 * 15  # two for each of the tiles of all instances, and the operands
    polled = [line for line in lines if line.startswith("LDG") and "STRONG.GPU" in line]
    assert any(".64" in line for line in polled)
    assert not any(line.startswith(("LDL", "STL", "MEMBAR.SC.SYS")) for line in lines)
    assert len(lines) < 6000  # 96 KB: more would not stay in the instruction cache


# The Triton kernels


def test_triton_kernels_compute_the_network(python: Python, triton: Path) -> None:
    script = HERE / "unet_interpreted.py"
    done = python("-m", "pytest", "-p", "no:cacheprovider", script, path=[triton, *SOURCES], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_triton_kernels_compiled_for_hopper(python: Python, triton: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = python(HERE / "unet_code.py", tmp_path, path=[triton, *SOURCES], TRITON_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)
    counts = {
        call: {
            k: sum(p["counts"].get(call, 0) for p in programs if p["kernel"] == k) for k in ("conv", "finish", "last")
        }
        for call in ("step", "bf16", "sampling")
    }
    step = {"conv": 34, "finish": 29, "last": 1}  # 25 conv blocks, 5 residuals, 4 down and up
    assert counts == {"step": step, "bf16": step, "sampling": {name: 2 * count for name, count in step.items()}}
    for number, program in enumerate(programs):
        code, ptx = (tmp_path / f"{number}.sass").read_text(), (tmp_path / f"{number}.ptx").read_text()
        assert not re.search(r"\b(LDL|STL)\b", code), program
        assert program["shared_bytes"] <= phase.SHARED_BYTES
        assert program["pdl"]
        before = ptx.partition("griddepcontrol.wait")[0]
        assert ptx.count("griddepcontrol.wait") == 1
        assert not re.search(r"\b(st|red|atom)\.global", before), program
        if program["kernel"] == "conv":  # tensor cores
            assert "HMMA" in code or "HGMMA" in code
