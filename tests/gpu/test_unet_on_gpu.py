"""The U-Net's kernels on a real GPU, against float64: layer by layer, odd shapes, NaN, graphs, 100 steps."""

from __future__ import annotations

import sys
import warnings

import checkouts
import pytest

from worklog.measure.correctness import relative_error

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(checkouts.REPOSITORY / "problems" / "unet_conv_inference"))

from kernels import fused_triton, layers, persistent  # noqa: E402
from kernels.phase import PHASE_FIELDS  # noqa: E402
from kernels.trace import PARTS, trace  # noqa: E402

from worklog.workloads import unet1d  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES = {"persistent": persistent, "triton": fused_triton}
EXACT = {
    torch.float32: 5e-6,
    torch.bfloat16: 5e-5,
    torch.float16: 5e-6,
}  # the kernel's own; results rounded come on top
ROUNDED = {
    torch.float32: 5e-6,
    torch.bfloat16: 3e-2,
    torch.float16: 5e-3,
}  # Triton rounds activations to the weights' type
FOLDED = ("final_conv.1", "down_modules.0.0.residual_conv")  # the persistent kernel never publishes these


@pytest.fixture(autouse=True)
def _inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=DTYPES, ids=lambda d: str(d).partition(".")[2])
def models(request):
    """(model, the same weights in float64)"""
    with torch.inference_mode():
        made = unet1d.build(0, request.param, "cuda")
        return made, unet1d.build(0, request.param, "cuda").double()


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]


def dtype_of(model):
    return next(model.parameters()).dtype


def limit_of(module, dtype, values=None):
    rounding = 0 if values in (None, torch.float32) else torch.finfo(values).eps
    return (EXACT if module is persistent else ROUNDED)[dtype] + rounding


def poisoned(_, like, *size):
    return torch.full(size, float("nan"), device=like.device)


def inputs(batch=1, horizon=16, seed=0, dtype=torch.float32, shape=unet1d.PUSH_T):
    return unet1d.inputs(shape, batch, horizon, seed, dtype, "cuda")


def expected(exact, sample, timestep, cond):
    return exact(sample.double(), timestep, cond.double())


def test_gpu_is_supported(module, models):
    assert module.supported(models[0], inputs()[0]) is None


def test_one_step_is_no_less_exact_than_eager(module, models):
    model, exact = models
    dtype = dtype_of(model)
    ours = module.build(model)
    for seed in range(3):
        given = inputs(seed=seed, dtype=dtype)
        truth = expected(exact, *given)
        error, eager = relative_error(ours(*given), truth), relative_error(model(*given), truth)
        assert error <= eager * (1 if module is persistent else 1.2), (error, eager)
        assert error < limit_of(module, dtype, dtype)


def test_every_layer_of_the_persistent_kernel_runs(models):
    """Its workspace starts as NaN, and each launch clears it again."""
    model, exact = models
    ours = persistent.build(model)
    for seed in range(4):
        given = inputs(seed=seed)
        ours(*given)
        launcher = ours.launcher(16)
        convs = layers.outputs(exact, *(v.double() if v.ndim else v for v in given))
        errors = layers.errors(launcher.layers(), {n: y for n, y in convs.items() if n not in FOLDED})
        assert sum("block.0" in name for name in errors) == 25
        assert all(e is not None and e < EXACT[dtype_of(model)] for e in errors.values()), errors
        workspace = launcher.tensors["workspace"].view(torch.int32)
        assert (workspace[(seed + 1) % 2] == -1).all()


