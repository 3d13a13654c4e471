"""The U-Net's kernels without a GPU: the plan and the packed weights, executed by NumPy; the CUDA C++ kernel's own
text, run on the CPU thread by thread and compiled for Hopper; the Triton kernels, interpreted and compiled."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
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

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
FOLDER = checkouts.REPOSITORY / "problems" / "unet_conv_inference"
sys.path.insert(0, str(FOLDER))

from kernels import layers, nvcc, packing, persistent, phase, plan  # noqa: E402
from kernels.executor import Executor, read_fragments  # noqa: E402
from kernels.launch import ADDRESSES, NUMBERS, SHARED, VALUES, Args  # noqa: E402
from kernels.plan import Plan  # noqa: E402

from worklog.workloads import unet1d  # noqa: E402

Python = Callable[..., "subprocess.CompletedProcess[str]"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (unet1d.PUSH_T, unet1d.TINY, unet1d.UnetShape(cond_dim=1028, step_dim=32, widths=(48, 64, 160), action_dim=3))
FOLDED = ("final_conv.1", "down_modules.0.0.residual_conv")  # computed where they are used, never published


def plans(shapes=SHAPES, horizons=(8, 16), elements=(1, 2)):
    return [Plan(s, h, e, sampling) for s in shapes for h in horizons for e in elements for sampling in (False, True)]


def reference(shape, dtype):
    return unet1d.build(0, dtype, shape=shape).double()


# The plan


def test_push_t_has_29_exchanges_and_streams_each_weight_once() -> None:
    made = Plan(unet1d.PUSH_T, 16, 1, sampling=True)
    assert len(made.phases) == 29
    assert len(Plan(unet1d.PUSH_T, 16, 1, sampling=False).phases) == 32
    model = unet1d.ConditionalUnet1D(unet1d.PUSH_T)
    streamed = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv1d | torch.nn.ConvTranspose1d)]
    conv_bytes = 4 * sum(m.weight.numel() for m in streamed)
    assert 1 <= made.fragments * phase.FRAGMENT * phase.BLOCKS / conv_bytes < 1.01
    whole = Plan(unet1d.PUSH_T, 16, 1, sampling=False).fragments * phase.FRAGMENT * phase.BLOCKS
    assert 1 <= whole / (4 * sum(p.numel() for p in model.parameters())) < 1.01


@pytest.mark.parametrize("made", plans())
def test_plans_keep_their_promises(made: Plan) -> None:
    ends = 0
    for weight in made.weights:  # in order, without overlap, and no step through K crosses a chunk
        assert weight.fragment >= ends
        assert weight.fragment % (2 * weight.tiles) == 0
        assert phase.PER_CHUNK % (2 * weight.tiles) == 0
        ends = weight.fragment + weight.taps * weight.blocks * weight.tiles * 2
    assert ends <= made.fragments
    taken = sorted((offset, offset + phase.SLICES * c * n) for offset, c, n in made.outputs.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert taken[-1][1] <= made.eps_offset < made.set_elements
    shared = made.shared
    assert shared["ring"] + shared["ring_chunks"] * phase.CHUNK <= phase.SHARED_BYTES
    assert all(offset % 128 == 0 for name, offset in shared.items() if name != "ring_chunks")
    assert plan.unsupported(made.shape, made.horizon) is None
    for p in made.phases:
        assert p.kind == phase.CONDITION or p.in_channels // 8 * p.in_columns <= phase.ELEMENTS
        assert 16 * p.tiles * p.columns <= phase.OUTPUTS


@pytest.mark.parametrize("made", [p for p in plans() if not p.sampling])
def test_film_rows_are_computed_before_the_phase_that_reads_them(made: Plan) -> None:
    ready = 0
    for p in made.phases:
        if p.film >= 0:
            assert p.film + 2 * p.in_channels <= ready
        ready += p.film_tiles * 16 * phase.BLOCKS
    assert ready >= made.film_rows
    rounds = [p.film_first + i for p in made.phases for i in range(p.film_tiles)]
    assert rounds == list(range(made.film_rounds))


def test_what_has_no_plan_is_said() -> None:
    for horizon in (4, 12, 32):
        assert "horizon" in plan.unsupported(unet1d.PUSH_T, horizon)
    replaced = dataclasses.replace
    assert "groups" in plan.unsupported(replaced(unet1d.PUSH_T, groups=4), 16)
    assert "widths" in plan.unsupported(replaced(unet1d.PUSH_T, widths=(40, 512, 1024)), 16)
    assert "activations" in plan.unsupported(replaced(unet1d.PUSH_T, widths=(512, 1024, 2048)), 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_is_packed_where_the_tensor_cores_look_for_it(dtype) -> None:
    """Each weight is its own number, so that a swap of any two shows."""
    shape = unet1d.TINY
    model, made = unet1d.build(0, dtype, shape=shape), Plan(shape, 16, 4 // dtype.itemsize, sampling=False)
    entry = next(w for w in made.weights if w.layer == "up_modules.0.0.blocks.0.block.0")
    conv = model.get_submodule(entry.layer)
    count, (rows, _, taps) = conv.weight.numel(), conv.weight.shape
    kept = 2048 if dtype == torch.float16 else 256 if dtype == torch.bfloat16 else 1 << 24  # integers it holds
    conv.weight.copy_((torch.arange(count) % kept + 1).reshape(conv.weight.shape))
    fragments = packing.stream(model, made, dtype).view(dtype)[:, entry.fragment :]
    steps = entry.taps * entry.blocks
    found = read_fragments(fragments[:, : steps * entry.tiles * 2], entry.tiles)
    own, other = entry.phase.in_channels, entry.phase.concat_channels
    for block in range(phase.BLOCKS):
        r, s = divmod(block, phase.SLICES)
        mine = [*range(s * own // 8, (s + 1) * own // 8)]
        mine += [own + c for c in range(s * other // 8, (s + 1) * other // 8)]
        part = found[block].reshape(entry.tiles * 16, taps, -1)
        for row in range(entry.tiles * 16):
            at = r * entry.tiles * 16 + row
            wanted = conv.weight[at, mine].double().T.numpy() if at < rows else np.zeros((taps, len(mine)))
            assert np.array_equal(part[row, :, : len(mine)], wanted)
            assert not part[row, :, len(mine) :].any()


# The plan executed by NumPy, in float64


@pytest.mark.parametrize("horizon", [8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: str(s.widths))
def test_executed_plan_is_the_network(shape, dtype, horizon) -> None:
    made = Plan(shape, horizon, 4 // dtype.itemsize, sampling=False)
    executor = Executor(unet1d.build(0, dtype, shape=shape), made, dtype)
    sample, timestep, cond = unet1d.inputs(shape, 3, horizon, dtype=torch.float64)
    expected = reference(shape, dtype)(sample, timestep, cond)
    for b in range(len(sample)):
        found = executor.step(sample[b].numpy(), float(timestep), cond[b].numpy())
        assert relative_error(torch.from_numpy(found), expected[b]) < 3e-6  # of the embedding's float32 frequencies
        unwritten = np.isnan(executor.workspace)
        assert unwritten.sum() < 64 * len(made.outputs)  # between two layers' places


@pytest.mark.parametrize("sampling", [False, True])
def test_executed_plan_is_the_published_network(sampling) -> None:
    shape, dtype = unet1d.PUSH_T, torch.float32
    model, made = unet1d.build(0, dtype, shape=shape), Plan(shape, 16, 1, sampling)
    exact = reference(shape, dtype)
    sample, timestep, cond = unet1d.inputs(shape, dtype=torch.float64)
    executor, film = Executor(model, made, dtype), None
    if sampling:
        features = torch.cat((exact.step_features(timestep, sample), cond), -1)
        film = torch.cat([exact.get_submodule(name).cond_encoder(features)[0] for name in made.film_row]).numpy()
    found = executor.step(sample[0].numpy(), float(timestep), cond[0].numpy(), film)
    assert relative_error(torch.from_numpy(found), exact(sample, timestep, cond)[0]) < 1e-6


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


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("cpu") / "unet_on_cpu.so"
    argv = [compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-o", str(library), str(HERE / "unet_on_cpu.cpp")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return OnCpu(library)


def test_structures_are_the_kernels(on_cpu: OnCpu) -> None:
    assert on_cpu.library.unet_step_sizes(0) == ctypes.sizeof(Args)
    assert on_cpu.library.unet_step_sizes(1) == 4 * phase.PHASE_WORDS
    text = re.sub(r"//.*", "", nvcc.SOURCE.read_text())

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
        (SHAPES[2], torch.float16, torch.float16, 16, 1),
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


def test_a_block_that_never_comes_gives_nan_and_ends(on_cpu) -> None:
    """What a wait in vain would look like: a sum that nobody publishes. Here its words are cut out of the plan."""
    shape = unet1d.TINY
    unet = on_cpu.unet(unet1d.build(0, shape=shape))
    launcher = unet.launcher(16)
    table = launcher.tensors["phases"]
    row = next(i for i, p in enumerate(launcher.plan.phases) if p.name == "mid_modules.0.blocks.0.block.0")
    table[row + 1, phase.PHASE_FIELDS.index("in_offset")] = launcher.plan.set_elements - 64 * 8  # never written
    with pytest.raises(RuntimeError, match="error -1"):  # nobody can go on: the CPU says so at once, a GPU gives up
        unet(*unet1d.inputs(shape))


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
    from kernels import nvcc as loader

    out = tmp_path_factory.mktemp("nvcc") / "unet_step.so"
    argv = [nvcc, *loader.FLAGS, "-Xptxas", "-v", "-o", str(out), str(loader.SOURCE)]
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
    assert len(copies) == 1
    weights = [line for line in lines if line.startswith("LDS.128")]
    assert len(weights) >= 2 * 15  # two for each of the tiles of all instances, and the operands
    polled = [line for line in lines if line.startswith("LDG") and "STRONG.GPU" in line]
    assert any(".64" in line for line in polled)
    assert not any(line.startswith(("LDL", "STL", "MEMBAR.SC.SYS")) for line in lines)
    assert len(lines) < 6000  # 96 KB: more would not stay in the instruction cache


@pytest.mark.usefixtures("nvcc")
def test_kernel_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = nvcc.compile_source()
    made = library.stat().st_mtime_ns
    assert nvcc.compile_source() == library
    assert library.stat().st_mtime_ns == made
    assert list(tmp_path.rglob("*.part")) == []


@pytest.mark.usefixtures("nvcc")
def test_source_that_does_not_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel( {\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(nvcc, "SOURCE", broken)
    with pytest.raises(RuntimeError, match=r"nvcc failed: .*broken\.cu"):
        nvcc.compile_source()
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_no_nvcc_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CUDA_HOME", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvcc is not on PATH"):
        nvcc.compile_source()
