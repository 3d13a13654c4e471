"""How long a step of the persistent kernel should take, from three numbers: a prediction to hold measurements against.

A block's weights arrive in chunks at its share of the memory bandwidth, as long as the ring has room. A phase begins
one exchange after the phase before has published; it takes chunks out of the ring as fast as shared memory gives them,
or as they come. What is computed for later (residual convolutions, FiLM rows) fills the time of the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.phase import BLOCKS, CHUNK, FRAGMENT
from kernels.plan import Plan


@dataclass(frozen=True)
class Forecast:
    step_us: float
    stream_us: float
    """The floor: all weights at the memory's bandwidth, nothing else."""
    exchange_us: float
    """All exchanges, nothing else."""
    waiting_us: float
    """Of the step, how long blocks wait for weights that are not there yet."""


def forecast(plan: Plan, bytes_per_s: float, exchange_us: float, shared_bytes_per_s: float = 1.5e11) -> Forecast:
    """One step in a row of many: the ring is empty at its start, as after a launch.

    bytes_per_s: of device memory, measured. exchange_us: from one block's published sums to the next product's first
    instruction; unet_step.cu's trace measures it. shared_bytes_per_s: of one multiprocessor while it multiplies; the
    default is 100 of the 128 bytes a cycle that its shared memory gives, at 1.5 GHz.
    """
    chunk_us, take_us = CHUNK * BLOCKS / bytes_per_s * 1e6, CHUNK / shared_bytes_per_s * 1e6
    room, freed = plan.shared["ring_chunks"], [0.0] * plan.chunks
    arrived = waiting = ready = 0.0
    taken = 0

    def take(until_fragment: int, now: float) -> float:
        """Time at which all chunks before this fragment are used, from `now` on."""
        nonlocal arrived, taken, waiting
        while taken * CHUNK < until_fragment * FRAGMENT:
            arrived = max(arrived + chunk_us, freed[taken - room] if taken >= room else 0.0)
            waiting += max(0.0, arrived - now)
            now = freed[taken] = max(now, arrived) + take_us
            taken += 1
        return now

    for phase in plan.phases:
        ends = [w.fragment + w.taps * w.blocks * w.tiles * 2 for w in plan.weights if w.phase is phase]
        main, last = (ends[0] if phase.taps else 0), max(ends, default=0)
        published = take(main, ready)
        ready = max(published + exchange_us, take(last, published))
    stream_us = plan.fragments * FRAGMENT * BLOCKS / bytes_per_s * 1e6
    return Forecast(ready, stream_us, len(plan.phases) * exchange_us, waiting)