def test_every_layer_of_the_triton_kernels_runs(models, monkeypatch):
    model, exact = models
    monkeypatch.setattr(fused_triton.TritonUnet, "scratch", poisoned)
    ours = fused_triton.build(model)
    for batch in (1, 3):
        ours.seen = {}
        sample, timestep, cond = inputs(batch)
        ours(sample, timestep, cond)
        for b in range(batch):
            given = sample[b : b + 1].double(), timestep, cond[b : b + 1].double()
            convs = {n: y for n, y in layers.outputs(exact, *given).items() if n in ours.seen}
            assert sum("block.0" in name for name in convs) == 25
            errors = layers.errors({n: y[b] for n, y in ours.seen.items()}, convs)
            assert all(e is not None and e < ROUNDED[dtype_of(model)] for e in errors.values()), errors


@pytest.mark.parametrize("horizon", [4, 8, 16, 32])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_odd_shapes(module, models, batch, horizon):
    model, exact = models
    ours = module.build(model)
    given = inputs(batch, horizon, dtype=dtype_of(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ours(*given)
    limit = limit_of(module, dtype_of(model), dtype_of(model))
    if module is persistent and horizon not in (8, 16):
        limit = 5e-2  # eager's
    assert relative_error(found, expected(exact, *given)) < limit


@pytest.mark.parametrize("shape", [unet1d.TINY, unet1d.UnetShape(step_dim=32, widths=(48, 64, 160), action_dim=3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_widths(module, shape, dtype):
    model, exact = unet1d.build(0, dtype, "cuda", shape), unet1d.build(0, dtype, "cuda", shape).double()
    ours = module.build(model)
    for horizon in (8, 16):
        given = inputs(2, horizon, shape=shape)
        assert relative_error(ours(*given), expected(exact, *given)) < limit_of(module, dtype)


def test_horizon_without_a_plan_falls_back_with_one_warning(models):
    ours = persistent.build(models[0])
    given = inputs(horizon=32, dtype=dtype_of(models[0]))
    with pytest.warns(UserWarning, match="falls back to eager: horizon 32"):
        ours(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ours(*given), models[0](*given))


@pytest.mark.parametrize("where", ["sample", "cond", "weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_not_finite(module, where, value):
    model = unet1d.build(0, device="cuda")
    sample, timestep, cond = inputs(2)
    if where == "weight":
        model.get_submodule("up_modules.1.0.blocks.0.block.0").weight[200, 1000, 4] = value
        assert not module.build(model)(sample, timestep, cond).isfinite().any()
        return
    (sample if where == "sample" else cond)[1].view(-1)[7] = value
    found = module.build(model)(sample, timestep, cond)
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()
    marked = inputs()  # the very NaN that marks a word as not yet there
    marked[0].view(-1).view(torch.int32)[3] = -1
    assert not module.build(model)(*marked).isfinite().any()


@pytest.mark.parametrize("timestep", [0, 99, 12.5, torch.tensor(99), torch.tensor([3, 77])])
def test_timesteps_of_any_kind(module, timestep):
    model, exact = unet1d.build(0, device="cuda"), unet1d.build(0, device="cuda").double()
    sample, _, cond = inputs(2)
    for given in (timestep, timestep.cuda() if isinstance(timestep, torch.Tensor) else timestep):
        found = module.build(model)(sample, given, cond)
        assert relative_error(found, expected(exact, sample, given, cond)) < 5e-6


def test_results_are_the_same_each_time_and_under_load(module, models):
    """A word taken before it was written, or a chunk of weights before it arrived, would show here."""
    ours = module.build(models[0])
    given = inputs()
    first = ours(*given)
    other = torch.cuda.Stream()
    noise = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    for i in range(300):
        if i % 3 == 0:
            with torch.cuda.stream(other):
                noise.copy_(noise.flip(0) if i % 30 == 0 else noise)
        assert torch.equal(ours(*given), first), i


def test_models_take_turns(module):
    """Each has a workspace of its own; they share the GPU in turns."""
    made = [(unet1d.build(seed, device="cuda"), unet1d.build(seed, device="cuda").double()) for seed in (0, 1)]
    ours = [module.build(model) for model, _ in made]
    for seed in range(6):
        given = inputs(horizon=8 if seed % 3 else 16, seed=seed)
        found = [unet(*given) for unet in ours]
        for y, (_, exact) in zip(found, made, strict=True):
            assert relative_error(y, expected(exact, *given)) < 5e-6


def recorded(run):
    """`run` in a CUDA graph: (replay, its result)."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result


def test_a_graph_follows_its_inputs(module, models):
    model, exact = models
    ours, static = module.build(model), inputs()
    replay, found = recorded(lambda: ours(*static))
    for seed in (1, 2, 3):
        for to, value in zip(static, inputs(seed=seed), strict=True):
            to.copy_(value)
        static[1].fill_(seed)
        replay()
        assert relative_error(found, expected(exact, *static)) < limit_of(module, dtype_of(model))


def kernels_of(run):
    """Names of the kernels that `run` starts."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    return [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name]


def test_kernels_of_a_step(models):
    given = inputs(dtype=dtype_of(models[0]))
    ours = persistent.build(models[0])
    assert len(kernels_of(lambda: ours(*given))) == 1
    triton = fused_triton.build(models[0])
    names = kernels_of(lambda: triton(*given))
    assert sum(name in ("conv", "finish", "last") for name in names) == 64


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (2, 2), (100, 1)])
def test_sampling_is_the_models(module, models, steps, batch):
    model, exact = models
    coefficients = unet1d.ddpm_coefficients(steps, device="cuda")
    sampler = module.build_sampler(model, coefficients)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps + 1, batch, 16, 2, generator=generator).cuda()
    cond = torch.randn(batch, unet1d.PUSH_T.cond_dim, generator=generator).cuda()
    truth = unet1d.sample_actions(exact, noise.double(), cond.double(), coefficients.double())
    eager = unet1d.build(0, device="cuda") if dtype_of(model) == torch.float32 else None
    error = relative_error(sampler(noise, cond), truth)
    assert error < (1e-3 if module is persistent else 0.1)
    if eager is not None:
        assert error <= 1.2 * relative_error(unet1d.sample_actions(eager, noise, cond, coefficients), truth)
    again = sampler(noise, cond)
    assert relative_error(again, truth) == error
    replay, found = recorded(lambda: sampler(noise, cond))
    noise.copy_(noise.flip(0))
    replay()
    assert (
        relative_error(found, unet1d.sample_actions(exact, noise.double(), cond.double(), coefficients.double())) < 0.1
    )


def test_sampling_is_one_launch_after_the_tables():
    model, steps = unet1d.build(0, device="cuda"), 100
    sampler = persistent.build_sampler(model, unet1d.ddpm_coefficients(steps, device="cuda"))
    noise, cond = torch.randn(steps + 1, 1, 16, 2, device="cuda"), torch.randn(1, 1028, device="cuda")
    names = kernels_of(lambda: sampler(noise, cond))
    assert sum("unet" in name for name in names) == 1
    assert len(names) <= 8


def test_a_wait_in_vain_ends_as_nan():
    """A fault that leaves a sum unpublished: the kernel gives up, and says so in its result."""
    ours = persistent.build(unet1d.build(0, device="cuda", shape=unet1d.TINY))
    launcher = ours.launcher(16)
    row = next(i for i, p in enumerate(launcher.plan.phases) if p.name == "mid_modules.0.blocks.0.block.0")
    launcher.tensors["phases"][row, PHASE_FIELDS.index("out_channels")] = 0  # nothing to publish
    assert not ours(*inputs(shape=unet1d.TINY)).isfinite().any()


def test_trace_sees_every_phase():
    ours = persistent.build(unet1d.build(0, device="cuda"))
    seen = trace(ours, *inputs())
    rows = seen.table()
    assert len(rows) == 32
    busy = [row for row in rows if row["multiply"]]
    assert len(busy) == 30  # all but the condition and the last
    assert all(0 < sum(row[part] for part in PARTS) < 1e6 for row in busy)
