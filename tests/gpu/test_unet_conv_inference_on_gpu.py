"""The ladder of unet_conv_inference on a real GPU, small, as the library runs it."""

from __future__ import annotations

import dataclasses

import pytest

from worklog import problem
from worklog.measure import timing
from worklog.measure.correctness import relative_error

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

unet = problem.load("unet_conv_inference")
CONFIG = dataclasses.replace(unet.config("tiny", "cpu"), device="cuda", cond_dim=1028)
PLAIN = [v.slug for v in unet.variants if not {"kernels", "compile", "parts"} & v.options.keys()]


@pytest.mark.parametrize("slug", PLAIN)
def test_what_is_timed_is_right(slug: str) -> None:
    """Graphs are replayed, not only captured, and more than once."""
    for case in unet.module.build(unet.variant(slug), CONFIG).cases:
        with torch.inference_mode():
            run = timing.prepare(case, "cuda")
            run()
            assert relative_error(run(), case.reference()) < case.limit, case.name


def test_the_compiler_leaves_the_convolutions_to_the_library_on_a_gpu_too() -> None:
    facts = unet.module.build(unet.variant("compile"), CONFIG).facts
    assert facts["library_convolutions"] == 35
    assert facts["generated_kernel_calls"] > 0


def test_a_period_of_a_note_is_half_traffic_and_half_waiting() -> None:
    import power_tones

    note = power_tones.Note("A", 1 / 1000, 100)
    replay = power_tones.recorded(note, *power_tones.rates())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(note.periods):
        replay()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(note.periods * note.period_s * 1e3, rel=0.3)
