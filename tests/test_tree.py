"""`worklog tree`: a real training step on the CPU, recorded captures of a GPU, and a GPU's trace with known answers."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from worklog import cli
from worklog.analysis.views import tree
from worklog.capture import torch_profiler
from worklog.diagnose import diagnose
from worklog.problem import ProblemError

torch = pytest.importorskip("torch")

REPORTS = Path(__file__).resolve().parents[1] / "reports"
Node = dict[str, Any]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + x


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def step(net: Net, x: torch.Tensor) -> None:
    with torch.profiler.record_function("loss of this step"):
        loss = net(x).pow(2).mean()
    loss.backward()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "torch.step.json.gz"
    net, x = Net(), torch.ones(8, 16)
    torch_profiler.trace(lambda: step(net, x), file)
    return file


def line(function: Any) -> str:
    code = function.__code__
    return f"test_tree.py:{code.co_firstlineno} {code.co_name}"


def nodes(node: Node, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """(names from the root's children, node), lines without their folder."""
    for child in node["children"]:
        name = child["name"].rsplit("/", 1)[-1] if child["kind"] == "python" else child["name"]
        path = (*above, name)
        yield path, child
        yield from nodes(child, path)


def below(paths: list[tuple[str, ...]], *names: str) -> set[str]:
    """What follows these names, wherever in a path they follow one another."""
    size = len(names)
    return {p[at + size] for p in paths for at in range(len(p) - size) if p[at : at + size] == names}


def sums_up(node: Node) -> None:
    for metric, whole in node["inclusive"].items():
        assert whole == node["own"][metric] + sum(child["inclusive"][metric] for child in node["children"])
    for child in node["children"]:
        sums_up(child)


def test_operators_of_a_real_step_are_below_their_module_and_line(traced: Path) -> None:
    found = tree(traced, min_share=0)
    assert (found["metric"], found["span_ns"], found["devices"]) == ("cpu", None, [])
    paths = [path for path, _ in nodes(found["tree"])]
    forward, block = line(Net.forward), line(Block.forward)
    assert "loss of this step" in below(paths, line(step))
    assert "Net_0" in below(paths, line(step), "loss of this step")
    assert below(paths, "Net_0") == {forward}
    assert below(paths, "Net_0", forward) == {"Block_0", "Block_1", "Linear_4"}
    for number, linears in ((0, ("Linear_0", "Linear_1")), (1, ("Linear_2", "Linear_3"))):
        inside = below(paths, forward, f"Block_{number}", block)
        assert inside == {*linears, "aten::relu", "aten::add", "ReluBackward0", "AddBackward0"}
        for linear in linears:
            assert below(paths, block, linear) == {"aten::linear", "AddmmBackward0", "TBackward0"}
            assert {"aten::t", "aten::addmm"} <= below(paths, block, linear, "aten::linear")
    assert {"aten::pow", "aten::mean", "PowBackward0", "MeanBackward0"} <= below(paths, "loss of this step")


def test_every_backward_operator_of_a_real_step_joins_and_only_leaves_of_the_graph_stay(traced: Path) -> None:
    found = tree(traced, min_share=0)
    backward = {(path[-2], path[-1]) for path, node in nodes(found["tree"]) if node["kind"] == "backward"}
    assert {name for above, name in backward if above == line(step)} == {"torch::autograd::AccumulateGrad"}
    raw = json.loads(gzip.decompress(traced.read_bytes()))["traceEvents"]
    numbered = [e for e in raw if e.get("args", {}).get("Fwd thread id") and e["name"].startswith("autograd::engine")]
    numbered = [e for e in numbered if "AccumulateGrad" not in e["name"]]
    assert len(numbered) == 5 * 2 + 2 * 2 + 2  # addmm and t of five Linear, relu and add of two Block, pow, mean
    assert found["coverage"]["backward_operators"] == found["coverage"]["backward_operators_joined"] == len(numbered)


def test_own_times_of_a_real_step_are_those_of_its_outermost_operators(traced: Path) -> None:
    found = tree(traced, min_share=0)
    sums_up(found["tree"])
    raw = json.loads(gzip.decompress(traced.read_bytes()))["traceEvents"]
    events = [(e["ts"], e["ts"] + e["dur"]) for e in raw if e.get("cat") == "cpu_op"]
    outer = [e for e in events if not any(o != e and o[0] <= e[0] and e[1] <= o[1] for o in events)]
    assert 0 < len(outer) < len(events)
    expected = sum(end - start for start, end in outer) * 1e3
    assert found["total"]["cpu_ns"] == pytest.approx(expected, abs=2 * len(events))  # times are rounded
    whole = {name: sum(node["own"]["cpu_ns"] for _, node in nodes(tree(traced, name, min_share=0)["tree"]))
             for name in ("top-down", "bottom-up")}  # fmt: skip
    assert set(whole.values()) == {found["total"]["cpu_ns"]}


def forks(node: dict[str, Any]) -> int:
    """At most how many nodes with several children lie on a way down: an only child is no level of its own."""
    return (len(node["children"]) > 1) + max(map(forks, node["children"]), default=0)


def test_range_fold_depth_and_share_of_a_real_step(traced: Path) -> None:
    inside = tree(traced, range_name="loss of this step", min_share=0)
    assert not [node for _, node in nodes(inside["tree"]) if node["kind"] == "backward"]
    assert 0 < inside["total"]["cpu_ns"] < tree(traced)["total"]["cpu_ns"]
    folded = [path for path, _ in nodes(tree(traced, min_share=0, fold=True)["tree"])]
    assert below(folded, "Net", line(Net.forward)) == {"Block", "Linear"}
    cut = tree(traced, min_share=0, depth=2)
    sums_up(cut["tree"])
    assert forks(cut["tree"]) == 2 < forks(tree(traced, min_share=0)["tree"])
    assert any(node["kind"] == "deeper" for _, node in nodes(cut["tree"]))
    pruned = tree(traced, min_share=0.2)
    sums_up(pruned["tree"])
    least = 0.2 * pruned["total"]["cpu_ns"]
    shown = [node for _, node in nodes(pruned["tree"]) if node["kind"] != "others"]
    assert all(node["inclusive"]["cpu_ns"] >= least for node in shown)
    assert any(node["kind"] == "others" for _, node in nodes(pruned["tree"]))


def test_flat_tables_of_a_real_step(traced: Path) -> None:
    found = tree(traced, "flat", min_share=0, fold=True)
    modules = {node["name"]: node for node in found["tables"]["modules"]}
    assert set(modules) == {"Net", "Net.Block", "Net.Block.Linear", "Net.Linear"}
    net, parts = modules.pop("Net"), sum(node["own"]["cpu_ns"] for name, node in modules.items() if name != "Net")
    assert net["inclusive"]["cpu_ns"] == net["own"]["cpu_ns"] + parts
    operators = {node["name"]: node for node in found["tables"]["operators"]}
    assert sum(node["own"]["cpu_ns"] for node in operators.values()) == found["total"]["cpu_ns"]
    assert operators["aten::linear"]["inclusive"]["cpu_ns"] > operators["aten::addmm"]["own"]["cpu_ns"]
    lines = {node["name"].rsplit("/", 1)[-1]: node for node in found["tables"]["lines"]}
    assert lines[line(step)]["inclusive"]["cpu_ns"] <= found["total"]["cpu_ns"]
    assert lines[line(Block.forward)]["own"]["cpu_ns"] == modules["Net.Block"]["inclusive"]["cpu_ns"]


def test_what_a_checkpoint_computes_again_is_below_the_backward_operator_that_asked(tmp_path: Path) -> None:
    class Saving(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)

    net, x = Saving(), torch.ones(8, 16, requires_grad=True)
    torch_profiler.trace(lambda: net(x).sum().backward(), tmp_path / "torch.saving.json.gz")
    found = tree(tmp_path / "torch.saving.json.gz", min_share=0)
    paths = [path for path, _ in nodes(found["tree"])]
    again = ("Saving_0", line(Saving.forward), "CheckpointFunctionBackward", "Block_0", line(Block.forward))
    assert {"Linear_0", "Linear_1", "ReluBackward0"} <= below(paths, *again)
    assert {"aten::linear", "AddmmBackward0"} <= below(paths, *again, "Linear_0")
    assert found["coverage"]["backward_operators"] == found["coverage"]["backward_operators_joined"] > 0


def recorded(slug: str) -> Path:
    found = sorted(REPORTS.glob(f"float8_weight_only/*-h200-*/nsys.{slug}.sqlite"))
    if not found:
        pytest.skip(f"no capture of {slug} is recorded")
    return found[-1]


@pytest.mark.parametrize("view", ["top-down", "bottom-up"])
@pytest.mark.parametrize("slug", ["bf16_eager", "torchao_0_13_0_eager"])
def test_recorded_captures_sum_to_sql_and_to_the_accounting(slug: str, view: Any) -> None:
    file = recorded(slug)
    found = tree(file, view, min_share=0)
    sums_up(found["tree"])
    (device,) = diagnose(file)["devices"]
    parts = device["accounting_ns"]
    with closing(sqlite3.connect(file)) as database:
        sums = {
            table: database.execute(f'SELECT COUNT(*), SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_{table}').fetchone()
            for table in ("KERNEL", "MEMCPY", "MEMSET")
        }
        launches = database.execute(
            "SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId "
            "WHERE s.value LIKE 'cu%Launch%'"
        ).fetchone()[0]
    own = {metric: sum(node["own"][metric] for _, node in nodes(found["tree"])) for metric in found["total"]}
    assert found["span_ns"] == device["span_ns"]
    assert own == found["total"] == {
        "kernel_ns": sums["KERNEL"][1],
        "copy_ns": sums["MEMCPY"][1] + sums["MEMSET"][1],
        "idle_ns": parts["launch"] + parts["host"] + parts["sync"],
        "launches": launches,
        "activities": sum(count for count, _ in sums.values()),
    }  # fmt: skip
    ranges = [path for path, node in nodes(found["tree"]) if node["kind"] == "range"]
    assert {path[-1] for path in ranges} == {slug}


def event(cat: str, name: str, at: float, dur: float, tid: int = 1, **args: Any) -> Node:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args}


