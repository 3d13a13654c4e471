from __future__ import annotations

import os
import re
import resource
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from worklog import record as records
from worklog.record import (
    CaseResult,
    Claim,
    Correctness,
    Hardware,
    Record,
    RecordError,
    Source,
    Timing,
    VariantResult,
    dumps,
    load,
    problems_of,
    save,
    write_whole,
)

positive = st.floats(min_value=1e-3, max_value=1e9)


def timing(*samples: float) -> Timing:
    return Timing(method="perf_counter", samples_us=list(samples), warmup=1, calls=1, flush_l2=False)


def record(case: CaseResult | None = None, **changes: object) -> Record:
    case = case or CaseResult(status="ok", timing=timing(1.0, 2.0))
    status, message = case.status, None if case.status == "ok" else "case c"
    variants = {"v": VariantResult(status=status, message=message, cases={"c": case})}
    basis = Record(
        schema_version=records.SCHEMA_VERSION,
        run_id="20260101-cpu-repro-abcdef",
        problem="p",
        step="repro",
        argv=["worklog", "repro", "p"],
        started_utc="2026-01-01T00:00:00Z",
        seconds=1.5,
        complete=True,
        source=Source(commit=None, dirty=None),
        hardware=Hardware(cpu="c", cpu_count=2, memory_bytes=1),
        software={"python": "3.12.1", "triton": None},
        config={"name": "cpu", "device": "cpu"},
        variants=variants,
    )
    return replace(basis, **changes)


def correct(value: float | None) -> Correctness:
    return Correctness(metric="relative_frobenius", value=value, limit=1e-3)


BROKEN = {
    "schema_version is 99": record(schema_version=99),
    "variants.v: status timeout without a message": record(variants={"v": VariantResult(status="timeout")}),
    "status wrong_result carries a time": record(CaseResult(status="wrong_result", timing=timing(1.0))),
    "status error inside a variant that is ok": record(
        variants={"v": VariantResult(status="ok", cases={"c": CaseResult(status="error", message="m")})}
    ),
    "ok with an error of 0.01 above": record(CaseResult(status="ok", correctness=correct(0.01))),
    "ok with an error of None above": record(CaseResult(status="ok", correctness=correct(None))),
    "a timing without samples": record(CaseResult(status="ok", timing=timing())),
    "a sample that is not positive": record(CaseResult(status="ok", timing=timing(1.0, 0.0))),
    "claims.c: undecided without a reason": record(claims=[Claim(name="c", holds=None, measured=None, required=None)]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_rule_is_named_and_the_record_is_not_written(rule, tmp_path):
    (found,) = problems_of(BROKEN[rule])
    assert rule in found
    with pytest.raises(RecordError, match=re.escape(rule)):
        save(BROKEN[rule], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_record_within_the_rules_has_no_problem():
    assert problems_of(record()) == []
    assert problems_of(record(CaseResult(status="ok", correctness=correct(1e-3)))) == []


@settings(deadline=None, max_examples=50)
@given(samples=st.lists(positive, min_size=1, max_size=30), text=st.text())
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, samples, text):
    folder = tmp_path_factory.mktemp("run")
    written = record(CaseResult(status="ok", timing=timing(*samples), message=text), argv=[text])
    save(written, folder)
    found = load(folder)
    assert replace(found, seal="") == written
    assert dumps(found) == (folder / "record.json").read_bytes()


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_changing_any_byte_makes_it_unloadable(tmp_path_factory, data):
    file = save(record(), tmp_path_factory.mktemp("run"))
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    file.write_bytes(content)
    with pytest.raises(RecordError, match=r"record\.json"):
        load(file)


def test_unknown_field_is_refused(tmp_path):
    file = save(record(), tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"seconds"', b'"secondz"'))
    with pytest.raises(RecordError, match="secondz"):
        load(file)


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(RecordError, match=r"record.json: cannot be read \(No such file or directory\)"):
        load(tmp_path)


@given(st.lists(positive, min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_are_numpy_s_linear_ones(samples, q):
    taken = timing(*samples)
    assert np.isclose(taken.quantile_us(q), np.quantile(samples, q), rtol=1e-9)
    assert np.isclose(taken.median_us, statistics.median(samples))


def test_rates_are_least_work_over_the_median():
    case = CaseResult(status="ok", timing=timing(1.0, 2.0, 100.0), bytes=4000, flop=6000)
    assert (case.bytes_per_s, case.flop_per_s) == (2e9, 3e9)


def test_failed_write_leaves_the_old_file(tmp_path):
    """In a forked process whose files may not grow beyond 10 bytes: the write really fails half way."""
    file = tmp_path / "record.json"
    write_whole(file, b"old")
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            write_whole(file, b"x" * 1000)
        except RecordError as error:
            os._exit(7 if "cannot be written (File too large)" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert file.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_artifact_is_described_relative_to_its_run(tmp_path):
    file = tmp_path / "run" / "nsys" / "a.txt"
    write_whole(file, b"abc")
    described = records.artifact(tmp_path / "run", file, ["nsys"], "v")
    assert (described.path, described.bytes, described.argv, described.variant) == ("nsys/a.txt", 3, ["nsys"], "v")
    assert described.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert Path(described.path).is_absolute() is False
