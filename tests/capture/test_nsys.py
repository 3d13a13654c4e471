from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from worklog.capture import nsys
from worklog.capture.tool import CaptureError, Session

Program = Callable[[str, str], Path]


def run(tool: Path, tmp_path: Path) -> None:
    argv = nsys.profile_argv(["python", "x.py"], "x.nsys-rep", graph_trace="node", tool=str(tool))
    session = Session(cwd=tmp_path, timeout_s=20.0, log=tmp_path / "log")
    nsys.run(argv, tmp_path / "x.nsys-rep", session)


def test_profile_command() -> None:
    argv = nsys.profile_argv(["python", "x.py"], "out/x.nsys-rep", graph_trace="graph")
    assert argv[:2] == ["nsys", "profile"]
    assert argv[-2:] == ["python", "x.py"]
    flags = argv[2:-2]
    assert "--cuda-graph-trace=graph" in flags
    assert {"--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"} < set(
        flags
    )
    assert flags[-1] == "--output=out/x.nsys-rep"
    assert all(flag.startswith("--") for flag in flags)


def test_export_command() -> None:
    argv = nsys.export_argv("x.nsys-rep", "x.parquet", kind="parquetdir")
    assert argv == ["nsys", "export", "--type=parquetdir", "--force-overwrite=true", "--output=x.parquet", "x.nsys-rep"]


def test_report_is_made_and_the_libraries_are_given(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKLOG_NSYS_LIBRARY_PATH", "/extra/lib")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/driver/lib")
    run(program("nsys", 'echo "$LD_LIBRARY_PATH" > seen; touch x.nsys-rep'), tmp_path)
    assert (tmp_path / "seen").read_text() == "/extra/lib:/driver/lib\n"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("echo 'worklog: toy has no case nine.'; exit 2", "nsys profile ended with 2: worklog: toy has no case nine."),
        ("echo done", "nsys wrote no x.nsys-rep: the program never came to cudaProfilerStart"),
        (
            "touch x.qdstrm; echo 'Importer error status: The importer binary and its dependencies were not found.'",
            "nsys recorded the program but its importer wrote no report: run `worklog doctor`",
        ),
    ],
)
def test_failures_are_one_sentence(program: Program, tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(CaptureError) as caught:
        run(program("nsys", body), tmp_path)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert caught.value.status == "error"


def test_missing_nsys_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKLOG_NSYS", str(tmp_path / "nsys"))
    with pytest.raises(
        CaptureError, match=r"nsys is not here \(WORKLOG_NSYS names .*not a program\): install"
    ) as caught:
        nsys.ready()
    assert caught.value.status == "unsupported"


@pytest.mark.usefixtures("nsight_compute")
def test_nsys_that_could_write_no_report_is_refused_before_the_run() -> None:
    with pytest.raises(CaptureError, match=r"can record but not write a report: .*libdw.so.1") as caught:
        nsys.ready()
    assert caught.value.status == "unsupported"