def call(name: str, at: float, dur: float, correlation: int, tid: int = 1) -> Node:
    return event("cuda_runtime", name, at, dur, tid, correlation=correlation)


def ran(cat: str, name: str, at: float, dur: float, correlation: int) -> Node:
    return event(cat, name, at, dur, 7, correlation=correlation, device=0, stream=7)


STEP = [
    event("python_function", "train.py(33): main", 0, 1000),
    event("python_function", "resnet.py(564): _apply", 5, 90),
    event("cpu_op", "aten::to", 10, 80),
    event("cpu_op", "aten::copy_", 15, 70),
    call("cudaMemcpyAsync", 20, 60, 1),
    ran("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 40, 1),
    event("python_function", "nn.Module: ResNet_0", 100, 100),
    event("python_function", "nn.Module: Conv2d_0", 110, 30),
    event("cpu_op", "aten::conv2d", 111, 28, **{"Sequence number": 7, "Fwd thread id": 0}),
    call("cudaLaunchKernel", 120, 5, 2),
    ran("kernel", "void conv<float>(float*)", 130, 20, 2),
    event("python_function", "nn.Module: Conv2d_1", 150, 30),
    call("cudaLaunchKernel", 160, 5, 3),
    ran("kernel", "void conv<float>(float*)", 170, 30, 3),
    event(
        "cpu_op",
        "autograd::engine::evaluate_function: ConvolutionBackward0",
        300,
        50,
        2,
        **{"Sequence number": 7, "Fwd thread id": 1},
    ),
    call("cudaLaunchKernel", 310, 5, 4, 2),
    ran("kernel", "dgrad", 320, 40, 4),
    event("user_annotation", "replay", 400, 100),
    call("cudaGraphLaunch", 410, 5, 5),
    ran("kernel", "fused", 420, 10, 5),
    ran("kernel", "\x1b[2Jother[red]", 430, 10, 5),
]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    file = tmp_path / "step.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": STEP}).encode()))
    return file


