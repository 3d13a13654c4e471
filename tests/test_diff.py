"""`worklog diff`: recorded captures, small traces with known answers, and pairs that cannot be compared."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from worklog import cli
from worklog.diagnose import diagnose
from worklog.diff import diff
from worklog.problem import ProblemError
from worklog.render.diff import CELLS, Axis, exact
from worklog.traces.hardware import gpus

REPORTS = Path(__file__).resolve().parents[1] / "reports"
BF16, TORCHAO = "bf16_eager", "torchao_0_13_0_eager"


def recorded(slug: str) -> Path:
    found = sorted(REPORTS.glob(f"float8_weight_only/*-h200-*/nsys.{slug}.sqlite"))
    if not found:
        pytest.skip(f"no capture of {slug} is recorded")
    return found[-1]


def test_recorded_pair_adds_up_to_the_change_of_the_diagnosed_spans() -> None:
    before, after = recorded(BF16), recorded(TORCHAO)
    found = diff(before, after, BF16, TORCHAO)
    spans = [diagnose(file, slug)["devices"][0] for file, slug in ((before, BF16), (after, TORCHAO))]
    assert (found["before_ns"], found["after_ns"]) == tuple(span["span_ns"] for span in spans)
    assert sum(term["ns"] for term in found["terms"]) == found["delta_ns"] == found["after_ns"] - found["before_ns"]
    for part in spans[0]["accounting_ns"]:
        change = spans[1]["accounting_ns"][part] - spans[0]["accounting_ns"][part]
        assert sum(term["ns"] for term in found["terms"] if term["part"] == part) == change
    # One occurrence of a range around three iterations: no spread.
    assert {term["within_noise"] for term in found["terms"]} == {None}
    assert found["before"]["gpu"] == found["after"]["gpu"] == "NVIDIA H200"
    assert found["warnings"] == found["abstained"] == []


def test_recorded_pair_says_what_torchao_0_13_0_does_and_sql_says_the_same() -> None:
    """It dequantises every weight again for each token: kernels that bf16 has not, on shapes of the weights."""
    found = diff(recorded(BF16), recorded(TORCHAO))
    added = [term for term in found["terms"] if term["kind"] == "added"]
    assert sum(term["ns"] for term in added) > found["delta_ns"] > 30_000_000
    kernel = "CUPTI_ACTIVITY_KIND_KERNEL"
    query = (
        f'SELECT s.value, COUNT(*), SUM(k."end" - k.start) FROM {kernel} k JOIN StringIds s ON s.id = k.demangledName '
        "GROUP BY s.value, gridX, gridY, gridZ, blockX, blockY, blockZ"
    )
    sides = []
    for slug in (BF16, TORCHAO):
        with closing(sqlite3.connect(recorded(slug))) as database:
            sides.append(sorted(database.execute(query).fetchall()))
    rows = [row for row in sides[1] if row not in sides[0]]
    for term in added:
        assert (term["name"], term["after"]["count"], term["after"]["ns"]) in rows
        assert term["before"] is None


def test_recorded_pair_the_other_way_round_and_with_itself() -> None:
    one, two = diff(recorded(BF16), recorded(TORCHAO)), diff(recorded(TORCHAO), recorded(BF16))
    assert one["delta_ns"] == -two["delta_ns"]
    assert sorted(term["ns"] for term in one["terms"]) == sorted(-term["ns"] for term in two["terms"])
    same = diff(recorded(BF16), recorded(BF16))
    assert (same["delta_ns"], same["terms"]) == (0, [])


def event(cat: str, name: str, at: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args}


def call(name: str, at: float, dur: float, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", name, at, dur, correlation=correlation)


def ran(name: str, at: float, dur: float, correlation: int, device: int = 0, **args: Any) -> dict[str, Any]:
    return event("kernel", name, at, dur, 7, correlation=correlation, device=device, stream=7, **args)


def steps(gemm: list[float], late: float = 0.0, device: int = 0) -> list[dict[str, Any]]:
    """Steps of 100 us: a launch at 10; gemm from 20 on, so long; relu is asked for 5 + late after it."""
    events = []
    for step, length in enumerate(gemm):
        at, end = 100.0 * step, 100.0 * step + 20 + length
        events += [event("user_annotation", f"ProfilerStep#{step}", at, 99)]
        events += [
            call("cudaLaunchKernel", at + 10, 2, 2 * step + 1),
            ran("gemm", at + 20, length, 2 * step + 1, device),
        ]
        events += [call("cudaLaunchKernel", end + 5 + late, 2, 2 * step + 2)]
        events += [ran("relu", end + 9 + late, 3, 2 * step + 2, device, grid=[4, 1, 1], block=[32, 1, 1])]
    return events


def kineto(file: Path, events: list[dict[str, Any]], gpu: str | None = "NVIDIA H200") -> Path:
    devices = {"deviceProperties": [{"id": 0, "name": gpu}]} if gpu else {}
    content = json.dumps({"schemaVersion": 1, **devices, "traceEvents": events}).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def test_steps_of_torch_profiler_are_the_occurrences_and_give_the_spread(tmp_path: Path) -> None:
    before = kineto(tmp_path / "before.json", steps([40, 41, 40]))
    after = kineto(tmp_path / "after.json.gz", steps([30, 31], late=2.5))
    found = diff(before, after)
    assert (found["before"]["range"], found["before"]["occurrences"], found["after"]["occurrences"]) == (
        "ProfilerStep",
        3,
        2,
    )
    # A step: launch 10, gemm, 5 + late of the host, 4 of launch, relu 3.
    assert (found["before_ns"], found["after_ns"]) == (62_333, 55_000)
    # gemm's mean is 40 333.33 ns before: the running sum takes it down.
    assert {(term["kind"], term["name"]): term["ns"] for term in found["terms"]} == {
        ("faster", "gemm"): -9_833,
        ("idle", "host"): 2_500,
    }
    assert [term["within_noise"] for term in found["terms"]] == [False, False]
    assert found["terms"][1]["spread_ns"] == 0
    whole = diff(before, after, "ProfilerStep#1")
    assert (whole["before_ns"], whole["after_ns"]) == (63_000, 55_500)
    assert whole["spread_ns"] is None


def test_without_steps_whole_traces_are_compared_and_that_is_said(tmp_path: Path) -> None:
    events = [one for one in steps([40]) if one["cat"] != "user_annotation"]
    file = kineto(tmp_path / "a.json", events)
    found = diff(file, kineto(tmp_path / "b.json", steps([50])))
    assert found["delta_ns"] == 10_000
    assert found["before"]["range"] is None
    assert found["warnings"][0].endswith("name a range of one with --range (and --range-after).")
    ranged = [*events, event("user_annotation", "forward", 0, 99)]
    found = diff(kineto(tmp_path / "c.json", ranged), kineto(tmp_path / "d.json", ranged))
    assert found["warnings"][0].endswith("name a range of both with --range: forward.")


def test_what_is_not_alike_is_said(tmp_path: Path) -> None:
    before = kineto(tmp_path / "a.json", steps([40]))
    stacks = [*steps([40]), event("python_function", "train.py(1): step", 0, 99)]
    after = kineto(tmp_path / "b.json", stacks, "NVIDIA GeForce RTX 4090")
    machines, recorded_stacks = diff(before, after)["warnings"]
    assert machines.startswith("Before ran on NVIDIA H200, after on NVIDIA GeForce RTX 4090")
    assert recorded_stacks.startswith("Stacks were recorded after alone")
    assert diff(before, kineto(tmp_path / "c.json", steps([40]), None))["warnings"] == []
    tools = diff(before, recorded(BF16))["warnings"]
    assert tools[0].startswith("Before was traced by torch.profiler, after by nsys")


def test_replays_without_rows_make_kernels_abstain_and_the_sum_still_holds(tmp_path: Path) -> None:
    before = kineto(tmp_path / "a.json", steps([40]))
    replay = [*steps([30]), call("cudaGraphLaunch", 52, 1, 77)]
    found = diff(before, kineto(tmp_path / "b.json", replay))
    assert found["abstained"][0]["reason"].startswith("1 replays of CUDA graphs after left no row of GPU activity")
    assert "--cuda-graph-trace=node" in found["abstained"][0]["reason"]
    assert {(term["kind"], term["part"]): term["ns"] for term in found["terms"]} == {
        ("busy", "busy"): -10_000,
        ("idle", "host"): -9_000,
        ("idle", "unexplained"): 9_000,
    }
    assert sum(term["ns"] for term in found["terms"]) == found["delta_ns"] == -10_000


def test_graphs_in_one_piece_against_nodes(tmp_path: Path) -> None:
    files = []
    for name, table in (("piece", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"), ("nodes", "CUPTI_ACTIVITY_KIND_KERNEL")):
        files.append(tmp_path / f"{name}.sqlite")
        with closing(sqlite3.connect(files[-1])) as database, database:
            database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "cudaGraphLaunch_v10000")])
            database.execute(
                f"CREATE TABLE {table} (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                "correlationId INTEGER, demangledName INTEGER)"
            )
            database.execute(f"INSERT INTO {table} VALUES (10, 50, 0, 7, 1, 1)")
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
                "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
            )
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 5, 1, 1, 2)")
    found = diff(*files)
    assert "before were traced as one piece, after kernels one by one" in found["abstained"][0]["reason"]
    assert found["terms"] == []
    same = diff(files[0], files[0])
    assert same["abstained"] == []
    assert gpus(files[0]) == {}


def test_kernels_of_two_tools_go_by_the_words_of_their_names(tmp_path: Path) -> None:
    """As nsys and Kineto spell them: template arguments, an anonymous namespace, the parameters."""
    spelled = {
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float, float, "
        "at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)3>>(int, T2, T3)": (
            "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
            "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor"
            "<float, float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)"
        ),
        "void <unnamed>::softmax_warp_forward<float, float, float, (int)8, (bool)0, (bool)0>(T2 *, const T1 *, int)": (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float "
            "const*, int)"
        ),
    }
    file = tmp_path / "nsys.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate([*spelled, "cudaLaunchKernel"])))
        grid = ", ".join(f"{name}{axis} INTEGER" for name in ("grid", "block") for axis in "XYZ")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
            f"correlationId INTEGER, demangledName INTEGER, {grid})"
        )
        rows = [(10_000 * (n + 1), 10_000 * (n + 2), 0, 7, n + 1, n, 4, 1, 1, 32, 1, 1) for n in range(2)]
        database.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 12)})", rows)
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
            "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
        )
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 5, 1, ?, 2)", [(1,), (2,)])
    events = [call("cudaLaunchKernel", 0, 0.005, n + 1) for n in range(2)]
    for n, name in enumerate(spelled.values()):
        events.append(ran(name, 10 * (n + 1), 10 + 5 * n, n + 1, grid=[4, 1, 1], block=[32, 1, 1]))
    found = diff(file, kineto(tmp_path / "torch.json", events))
    (term,) = found["terms"]
    assert (term["kind"], term["ns"], term["matched_by"]) == ("slower", 5_000, "exact")
    assert [term["before"]["name"], term["after"]["name"]] == list(list(spelled.items())[1])
    assert "so they go by the words of their names" in found["warnings"][0]


def test_devices_are_compared_one_by_one(tmp_path: Path) -> None:
    both = [*steps([40]), *steps([60], device=1)]
    for number, one in enumerate(both):
        both[number] = one | {
            "args": one["args"] | {"correlation": one["args"].get("correlation", -1) + number // 5 * 10}
        }
    more = [*steps([45]), *steps([50], device=1)]
    for number, one in enumerate(more):
        more[number] = one | {
            "args": one["args"] | {"correlation": one["args"].get("correlation", -1) + number // 5 * 10}
        }
    before, after = kineto(tmp_path / "a.json", both), kineto(tmp_path / "b.json", more)
    found = diff(before, after)
    assert [(one["before_device"], one["delta_ns"]) for one in found["devices"]] == [(0, 5_000), (1, -10_000)]
    assert all(sum(term["ns"] for term in one["terms"]) == one["delta_ns"] for one in found["devices"])
    assert (found["device"], found["delta_ns"]) == (1, -10_000)  # it is the longer one
    alone = diff(before, kineto(tmp_path / "c.json", steps([50], device=1)))
    assert (alone["device"], alone["delta_ns"]) == (1, -10_000)
    assert alone["warnings"][0] == "GPU 0 is in the trace before alone: it is left out."
    other = diff(kineto(tmp_path / "d.json", steps([40])), kineto(tmp_path / "c.json", steps([50], device=1)))
    assert other["delta_ns"] == 10_000
    with pytest.raises(ProblemError, match=r"GPUs \[0, 1\].*GPUs \[3\]: which are to be compared"):
        diff(before, kineto(tmp_path / "e.json", steps([50], device=3)))


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["diff", *argv])
    return result.exit_code, result.stdout


def number(text: str) -> int:
    return int(text.replace(",", "").replace(".", ""))


def printed(out: str) -> tuple[int, list[int], int]:
    """before, terms, after: nanoseconds as they stand in the table."""
    found = [
        (line.split()[0], number(re.findall(r"[+-]?[\d,]+\.\d{3}\b", line)[0]))
        for line in out.splitlines()
        if re.match(r"(before|after|added|removed|slower|faster|hidden|exposed|copy|memset|idle|busy|others) ", line)
        and not line.split(":")[0].endswith((".sqlite", ".json", ".gz"))
        and re.search(r"[\d,]+\.\d{3}\b", line)
    ]
    assert (found[0][0], found[-1][0]) == ("before", "after")
    return found[0][1], [ns for _, ns in found[1:-1]], found[-1][1]


def test_numbers_as_printed_add_up() -> None:
    code, out = run(str(recorded(BF16)), str(recorded(TORCHAO)), "--range", BF16, "--range-after", TORCHAO)
    assert code == 0
    before, terms, after = printed(out)
    assert before + sum(terms) == after
    assert 3 < len(terms) < 14
    sums = next(line for line in out.splitlines() if line.startswith("kernels "))
    assert sum(number(text) for text in re.findall(r"[+-][\d,]+\.\d{3}", sums)) == after - before
    assert "One occurrence on each side: no spread is known" in out


def test_spread_noise_and_foreign_names_in_a_terminal(tmp_path: Path) -> None:
    hostile = [one | {"name": "\x1b[2Jgemm\n[red]<b>"} if one["name"] == "gemm" else one for one in steps([40, 44, 40])]
    more = [one | {"name": "\x1b[2Jgemm\n[red]<b>"} if one["name"] == "gemm" else one for one in steps([41, 43, 42])]
    code, out = run(str(kineto(tmp_path / "a.json", hostile)), str(kineto(tmp_path / "b.json", more)))
    assert code == 0
    assert "\x1b" not in out
    assert "[red]" in out
    assert (
        "One occurrence: the mean of 3 before and of 3 after. +-: 95 % interval over the occurrences; ~: within it"
        in out
    )
    # Variances 16/3 and 1 of three samples each: 2.72 degrees of freedom, 4.3027 * sqrt(19 / 9).
    assert "GPU 0: 63.333 us -> 64 us, 0.667 us more (+- 6.2516 us, within noise), 1.01 times as long" in out


def test_kernels_by_module_add_up(tmp_path: Path) -> None:
    def inside(gemm: float, relu: float) -> list[dict[str, Any]]:
        """gemm is launched in Net.Linear, relu in Net.ReLU, another kernel in no module."""
        events = [call("cudaLaunchKernel", at, 1, n) for n, at in enumerate((10, 20, 40), start=1)]
        times = [("gemm", gemm), ("relu", relu), ("adam", 7)]
        events += [ran(name, 100 * n, ns, n) for n, (name, ns) in enumerate(times, start=1)]
        spans = [("Net_0", 5, 30), ("Linear_0", 8, 7), ("ReLU_0", 18, 7)]
        return events + [event("python_function", f"nn.Module: {name}", at, dur) for name, at, dur in spans]

    files = kineto(tmp_path / "a.json", inside(40, 3)), kineto(tmp_path / "b.json", inside(30, 5.5))
    _, out = run(*map(str, files))
    assert "Kernels by module: Net.Linear -10.000 us, Net.ReLU +2.500 us" in out


def test_json_alone_on_stdout(tmp_path: Path) -> None:
    before, after = kineto(tmp_path / "a.json", steps([40])), kineto(tmp_path / "b.json", steps([50]))
    code, out = run(str(before), str(after), "--json", "--range", "ProfilerStep#0")
    assert code == 0
    assert json.loads(out) == diff(before, after, "ProfilerStep#0")


@pytest.mark.parametrize(
    ("events", "options", "said"),
    [
        ([event("cpu_op", "aten::add", 0, 5)], [], "holds no work of a GPU; there is nothing to compare"),
        ([call("cudaGraphLaunch", 0, 5, 1)], [], "holds launches, but no row of what they launched"),
        (steps([40]), ["--range", "train"], "has no NVTX range 'train'; its ranges: ProfilerStep#0"),
        (steps([40]), ["--range", "ProfilerStep#0", "--range-after", "x"], "has no NVTX range 'x'"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_exit_2(
    tmp_path: Path, events: list[Any], options: list[str], said: str, monkeypatch: Any, capsys: Any
) -> None:
    before, after = kineto(tmp_path / "a.json", events), kineto(tmp_path / "b.json", steps([40]))
    monkeypatch.setattr("sys.argv", ["worklog", "diff", str(before), str(after), *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert said in err
    assert err.startswith("worklog: ")
    assert err.count("\n") == 1


def test_waterfall_stands_on_one_axis() -> None:
    axis = Axis.of([100, 150, 60])
    assert axis.total(150).plain == "█" * CELLS
    assert axis.step(100, 150).plain.strip() == "█" * (CELLS - axis.at(100))
    assert axis.step(100, 100 + 1).plain.strip() == "▏"
    assert all(len(axis.step(a, b).plain) == CELLS for a in (0, 60, 150) for b in (0, 60, 150))
    high = Axis.of([1000, 1010, 990])
    assert (high.origin, high.total(1000).plain[:3]) == (985, "┄┄█")
    assert Axis.of([0, 0]).total(0).plain == " " * CELLS
    assert [exact(ns, sign=True) for ns in (-1, 1_234_567, 0)] == ["-0.001", "+1,234.567", "+0.000"]
