from __future__ import annotations

import gzip
import json
import platform
from pathlib import Path
from typing import Any

import pytest

from worklog.capture import memory_snapshot, torch_profiler
from worklog.capture.paths import relative_text, scrub
from worklog.problem import ProblemError, root

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def traced(file: Path, *, plain: bool) -> tuple[str, list[dict[str, Any]], int]:
    """The trace's text, its events, and how often the work ran."""
    net, x, calls = Net(), torch.ones(2, 8), []

    def run() -> None:
        calls.append(net(x))

    torch_profiler.trace(run, file, plain=plain)
    text = gzip.decompress(file.read_bytes()).decode()
    return text, json.loads(text)["traceEvents"], len(calls)


def test_attribution_pass_has_shapes_modules_and_lines(tmp_path: Path) -> None:
    text, events, calls = traced(tmp_path / "t.json.gz", plain=False)
    assert calls == 2  # the first warms the profiler up and is not in the trace
    linear = [e for e in events if e.get("name") == "aten::linear"]
    assert len(linear) == 1
    assert linear[0]["args"]["Input Dims"][:2] == [[2, 8], [4, 8]]
    python = [e["name"] for e in events if e.get("cat") == "python_function"]
    assert any(name.startswith("nn.Module: Net") for name in python)
    assert any("test_torch_profiler.py(" in name and name.endswith(": forward") for name in python)
    assert str(root()) not in text
    assert platform.node() not in text


def test_plain_pass_has_operators_alone(tmp_path: Path) -> None:
    text, events, _ = traced(tmp_path / "t.json.gz", plain=True)
    assert len([e for e in events if e.get("name") == "aten::linear"]) == 1
    assert {e.get("cat") for e in events} & {"python_function"} == set()
    assert "Input Dims" not in text


def test_same_trace_twice_is_the_same_length_of_events(tmp_path: Path) -> None:
    _, first, _ = traced(tmp_path / "a.json.gz", plain=True)
    _, second, _ = traced(tmp_path / "b.json.gz", plain=True)
    names = [sorted(e["name"] for e in events if e.get("cat") == "cpu_op") for events in (first, second)]
    assert names[0] == names[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_snapshot_without_a_gpu_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="A memory snapshot needs a CUDA GPU"):
        memory_snapshot.snapshot(lambda: None, tmp_path / "m.json.gz")
    assert not (tmp_path / "m.json.gz").exists()


TAKEN: dict[str, Any] = {
    "segments": [{"address": 1, "total_size": 2, "segment_pool_id": (0, 1), "blocks": [{"size": 2, "frames": []}]}],
    "device_traces": [
        [{"action": "alloc", "size": 2, "frames": [{"filename": str(root() / "src" / "x.py"), "line": 3, "name": "f"}]}]
    ],
    "external_annotations": [],
}


def test_snapshot_file_names_files_relative_and_opens_as_the_pickle_of_memory_viz(tmp_path: Path) -> None:
    import pickle

    file, pickled = tmp_path / "m.json.gz", tmp_path / "m.pickle"
    file.write_bytes(memory_snapshot.encode(TAKEN))
    kept = json.loads(gzip.decompress(file.read_bytes()))
    assert set(kept) == {"segments", "device_traces"}
    assert kept["device_traces"][0][0]["frames"] in (
        [{"filename": "src/x.py", "line": 3, "name": "f"}],
        [{"filename": "x.py", "line": 3, "name": "f"}],
    )
    memory_snapshot.to_pickle(file, pickled)
    assert pickle.loads(pickled.read_bytes()) == kept


def test_snapshot_whose_history_was_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_snapshot, "MAX_ENTRIES", 1)
    with pytest.raises(ProblemError, match="capture fewer iterations"):
        memory_snapshot.encode(TAKEN)


def test_paths_of_this_machine_are_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKLOG_ROOT", "/somewhere/checkout")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f'File "{tmp_path}/torch/nn.py", /somewhere/checkout/problems/x.py(3)'
    assert relative_text(text) == 'File "torch/nn.py", problems/x.py(3)'
    said = "see https://pytorch.org/a/b.html and /etc/machine/name.conf, a/b/c and 3/4"
    assert scrub(said) == "see https://pytorch.org/a/b.html and .../name.conf, a/b/c and 3/4"
