"""`worklog diagnose`: recorded captures, small traces with known answers, and files that are none."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from worklog import cli
from worklog.diagnose import diagnose
from worklog.problem import ProblemError
from worklog.render.diagnosis import bar

REPORTS = Path(__file__).resolve().parents[1] / "reports"
PARTS = ["compute", "communication", "copy", "memset", "launch", "host", "sync", "unexplained"]


def recorded(slug: str) -> Path:
    found = sorted(REPORTS.glob(f"float8_weight_only/*-h200-*/nsys.{slug}.sqlite"))
    if not found:
        pytest.skip(f"no capture of {slug} is recorded")
    return found[-1]


@pytest.mark.parametrize("slug", ["bf16_eager", "torchao_0_13_0_eager"])
def test_recorded_captures_add_up_and_equal_sums_in_sql(slug: str) -> None:
    file = recorded(slug)
    found = diagnose(file)
    assert list(found) == ["source", "devices", "kernels", "findings", "coverage", "abstained"]
    assert list(found["source"]) == ["tool", "tool_version", "file", "sha256"]
    (device,) = found["devices"]
    assert list(device) == ["device", "span_ns", "accounting_ns", "busy_ns", "kernel_count", "queue"]
    assert list(device["accounting_ns"]) == PARTS
    assert sum(device["accounting_ns"].values()) == device["span_ns"]
    assert sum(list(device["accounting_ns"].values())[:4]) == device["busy_ns"]
    with closing(sqlite3.connect(file)) as database:
        kernel = "CUPTI_ACTIVITY_KIND_KERNEL"
        rows = database.execute(
            f'SELECT s.value, COUNT(*), SUM(k."end" - k.start) FROM {kernel} k '
            "JOIN StringIds s ON s.id = k.demangledName GROUP BY s.value"
        ).fetchall()
    assert {(k["name"], k["count"], k["total_ns"]) for k in found["kernels"]} == set(rows)
    assert device["kernel_count"] == sum(count for _, count, _ in rows)
    assert found["coverage"]["kernels_joined_to_launch"] == found["coverage"]["time_explained"] == 1.0
    assert device["queue"]["launched"]["kernels"] == device["kernel_count"]
    assert 1_000 < device["queue"]["launched"]["median_ns"] < 3_000  # microseconds, not the whole queue ahead
    assert diagnose(file, slug)["devices"] == found["devices"]  # the child opens its range around all it captures


def test_bf16_eager_waits_for_the_host() -> None:
    """One token through a small model: some fifteen microseconds of Python for each kernel of a few."""
    found = diagnose(recorded("bf16_eager"))
    parts, span = found["devices"][0]["accounting_ns"], found["devices"][0]["span_ns"]
    idle = span - found["devices"][0]["busy_ns"]
    assert idle > span / 2
    assert parts["host"] > 0.9 * idle
    assert found["findings"][0]["rule"] == "host_bound"
    assert found["findings"][0]["share"] == parts["host"] / span
    assert found["abstained"] == []


def test_torchao_0_13_0_eager_computes() -> None:
    found = diagnose(recorded("torchao_0_13_0_eager"))
    assert found["devices"][0]["accounting_ns"]["compute"] > 0.9 * found["devices"][0]["span_ns"]
    assert [one["rule"] for one in found["findings"]] == ["dequantise_then_matmul"]


def event(cat: str, name: str, at: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args}


def call(name: str, at: float, dur: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", name, at, dur, tid, correlation=correlation)


def ran(cat: str, name: str, at: float, dur: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    return event(cat, name, at, dur, stream, correlation=correlation, device=0, stream=stream)


STEPS = [
    event("user_annotation", "ProfilerStep#4", 0, 100),
    call("cudaMemcpyAsync", 10, 45.5, 1),
    ran("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 20, 30, 1),  # the call is back 5.5 after the copy
    call("cudaLaunchKernel", 60, 5, 2),
    ran("kernel", "void gemm<float>(float*)", 70, 20, 2),
    call("cudaLaunchKernel", 75, 5, 3),
    ran("kernel", "ncclDevKernel_AllReduce_Sum_f32", 85, 20.25, 3, 20),
    event("user_annotation", "ProfilerStep#5", 200, 100),
    call("cudaStreamSynchronize", 100, 110, 9),
    call("cudaLaunchKernel", 215, 5, 4),
    ran("kernel", "void gemm<float>(float*)", 230, 20, 4),
    event("gpu_user_annotation", "ProfilerStep#4", 20, 900, 7),
]


def kineto(folder: Path, events: list[dict[str, Any]], name: str = "rank.json.gz", **top: Any) -> Path:
    file = folder / name
    content = json.dumps({"schemaVersion": 1, **top, "traceEvents": events}).encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return file


def test_kineto_by_hand_whole_by_step_and_by_all_steps(tmp_path: Path) -> None:
    file = kineto(tmp_path, STEPS)
    (device,) = diagnose(file)["devices"]
    # [10, 250): copy [20, 50); launch [10, 20); sync [50, 55.5); host [55.5, 70); gemm [70, 90) and [230, 250);
    # all-reduce beside no other kernel [90, 105.25); sync [105.25, 210); host [210, 230).
    assert device["span_ns"] == 240_000
    assert device["accounting_ns"] == dict(
        zip(PARTS, [40_000, 15_250, 30_000, 0, 10_000, 34_500, 110_250, 0], strict=True)
    )
    assert (device["busy_ns"], device["kernel_count"]) == (85_250, 3)
    (step,) = diagnose(file, "ProfilerStep#5")["devices"]
    assert (step["span_ns"], step["kernel_count"]) == (35_000, 1)
    assert step["accounting_ns"]["launch"] == 15_000
    (steps,) = diagnose(file, "ProfilerStep")["devices"]
    assert steps["span_ns"] == 95_250 + 35_000  # each step on its own, what is between them is in neither
    assert (steps["accounting_ns"]["sync"], steps["kernel_count"]) == (5_500, 3)
    with pytest.raises(ProblemError, match=r"no NVTX range 'Step'; its ranges: ProfilerStep#4, ProfilerStep#5"):
        diagnose(file, "Step")


def test_absolute_times_and_no_device_in_the_arguments_change_nothing(tmp_path: Path) -> None:
    expected = diagnose(kineto(tmp_path, STEPS))["devices"]
    shifted = []
    for old in STEPS:
        args = {name: value for name, value in old["args"].items() if name != "device"}
        pid = 0 if "stream" in args else 4711
        shifted.append(old | {"ts": 1_790_857_026_000_000 + old["ts"], "pid": pid, "args": args})
    assert diagnose(kineto(tmp_path, shifted, "old.json"))["devices"] == expected


def test_findings_name_cause_place_and_next_capture(tmp_path: Path) -> None:
    found = diagnose(kineto(tmp_path, STEPS))
    copies, host = found["findings"]
    assert (copies["rule"], host["rule"]) == ("blocking_copies", "host_bound")
    assert copies["share"] == (30_000 + 5_500) / 240_000
    assert copies["evidence"]["pageable_copies"] == copies["evidence"]["copies"] == 1
    assert copies["where"][-1] == "Memcpy HtoD (Pageable -> Device)"
    assert host["share"] == 34_500 / 240_000
    assert host["where"][-1] == "void gemm<float>(float*)"
    assert all(finding["next"].startswith("nsys profile ") for finding in found["findings"])
    assert "1 times are too few to call it a habit" in found["abstained"][0]["reason"]  # the wait between the steps
    with_stacks = [*STEPS, event("python_function", "train.py(1): step", 0, 300)]
    slowed = diagnose(kineto(tmp_path, with_stacks))["findings"][1]
    assert slowed["evidence"]["host_slowed_by_recorded_stacks"] is True
    assert "backtrace" not in slowed["next"]


def test_kernels_shorter_than_their_launches_are_launch_bound(tmp_path: Path) -> None:
    events = [call("cudaLaunchKernel", 10 * n, 9, n + 1) for n in range(50)]
    events += [ran("kernel", "tiny", 10 * n + 8, 2, n + 1) for n in range(50)]
    found = diagnose(kineto(tmp_path, events))
    (finding,) = [finding for finding in found["findings"] if finding["rule"] == "launch_bound"]
    assert finding["evidence"]["waiting_during_launch_ns"] == 50 * 8_000
    assert finding["evidence"]["small_kernels"] == finding["evidence"]["kernels_launched_one_by_one"] == 50
    long = [e | {"dur": 9.5} if e["cat"] == "kernel" else e for e in events]
    assert "launch_bound" not in [finding["rule"] for finding in diagnose(kineto(tmp_path, long))["findings"]]


def test_rules_abstain_without_their_evidence(tmp_path: Path) -> None:
    bare = diagnose(kineto(tmp_path, [e for e in STEPS if e["cat"] != "cuda_runtime"]))
    late = {"sync_every_step", "host_bound", "launch_bound", "blocking_copies"}
    assert {one["rule"] for one in bare["abstained"]} >= late
    assert "no CUDA calls of the host" in bare["abstained"][0]["reason"]
    assert bare["devices"][0]["accounting_ns"]["unexplained"] == bare["devices"][0]["span_ns"] - 85_250
    replay = [*STEPS, call("cudaGraphLaunch", 12, 1, 77)]
    blind = diagnose(kineto(tmp_path, replay))
    assert "replayed 1 times without rows for their kernels" in blind["abstained"][0]["reason"]
    assert "--cuda-graph-trace=node" in blind["abstained"][0]["reason"]
    assert blind["findings"] == []
    assert blind["devices"][0]["accounting_ns"]["host"] == 0


def test_trace_of_the_cpu_alone(tmp_path: Path) -> None:
    found = diagnose(kineto(tmp_path, [event("cpu_op", "aten::add", 0, 5)]))
    assert (found["devices"], found["kernels"], found["findings"]) == ([], [], [])
    assert {one["reason"] for one in found["abstained"]} == {"the trace holds no work of a GPU"}


def run(*argv: str) -> tuple[int, str, str]:
    """The console entry in this process: exit code, stdout, stderr."""
    result = CliRunner().invoke(cli.app, ["diagnose", *argv])
    return result.exit_code, result.stdout, str(result.exception or "")


def test_json_alone_on_stdout(tmp_path: Path) -> None:
    file = kineto(tmp_path, STEPS)
    code, out, _ = run(str(file), "--json")
    assert code == 0
    assert json.loads(out) == diagnose(file)


def test_text_shows_the_accounting_and_lets_no_name_steer_the_terminal(tmp_path: Path) -> None:
    hostile = [e | {"name": "\x1b[2Jgemm\n[red]<b>"} if e["name"].startswith("void gemm") else e for e in STEPS]
    code, out, _ = run(str(kineto(tmp_path, hostile)))
    assert code == 0
    assert "\x1b" not in out
    assert "[red]" in out
    assert "GPU 0: 240 us, busy 35.5%, 3 kernels" in out
    assert "100.0% of the kernels are joined to the call that launched them." in out
    (line,) = [line for line in out.splitlines() if line.startswith("█") and "compute" not in line]
    assert len(line) == 100
    assert (line.count("s"), line.count("▒")) == (46, 13)  # 45.9 % and 12.5 %


def test_bar_has_a_cell_for_every_hundredth() -> None:
    accounting = dict(zip(PARTS, [1, 1, 1, 0, 0, 0, 0, 0], strict=True))
    assert bar(accounting, 100).plain == "█" * 34 + "▓" * 33 + "▒" * 33
    assert bar(dict.fromkeys(PARTS, 0), 100).plain == ""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json.gz", gzip.compress(b'{"traceEvents": []}' * 9)[:-20], "cut off or damaged"),
        ("a.json", b"not JSON", "is no trace"),
        ("a.json", b'{"traceEvents": [{"ph": "X",', "is no trace of torch.profiler"),
        ("a.json", b'{"version": 3}', "JSON of another kind"),
        ("a.json", b'{"traceEvents": []}', "the trace is empty"),
        ("a.bin", b"\0\1\2", "is no trace"),
        ("a.sqlite", b"SQLite format 3\0" + b"\0" * 2000, "is no SQLite export of nsys"),
        ("a.ncu-rep", b"NVR\0 and nothing else", "ncu-report"),
    ],
)
def test_what_is_no_trace_is_one_sentence_and_exit_2(
    tmp_path: Path, name: str, content: bytes, said: str, monkeypatch: Any, capsys: Any
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["worklog", "diagnose", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert said in err
    assert err.startswith(f"worklog: {file}: ")
    assert err.count("\n") == 1


def test_export_without_tables_of_work_and_range_of_what_has_none(tmp_path: Path) -> None:
    file = tmp_path / "empty.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    assert diagnose(file)["devices"] == []
    with pytest.raises(ProblemError, match="has no NVTX range 'x'; its ranges: none"):
        diagnose(file, "x")
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId TEXT)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 'first')")
    with pytest.raises(ProblemError, match="holds something else than integers"):
        diagnose(file)
    snapshot = tmp_path / "m.json"
    snapshot.write_text(json.dumps({"segments": [], "device_traces": []}))
    assert diagnose(snapshot)["memory"]["peak_bytes"] == 0
    with pytest.raises(ProblemError, match="only timelines"):
        diagnose(snapshot, "x")
