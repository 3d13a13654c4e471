"""Rule on a snapshot of torch's CUDA allocator."""

from __future__ import annotations

from typing import Any

from worklog.rules import MATERIAL, Abstained, Finding
from worklog.rules.captures import OPERATORS

PLACES = 3
RECORDING = "torch.cuda.memory._record_memory_history()"


def peak_memory(memory: dict[str, Any]) -> Finding | Abstained | None:
    """Temporaries make the peak: blocks that the history both allocates and frees. `memory`: what traces.memory reads.

    Share and bound are fractions of the peak. Without these blocks the peak cannot fall below what was held at it
    beside them: what was there before the history, and what was still there at its end.
    """
    if len(memory["timeline"]) < 2:
        return Abstained("peak_memory", f"the snapshot holds no history of the allocator; record it: `{RECORDING}`")
    peak, temporaries = memory["peak_bytes"], memory["temporaries"]
    temporary = sum(block["bytes"] for block in temporaries)
    share = temporary / peak if peak else 0.0
    if share < MATERIAL:
        return None
    lived = [block["longest_us"] for block in temporaries[:PLACES] if block["longest_us"] is not None]
    return Finding(
        rule="peak_memory",
        level="coarse",
        title=f"{share:.0%} of the peak are temporaries, allocated and freed again",
        share=share,
        gain_upper_bound=share,
        evidence={
            "device": memory["device"],
            "peak_bytes": peak,
            "temporary_bytes": temporary,
            "held_bytes": peak - temporary,
            "before_the_history_bytes": memory["baseline_bytes"],
            "temporaries": sum(block["count"] for block in temporaries),
            "largest_stack_bytes": temporaries[0]["bytes"],
            **({"largest_lived_at_most_us": max(lived)} if lived else {}),
            "history_us": memory["timeline"][-1][0],
            "reserved_at_the_end_bytes": memory["reserved_bytes"],
            "of_it_unused_bytes": memory["unused_bytes"],
        },
        where=[block["frames"][0] for block in temporaries if block["frames"]][:PLACES],
        next=OPERATORS,
    )
