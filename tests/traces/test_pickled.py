"""Pickles: plain data comes out as pickle would give it; nothing else does, and nothing is ever run."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import pickle
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from worklog import cli
from worklog.diagnose import diagnose
from worklog.problem import ProblemError
from worklog.traces import files, memory
from worklog.traces.pickled import NotPlainError, plain

RECORDED = sorted((Path(__file__).resolve().parents[2] / "reports").glob("*/*/memory.*.json.gz"))
ODD = [0, 255, 256, -1, 65535, 2**31 - 1, -(2**31), 2**32, 2**64 - 1, -(2**63), 0.1, -0.0, math.inf, True, None]
VALUES: Any = {
    "numbers": ODD,
    "texts": ["", "é", "\ud800", "x" * 255, "x" * 256, "x" * 70_000, "\x1b[2J\n"],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "nested": {"a": {"b": [[]], 1: {}, None: 2, False: 3, 2.5: 4}},
    "many": [{"n": n} for n in range(3000)],
}
VALUES["shared"] = [VALUES["nested"]] * 3


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_what_pickle_gives(protocol: int) -> None:
    raw = pickle.dumps(VALUES, protocol)
    assert repr(plain(raw)) == repr(pickle.loads(raw)) == repr(VALUES)


def test_a_list_in_itself_is_read() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = plain(pickle.dumps(loop))
    assert found[1] is found


@pytest.fixture(scope="module")
def snapshot() -> dict[str, Any]:
    if not RECORDED:
        pytest.skip("no memory snapshot is recorded")
    found: dict[str, Any] = json.loads(gzip.decompress(RECORDED[-1].read_bytes()))
    return found


def share(taken: dict[str, Any]) -> dict[str, Any]:
    """Stacks and frames that are equal are one object, as in what torch pickles; a tuple and a pool as it has them."""
    frames: dict[str, Any] = {}
    stacks: dict[str, Any] = {}
    for at in [e for events in taken["device_traces"] for e in events] + [
        b for s in taken["segments"] for b in s["blocks"]
    ]:
        own = [frames.setdefault(json.dumps(frame), frame) for frame in at["frames"]]
        at["frames"] = stacks.setdefault(json.dumps(own), own)
    return {**taken, "external_annotations": []} | {
        "segments": [{**s, "segment_pool_id": (0, 0)} for s in taken["segments"]]
    }


@pytest.mark.parametrize("packed", [False, True])
def test_a_recorded_snapshot_says_the_same_as_a_pickle(tmp_path: Path, snapshot: dict[str, Any], packed: bool) -> None:
    raw = pickle.dumps(share(snapshot))
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(gzip.compress(raw) if packed else raw)
    assert files.kind(file) == "memory"
    found = memory.read(file)
    assert found == memory.read(RECORDED[-1])
    assert found["peak_bytes"] > found["baseline_bytes"] > 0
    assert sum(row["bytes"] for row in found["largest"]) == found["peak_bytes"]
    del found["timeline"]
    assert diagnose(file)["memory"] == found


MARKER = "worklog_hostile_pickle_ran"


def note(*_: Any) -> None:
    """What a hostile pickle would call."""
    os.environ[MARKER] = "1"


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def extended() -> bytes:
    """An object by its number in copyreg's registry."""
    import copyreg

    copyreg.add_extension("builtins", "eval", 240)
    try:
        return pickle.dumps({"segments": eval}, 2)
    finally:
        copyreg.remove_extension("builtins", "eval", 240)


def persistent() -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return "somewhere" if obj is note else None

    out = io.BytesIO()
    Pickler(out).dump({"segments": note})
    return out.getvalue()


def doubled(levels: int) -> bytes:
    """Puts on the stack a tuple of which each level holds the one below twice."""
    return b")\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(levels))