def run(*argv: str) -> str:
    result = CliRunner().invoke(cli.app, ["tree", *argv])
    assert result.exit_code == 0, result.exception
    return result.stdout


def test_text_from_above_shows_kernel_time_by_module_with_the_backward(trained: Path) -> None:
    out = run(str(trained))
    assert "GPU 0: span 420 us; kernels: 110 us, 26.2% of the span; callers above" in out
    rows = [text.rstrip() for text in out.splitlines()]
    start = next(at for at, text in enumerate(rows) if "all kernels" in text)
    assert rows[start : start + 10] == [
        " 26.2%  110 us ██████████ all kernels",
        " 26.2%  110 us ██████████ └─ train.py:33 main",
        " 21.4%   90 us ████████▏     ├─ ResNet_0",
        " 14.3%   60 us █████▌        │  ├─ Conv2d_0",
        "  9.5%   40 us ███▋          │  │  ├─ ConvolutionBackward0 (backward) → cudaLaunchKernel → dgrad",
        "  4.8%   20 us █▉            │  │  └─ aten::conv2d → cudaLaunchKernel → conv",
        "  7.1%   30 us ██▊           │  └─ Conv2d_1 → cudaLaunchKernel → conv",
        "  4.8%   20 us █▉            └─ replay → cudaGraphLaunch",
        "  2.4%   10 us ▉                ├─ \N{REPLACEMENT CHARACTER}[2Jother[red]",
        "  2.4%   10 us ▉                └─ fused",
    ]
    assert "Kernels of a CUDA graph hang below its launch" in out
    assert "Of 1 backward operators 1 stand in the place of their forward one." in out
    assert "\x1b" not in out


