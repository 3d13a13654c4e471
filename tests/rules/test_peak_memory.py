"""peak_memory: what of a snapshot's peak is temporary, and who made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worklog.diagnose import diagnose

REPORTS = Path(__file__).resolve().parents[2] / "reports"
WEIGHTS, STEP, HEAD = (
    [{"filename": "net.py", "line": line, "name": name}] for line, name in ((2, "load"), (7, "step"), (9, "head"))
)


def event(action: str, addr: int, size: int, time_us: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": list(frames)}


def snapshot(folder: Path, events: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> dict[str, Any]:
    file = folder / "memory.json"
    segment = {"device": 0, "address": 0, "blocks": blocks}
    file.write_text(json.dumps({"segments": [segment], "device_traces": [events]}))
    return diagnose(file)


def test_temporaries_that_make_the_peak_are_found_with_their_stacks(tmp_path: Path) -> None:
    events = [
        event("alloc", 1, 600, 0, WEIGHTS),
        event("alloc", 2, 100, 10, STEP),
        event("alloc", 3, 300, 20, HEAD),  # 600 + 100 + 300, and 200 from before: the peak
        event("free_requested", 3, 300, 25),
        event("free_requested", 2, 100, 50),
        event("alloc", 2, 150, 60, STEP),  # lower
        event("free_requested", 2, 150, 70),
    ]
    blocks = [
        {"address": 9000, "size": 512, "requested_size": 200, "state": "active_allocated", "frames": []},
        {"address": 1, "size": 1024, "requested_size": 600, "state": "active_allocated", "frames": WEIGHTS},
        {"address": 5000, "size": 2048, "state": "inactive", "frames": []},
    ]
    found = snapshot(tmp_path, events, blocks)
    (finding,) = found["findings"]
    assert finding["rule"] == "peak_memory"
    assert finding["share"] == finding["gain_upper_bound"] == 400 / 1200
    assert finding["where"] == ["net.py:9 head", "net.py:7 step"]
    evidence = finding["evidence"]
    assert (evidence["peak_bytes"], evidence["temporary_bytes"], evidence["held_bytes"]) == (1200, 400, 800)
    assert evidence["before_the_history_bytes"] == 200
    assert (evidence["temporaries"], evidence["largest_stack_bytes"]) == (2, 300)
    assert evidence["largest_lived_at_most_us"] == 40
    assert (evidence["reserved_at_the_end_bytes"], evidence["of_it_unused_bytes"]) == (3584, 2048)
    assert "peak_memory" not in {one["rule"] for one in found["abstained"]}


def test_memory_that_stays_is_no_finding(tmp_path: Path) -> None:
    events = [event("alloc", 1, 960, 0, WEIGHTS), event("alloc", 2, 40, 1, STEP), event("free_requested", 2, 40, 2)]
    found = snapshot(tmp_path, events, [{"address": 1, "size": 960, "state": "active_allocated", "frames": WEIGHTS}])
    assert found["findings"] == []
    assert "peak_memory" not in {one["rule"] for one in found["abstained"]}


def test_without_a_history_it_abstains_and_says_how_to_record_one(tmp_path: Path) -> None:
    found = snapshot(tmp_path, [], [{"address": 1, "size": 960, "state": "active_allocated", "frames": []}])
    (said,) = [one["reason"] for one in found["abstained"] if one["rule"] == "peak_memory"]
    assert "_record_memory_history" in said
    assert found["findings"] == []


def test_the_recorded_peak_of_torchao_0_13_0_is_four_temporaries_of_the_output_layer() -> None:
    """128256 x 4096 weights in float32 as they are, as expanded scales and as their product, and in bfloat16: 14 bytes
    for each weight."""
    files = sorted(REPORTS.glob("float8_weight_only/*-h200-*/memory.torchao_0_13_0_eager.json.gz"))
    if not files:
        pytest.skip("no snapshot is recorded")
    (finding,) = diagnose(files[-1])["findings"]
    assert finding["evidence"]["temporary_bytes"] == pytest.approx(128256 * 4096 * 14, rel=1e-3)
    assert all("_dequantize_affine_float8" in place or "_expand_scale" in place for place in finding["where"])
