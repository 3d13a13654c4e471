"""Recorded programs whose answers are known from the programs themselves: what the readers and rules say of them.

Those of a GPU lie under tests/fixtures/recorded (tests/fixtures/record.py made them); the same programs run here on the
CPU at a small size.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rank_traces import made

from worklog import distributed
from worklog.analysis import ranks
from worklog.analysis.context import place
from worklog.diagnose import diagnose
from worklog.traces import memory, schema, timeline
from worklog.traces.schema import Trace

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RECORDED = sorted(file.parent for file in FIXTURES.glob("recorded/*/expected.json"))
AROUND_NS = 100_000
"""How far clocks of two GPUs of one machine may seem apart; measured differences will be less."""


def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record", FIXTURES / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(recorder().CAPTURES))
def test_the_same_program_on_the_cpu(name: str, tmp_path: Path) -> None:
    check(recorder().record(name, "cpu", tmp_path), tmp_path)


@pytest.mark.parametrize("folder", RECORDED, ids=[folder.name for folder in RECORDED])
def test_recorded(folder: Path, tmp_path: Path) -> None:
    check(folder, tmp_path)
    for file in folder.iterdir():
        assert file.stat().st_size < recorder().LIMIT_BYTES


def check(folder: Path, scratch: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    CHECKS[expected["program"]](list(unpacked(folder, scratch)), expected)


def training_step(files: list[Path], expected: dict[str, Any]) -> None:
    facts, gpu = expected["facts"], expected["device"] == "cuda"
    seen = []
    for file in files:
        seen.append(file.name)
        trace = timeline.load(file)
        assert count(trace, schema.ANNOTATION, "step") == facts["steps"]
        if trace.tool == "torch.profiler":
            assert count(trace, schema.OPERATOR, "aten::convolution") == facts["convolutions"]
            assert count(trace, schema.OPERATOR, "aten::item") == facts["steps"]
        if trace.stacks:
            modules = [str(name) for name in trace.frames["name"][trace.frames["kind"] == schema.MODULE]]
            assert sum("Conv2d" in name for name in modules) == facts["convolutions"]
            for where in (facts["copies_in"], facts["reads_in"]):
                assert count(trace, schema.PYTHON, python_function(where)) == facts["steps"]
        if gpu:
            copies_of_a_training_step(trace, file, facts)
    assert seen == [*["nsys.node.sqlite"] * gpu, "torch.json.gz", "torch.stacks.json.gz"]


def copies_of_a_training_step(trace: Trace, file: Path, facts: dict[str, Any]) -> None:
    copies = trace.activities[trace.activities["kind"] == schema.COPY]
    to_device = copies[copies["name"].astype(str).str.contains("HtoD")]
    to_host = copies[copies["name"].astype(str).str.contains("DtoH")]
    for size in (facts["images_bytes"], facts["labels_bytes"]):
        own = to_device[to_device["bytes"] == size]
        assert len(own) == facts["steps"]
        assert (own["pageable"] == 1).all()
    assert (to_host["bytes"] == facts["loss_bytes"]).sum() == facts["steps"]
    if trace.stacks:
        images = to_device[to_device["bytes"] == facts["images_bytes"]]
        (where,) = place(trace, images["call"].to_numpy())
        assert facts["copies_in"] in where
    found = diagnose(file, "step")
    (device,) = found["devices"]
    assert sum(device["accounting_ns"].values()) == device["span_ns"]
    assert device["accounting_ns"]["copy"] > 0
    assert "blocking_copies" in [finding["rule"] for finding in found["findings"]]


def graph_replay(files: list[Path], expected: dict[str, Any]) -> None:
    facts = expected["facts"]
    if expected["device"] == "cpu":
        (file,) = files
        assert count(timeline.load(file), schema.OPERATOR, "aten::linear") == facts["linears"]
        assert diagnose(file)["devices"] == []
        return
    seen = []
    for file in files:
        seen.append(file.name)
        trace, found = timeline.load(file), diagnose(file)
        work = trace.activities
        assert trace.calls["graph"].sum() == facts["replays"]
        if file.name.startswith("nsys.graph"):
            assert (work["kind"] == schema.GRAPH).sum() == facts["replays"]
            assert found["coverage"]["graph_replays_as_one_piece"] == facts["replays"]
            assert {one["rule"] for one in found["abstained"]} >= {"host_bound", "launch_bound"}
            assert "--cuda-graph-trace=node" in found["abstained"][0]["reason"]
            continue
        replayed = work[trace.calls["graph"].to_numpy()[work["call"]] & (work["call"] >= 0).to_numpy()]
        for kind, nodes in ((schema.COMPUTE, "kernel"), (schema.COPY, "copy"), (schema.MEMSET, "memset")):
            assert (replayed["kind"] == kind).sum() == facts["replays"] * facts[f"{nodes}_nodes"]
        assert found["coverage"]["kernels_joined_to_launch"] == 1.0
    assert seen == ["nsys.graph.sqlite", "nsys.node.sqlite", "torch.json.gz"]


def slow_rank(files: list[Path], expected: dict[str, Any]) -> None:
    facts, extra = expected["facts"], expected["measured"]["torch"]["extra_ms"]
    assert len(files) == facts["ranks"]
    assert len(extra) == facts["steps"]
    for file in files:
        assert count(timeline.load(file), schema.ANNOTATION, "step") == facts["steps"]
    found = distributed.diagnose(files)
    assert found["rank_from"] == "trace"
    assert [one["rank"] for one in found["ranks"]] == list(range(facts["ranks"]))
    if expected["device"] == "cpu":
        assert found["collectives"] is None
        assert {one["reason"] for one in found["abstained"]} == {"no kernel of a collective is in the traces"}
        collectives_on_the_host(files, facts["slow_rank"], extra)
        return
    low, high = found["alignment"][1]["bounds_ns"]
    assert low - AROUND_NS < 0 < high + AROUND_NS  # one machine, one clock
    slow, other = (found["collectives"]["ranks"][rank] for rank in (facts["slow_rank"], 1 - facts["slow_rank"]))
    expected_ns = 1e6 * sum(extra[1:])  # the first step's waiting also holds the wait for the other's profiler
    assert 0.5 * expected_ns < other["waiting_ns"]
    assert other["waiting_ns"] > 10 * slow["waiting_ns"]
    assert slow["arrived_last"] >= facts["steps"]
    straggler = found["findings"][0]
    assert straggler["rule"] == "straggler"
    assert straggler["evidence"]["late"] == f"rank {facts['slow_rank']}"
    assert straggler["evidence"]["exposed_waiting_ns"] == pytest.approx(expected_ns, rel=0.3)


def collectives_on_the_host(files: list[Path], slow: int, extra: list[float]) -> None:
    """gloo's collectives are annotations and no kernels, but their times are as real, and both ranks have one clock."""
    members = []
    for rank, file in enumerate(files):
        frames = timeline.load(file).frames
        ran = frames[frames["name"] == "gloo:all_reduce"].sort_values("start_ns")
        members.append(made(rank, ran["start_ns"].to_numpy(), ran["end_ns"].to_numpy()))
    found = ranks.together(members)
    assert found.clocks[1].collectives == len(members[0].collectives) == len(members[1].collectives) >= len(extra)
    assert found.clocks[1].bounds_ns is not None
    low, high = found.clocks[1].bounds_ns
    assert low <= 0 <= high
    later = found.calls[found.calls["key"] > 0]  # in the first, one may wait for the other's profiler
    waited = later.groupby("member")["waiting_ns"].sum()
    assert waited[1 - slow] > 0.5e6 * sum(extra[1:])  # other work on this machine delays the other rank too
    assert waited[1 - slow] > 3 * waited[slow]