def test_text_from_below_finds_a_copy_at_the_line_that_made_it(trained: Path) -> None:
    out = run(str(trained), "--view", "bottom-up", "--metric", "copy")
    (row,) = [text for text in out.splitlines() if "Memcpy" in text]
    assert "9.5%   40 us" in row
    assert "Memcpy HtoD (Pageable -> Device) ← cudaMemcpyAsync ← aten::copy_ ← aten::to" in row
    assert "resnet.py:564 _apply ← train.py:33 main" in out


def test_text_of_idle_time_launches_and_tables(trained: Path) -> None:
    out = run(str(trained), "--metric", "idle", "--depth", "3")
    # [20, 30), [70, 130), [150, 170), [200, 320), [360, 420)
    assert "idle time with a cause: 270 us, 64.3% of the span" in out
    assert "Python stacks were recorded" in out
    out = run(str(trained), "--metric", "launches", "--view", "flat")
    assert "launches: 4; flat" in out
    assert "ResNet_0.Conv2d_0" in out
    assert "resnet.py" not in out  # it launched no kernel
    out = run(str(trained), "--metric", "cpu")
    assert "operators on the CPU: 158 us" in out  # 80 + 28 + 50


def test_two_devices_are_one_tree(tmp_path: Path) -> None:
    second = [call("cudaLaunchKernel", 162, 5, 90), ran("kernel", "conv1", 170, 30, 90)]
    second[1]["args"]["device"] = 1
    file = tmp_path / "two.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*STEP, *second]}))
    found = tree(file)
    assert (found["devices"], found["span_ns"]) == ([0, 1], 420_000 + 38_000)
    assert found["total"]["idle_ns"] == 270_000 + 8_000
    assert "The span is the sum of the GPUs' spans." in run(str(file))


def test_json_alone_on_stdout_with_its_keys(trained: Path) -> None:
    found = json.loads(run(str(trained), "--json", "--range", "replay"))
    assert found == tree(trained, range_name="replay")
    assert list(found) == [
        *("source", "view", "metric", "range", "depth", "min_share", "fold"),
        *("devices", "span_ns", "total", "tree", "coverage"),
    ]
    assert found["total"] == {"kernel_ns": 20_000, "copy_ns": 0, "idle_ns": 10_000, "launches": 1, "activities": 2}
    assert list(found["tree"]) == ["name", "kind", "inclusive", "own", "children"]
    flat = json.loads(run(str(trained), "--json", "--view", "flat"))
    assert list(flat["tables"]) == ["ranges", "modules", "lines", "operators", "calls", "activities"]


def test_deep_recursion_is_cut_and_long_chains_go_on_in_the_next_line(tmp_path: Path) -> None:
    deep = [event("python_function", f"walk.py({at}): walk", at, 10_000 - 2 * at) for at in range(1, 501)]
    deep += [call("cudaLaunchKernel", 600, 5, 1), ran("kernel", "leaf", 700, 50, 1)]
    file = tmp_path / "deep.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": deep}))
    out = run(str(file))
    assert "Deeper than 200 levels nothing is shown." in out
    assert "leaf" not in out
    assert out.count("50 us ██████████") == 2  # all kernels, and the one chain
    assert max(map(len, out.splitlines())) <= 120
    names = out.replace("\n", " ").split(" → ")
    assert "walk.py:1 walk" in names[0]
    assert len(names) == 200
    assert "leaf ← cudaLaunchKernel ← walk.py:500 walk" in run(str(file), "--view", "bottom-up")
    sums_up(json.loads(run(str(file), "--json"))["tree"])


def test_what_cannot_be_shown(trained: Path, tmp_path: Path, traced: Path) -> None:
    assert "No kernels here. The trace holds no work of a GPU; --metric cpu" in run(str(traced), "--metric", "kernel")
    with pytest.raises(ProblemError, match="has no NVTX range 'nothing'; its ranges: replay"):
        tree(trained, range_name="nothing")
    with pytest.raises(ProblemError, match="has no NVTX range 'nothing'"):
        tree(traced, range_name="nothing")
    snapshot = tmp_path / "m.json"
    snapshot.write_text(json.dumps({"segments": [], "device_traces": []}))
    with pytest.raises(ProblemError, match="is a memory snapshot and has no timeline"):
        tree(snapshot)
