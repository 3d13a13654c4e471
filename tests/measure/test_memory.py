from __future__ import annotations

import pytest
import torch

from worklog.measure.memory import live_tensor_bytes, measure

SIZE = 1 << 20
"""Bytes of one float32 tensor of these tests."""


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(SIZE // 4)


def test_peak_is_temporaries_alive_together(x):
    baseline = live_tensor_bytes()
    memory = measure(lambda: (x + 1) + (x + 2), "cpu")
    assert memory.baseline_bytes == baseline
    assert memory.allocated_bytes - baseline == 3 * SIZE
    assert memory.largest_temporary_bytes == SIZE
    assert (memory.reserved_bytes, memory.device_bytes) == (memory.allocated_bytes, None)


def test_temporaries_one_after_another_are_not_added(x):
    def run() -> torch.Tensor:
        for _ in range(5):
            y = x + x
            del y
        return x

    memory = measure(run, "cpu")
    assert memory.allocated_bytes - memory.baseline_bytes == SIZE


def test_largest_block_is_a_temporary_that_the_result_does_not_show(x):
    memory = measure(lambda: x.double().sum(), "cpu")
    assert memory.largest_temporary_bytes == 2 * SIZE


def test_run_in_place_allocates_nothing(x):
    memory = measure(lambda: x.add_(x), "cpu")
    assert memory.allocated_bytes == memory.baseline_bytes
    assert memory.largest_temporary_bytes == 0


def test_tensor_that_lives_besides_is_not_counted(x):
    reference = torch.zeros(10 * SIZE // 4)
    with_it, without = measure(lambda: x + 1, "cpu"), measure(lambda: x + 1, "cpu", besides=reference)
    assert with_it.allocated_bytes - without.allocated_bytes == 10 * SIZE


def test_views_share_their_storage(x):
    before = live_tensor_bytes()
    views = [x[i:] for i in range(10)]
    assert live_tensor_bytes() == before
    views.append(x.clone())
    assert live_tensor_bytes() == before + SIZE


@pytest.mark.slow
def test_compiled_code_is_seen_too(x):
    """Inductor's buffers do not pass torch's dispatcher; the allocator reports them."""
    run = torch.compile(lambda: torch.flip(x + 1, (0,)).cumsum(0).double())
    run()
    memory = measure(run, "cpu")
    assert memory.largest_temporary_bytes == 2 * SIZE