def memory_temporary(files: list[Path], expected: dict[str, Any]) -> None:
    facts, (file,) = expected["facts"], files
    if expected["device"] == "cpu":
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        counted = [event["args"] for event in events if event.get("name") == "[memory]"]
        begin = counted[0]["Total Allocated"] - counted[0]["Bytes"]
        peak = max(one["Total Allocated"] for one in counted) - begin
        assert peak == facts["peak_bytes"] - facts["before_bytes"]
        assert facts["temporary_bytes"] in [one["Bytes"] for one in counted]
        return
    found = memory.read(file)
    assert found["baseline_bytes"] == facts["before_bytes"]
    assert found["peak_bytes"] == facts["peak_bytes"]
    (block,) = [one for one in found["temporaries"] if one["bytes"] == facts["temporary_bytes"]]
    assert block["count"] == 1
    assert re.search(rf"memory_temporary\.py:\d+ {facts['temporary_in']}$", block["frames"][0])


CHECKS: dict[str, Callable[[list[Path], dict[str, Any]], None]] = {
    "training_step.py": training_step,
    "graph_replay.py": graph_replay,
    "slow_rank.py": slow_rank,
    "memory_temporary.py": memory_temporary,
}


def unpacked(folder: Path, scratch: Path) -> Iterator[Path]:
    """nsys's exports unpacked, then torch's traces."""
    for packed in sorted(folder.glob("nsys.*.sqlite.gz")):
        file = scratch / packed.name.removesuffix(".gz")
        file.write_bytes(gzip.decompress(packed.read_bytes()))
        yield file
    yield from sorted(folder.glob("*.json.gz"))


def count(trace: Trace, kind: int, name: str) -> int:
    """Frames of this kind with this name, whatever folder the name begins with."""
    frames = trace.frames[trace.frames["kind"] == kind]["name"].astype(str)
    return int((frames.str.rpartition("/")[2] == name).sum() if kind == schema.PYTHON else (frames == name).sum())


def python_function(where: str) -> str:
    """`a.py:8 f` as torch.profiler writes it: `a.py(8): f`."""
    return re.sub(r":(\d+) ", r"(\1): ", where)