HOSTILE = {
    "a call": pickle.dumps({"segments": Calls(note)}),
    "os.system": pickle.dumps(Calls(os.system, f"echo {MARKER}")),
    "builtins.eval": pickle.dumps({"device_traces": Calls(eval, "__import__('os')"), "segments": []}, 2),
    "getattr": pickle.dumps([Calls(getattr, note, "__globals__")], 5),
    "a class": pickle.dumps({"segments": Path("/")}),
    "a bare name": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "after a stop": pickle.dumps({"device_traces": 1, "segments": 1}) + pickle.dumps(Calls(note)),
    "an extension": extended(),
    "a persistent id": persistent(),
    "a set": pickle.dumps({"segments": {1}}),
    "bytes": pickle.dumps({"segments": b"1"}),
    "a memo of 2**32 places": b"\x80\x02}r\xfe\xff\xff\xff.",
    "a text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "an integer longer than the file": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.",
    "a key whose hash takes 2**60 steps": b"\x80\x04}" + doubled(60) + b"Ns.",
    "an address whose hash takes 2**60 steps": b"\x80\x04"
    + doubled(60)
    + b"}(\x8c\x08segments]\x8c\x0ddevice_traces]]}(\x8c\x06action\x8c\x05alloc\x8c\x04addrh\x3cuaau.",
    "a hundred thousand levels": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nothing": b"\x80\x04.",
    "cut off": pickle.dumps(VALUES)[:-9],
    "a pop below the stack": b"\x80\x04e.",
    "an append to text": b"\x80\x04\x8c\x01aK\x01a.",
    "no snapshot": pickle.dumps({"weights": [1.0]}),
}


RUNS = ("pickle.find_class", "os.system", "subprocess.Popen", "import", "exec", "compile")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plain.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    memory.read(file)  # what is imported late is there from now on
    file.write_bytes(HOSTILE[name])
    monkeypatch.delenv(MARKER, raising=False)
    ran: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, _: ran.append(event) if watching and event in RUNS else None)
    start = time.perf_counter()
    try:
        with pytest.raises(ProblemError):
            memory.read(file)
    finally:
        watching.clear()
    assert (ran, os.environ.get(MARKER)) == ([], None)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_one_sentence_and_exit_2(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(HOSTILE[name])
    monkeypatch.setattr("sys.argv", ["worklog", "diagnose", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capfd.readouterr()
    assert left.value.code == 2
    assert err.startswith(f"worklog: {file}: ")
    assert (err.count("\n"), out) == (1, "")


def test_what_the_hook_looks_for_does_happen_when_pickle_reads_it() -> None:
    pickle.loads(HOSTILE["a call"])
    assert os.environ.pop(MARKER) == "1"


def test_shared_parts_cost_their_length_once(tmp_path: Path) -> None:
    stack = [{"filename": "a.py", "line": 1, "name": "f" * 1000}] * 100_000
    shared = {"action": "alloc", "addr": 1, "size": 2, "frames": stack}
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"device_traces": [[shared] * 100_000] * 1000, "segments": []}))
    start = time.perf_counter()
    assert memory.read(file)["peak_bytes"] == 2
    assert time.perf_counter() - start < 20
    blocks = [{"size": 1, "state": "active_allocated"}] * 10_000
    segments = [{"device": 0, "address": n, "blocks": blocks} for n in range(10_000)]
    file.write_bytes(pickle.dumps({"device_traces": [], "segments": segments}))
    with pytest.raises(ProblemError, match="holds more blocks than it has bytes"):
        memory.read(file)


def test_a_peak_that_rises_again_and_again_takes_linear_time(tmp_path: Path) -> None:
    events = []
    for n in range(60_000):  # two come, one goes
        events += [{"action": "alloc", "addr": 2 * n + m, "size": 1, "frames": []} for m in (0, 1)]
        events.append({"action": "free_requested", "addr": 2 * n, "size": 1, "frames": []})
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"device_traces": [events], "segments": []}))
    start = time.perf_counter()
    found = memory.read(file)
    assert time.perf_counter() - start < 20
    assert found["peak_bytes"] == 60_001
    assert found["largest"] == [{"bytes": 60_001, "count": 60_001, "frames": []}]


def test_bytes_changed_anywhere_give_data_or_a_reason() -> None:
    raw, seeded = pickle.dumps(VALUES["nested"]) + pickle.dumps(ODD), random.Random(3)
    for _ in range(3000):
        changed = bytearray(raw)
        for _ in range(seeded.randint(1, 4)):
            changed[seeded.randrange(2, len(raw))] = seeded.randrange(256)
        with contextlib.suppress(NotPlainError):
            plain(bytes(changed))
