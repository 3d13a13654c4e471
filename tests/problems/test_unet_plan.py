"""The plan of the U-Net's persistent kernel and its packed weights: what they promise, and executed by NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import checkouts
import numpy as np
import pytest

from worklog.measure.correctness import relative_error

torch = pytest.importorskip("torch")
sys.path.insert(0, str(checkouts.REPOSITORY / "problems" / "unet_conv_inference"))

from kernels import packing, phase, plan  # noqa: E402
from kernels.executor import Executor, read_fragments  # noqa: E402
from kernels.forecast import forecast  # noqa: E402
from kernels.plan import Plan  # noqa: E402

from worklog.workloads import unet1d  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (unet1d.PUSH_T, unet1d.TINY, unet1d.UnetShape(cond_dim=1028, step_dim=32, widths=(48, 64, 160), action_dim=3))


def plans(shapes=SHAPES, horizons=(8, 16), elements=(1, 2)):
    return [Plan(s, h, e, sampling) for s in shapes for h in horizons for e in elements for sampling in (False, True)]


def reference(shape, dtype):
    return unet1d.build(0, dtype, shape=shape).double()


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


# How long it should take


@pytest.mark.parametrize("element", [1, 2])
def test_forecast_lies_between_its_two_limits(element) -> None:
    made = Plan(unet1d.PUSH_T, 16, element, sampling=False)
    bandwidth = 4.3e12
    bound = forecast(made, bandwidth, 0.0, 1e15)
    assert bound.stream_us <= bound.step_us < 1.02 * bound.stream_us  # nothing but the stream
    assert bound.waiting_us == pytest.approx(bound.step_us, rel=0.01)
    quick = forecast(made, 1e18, 1.0, 1e15)
    assert quick.step_us == pytest.approx(quick.exchange_us, rel=0.01) == 32  # nothing but exchanges
    both = forecast(made, bandwidth, 1.0)
    assert max(both.stream_us, both.exchange_us) < both.step_us < both.stream_us + both.exchange_us
    assert forecast(made, bandwidth, 2.0).step_us > both.step_us
