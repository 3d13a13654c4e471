"""`worklog compare`: a recorded run of a GPU, and the same run as another machine would have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from worklog import cli
from worklog.compare import compare
from worklog.problem import ProblemError
from worklog.record import CaseResult, Ceilings, Record, RecordError, load, save

REPORTS = Path(__file__).resolve().parents[1] / "reports"
H200 = next(iter(sorted(REPORTS.glob("float8_weight_only/*-h200-baseline-*"))))
CPU = next(iter(sorted(REPORTS.glob("float8_weight_only/*-cpu-*"))))
COPY = 0.92e12


def case(old: CaseResult, factor: float, **changes: Any) -> CaseResult:
    """Its times this many times as long."""
    assert old.timing
    return replace(old, timing=replace(old.timing, samples_us=[us * factor for us in old.timing.samples_us]), **changes)


def other(folder: Path, factors: Mapping[str, float], **changes: Any) -> Path:
    """The H200's record as of another GPU: some variants' times this many times as long."""
    old = load(H200)
    variants = {
        slug: replace(v, cases={name: case(one, factors.get(slug, 1.0)) for name, one in v.cases.items()})
        for slug, v in old.variants.items()
    }
    hardware = replace(old.hardware, gpus=[replace(old.hardware.gpus[0], name="NVIDIA GeForce RTX 4090")])
    ceilings = Ceilings(copy_bytes_per_s=COPY, matmul_flop_per_s=1.6e14)
    basis = {"run_id": "20990101-rtx4090-repro-abcdef", "started_utc": "2099-01-01T00:00:00Z"}
    basis |= {"variants": variants, "hardware": hardware, "ceilings": ceilings}
    save(replace(old, **(basis | changes)), folder)
    return folder


def raw(path: Path) -> Any:
    return json.loads((path / "record.json").read_text())


def of(found: dict[str, Any], variant: str, name: str = "decode") -> dict[str, Any]:
    (one,) = [one for one in found["cases"] if (one["variant"], one["case"]) == (variant, name)]
    return one


def test_times_and_shares_of_each_gpus_own_ceilings_from_the_samples(tmp_path: Path) -> None:
    this = other(tmp_path / "rtx", {"bf16_eager": 1.01, "float8_fused": 4.5})
    found = compare([this, H200])
    assert [record["gpu"] for record in found["records"]] == ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]
    for slug in ("bf16_eager", "float8_fused"):
        one = of(found, slug)
        assert len(one["results"]) == 2
        for result, folder in zip(one["results"], (this, H200), strict=True):
            record = raw(folder)
            stated = record["variants"][slug]["cases"]["decode"]
            us, base = (
                np.asarray(record["variants"][name]["cases"]["decode"]["timing"]["samples_us"])
                for name in (slug, "bf16_eager")
            )
            assert result["median_us"] == pytest.approx(np.median(us))
            assert [result["p10_us"], result["p90_us"]] == pytest.approx(np.quantile(us, [0.1, 0.9]))
            rate = stated["bytes"] / np.median(us) * 1e6
            assert result["copy_fraction"] == pytest.approx(rate / record["ceilings"]["copy_bytes_per_s"])
            assert result["ratio_to_baseline"] == pytest.approx(np.median(us) / np.median(base))
        (compared,) = one["comparisons"]
        assert compared["time_ratio"] == pytest.approx({"bf16_eager": 1.01, "float8_fused": 4.5}[slug])
        mine, theirs = (result["copy_fraction"] for result in one["results"])
        assert compared["fraction_difference"] == pytest.approx(mine - theirs)
        assert (compared["ceiling"], compared["fraction_beyond_spread"]) == ("copy", True)
        overlap = (
            one["results"][0]["p10_us"] <= one["results"][1]["p90_us"]
            and one["results"][1]["p10_us"] <= one["results"][0]["p90_us"]
        )
        assert compared["time_beyond_spread"] is not overlap
    assert of(found, "bf16_eager")["comparisons"][0]["time_beyond_spread"] is False
    assert of(found, "float8_fused")["comparisons"][0]["time_beyond_spread"] is True
    assert of(found, "float8_fused", "prefill")["comparisons"][0]["ceiling"] == "matmul"


def test_a_share_is_beyond_the_spread_where_times_are_not_and_the_other_way_round(tmp_path: Path) -> None:
    """A GPU with half of the bandwidth that takes twice as long is as close to its ceiling."""
    ceilings = load(H200).ceilings
    assert ceilings.copy_bytes_per_s
    half = replace(ceilings, copy_bytes_per_s=ceilings.copy_bytes_per_s / 2)
    found = compare([other(tmp_path / "half", {"float8_fused": 2.0}, ceilings=half), H200])
    (compared,) = of(found, "float8_fused")["comparisons"]
    assert (compared["time_beyond_spread"], compared["fraction_beyond_spread"]) == (True, False)
    assert compared["fraction_difference"] == pytest.approx(0)
    (compared,) = of(found, "bf16_cudagraph_cd")["comparisons"]
    assert (compared["time_beyond_spread"], compared["fraction_beyond_spread"]) == (False, True)
    none = compare([other(tmp_path / "none", {}, ceilings=Ceilings()), H200])
    (compared,) = of(none, "float8_fused")["comparisons"]
    assert (compared["time_ratio"], compared["fraction_difference"], compared["ceiling"]) == (1.0, None, None)


def test_claims_by_machine(tmp_path: Path) -> None:
    old = load(H200)
    claims = [replace(claim, holds=False, measured=1.5) for claim in old.claims[:1]]
    found = compare([other(tmp_path / "rtx", {}, claims=claims), H200])
    first = found["claims"][0]
    assert first["name"] == old.claims[0].name
    assert [(one["holds"], one["measured"]) for one in first["results"]] == [
        (False, 1.5),
        (True, old.claims[0].measured),
    ]
    assert [len(claim["results"]) for claim in found["claims"][1:]] == [1] * (len(old.claims) - 1)


def test_a_cpu_is_not_set_against_a_gpu() -> None:
    found = compare([CPU, H200])
    assert found["records"][1]["apart"] == "one ran on the CPU, the other on the GPU"
    assert {len(one["comparisons"]) for one in found["cases"]} == {0}
    assert any("are not set against one another: one ran on the CPU" in note for note in found["notes"])
    out = CliRunner().invoke(cli.app, ["compare", str(CPU), str(H200)]).stdout
    assert "A CPU's times are at a small size: what a CPU can show, and not the finding." in out
    mine, theirs = out.split(
        "RECORDED on H200, not to be set against the above: one ran on the CPU, the other on the GPU."
    )
    assert " H200  1" not in mine
    assert " this  " not in theirs.split("claim ")[0]


def test_other_work_is_not_compared_and_another_way_of_timing_is_said(tmp_path: Path) -> None:
    old = load(H200)
    config = compare([other(tmp_path / "a", {}, config=old.config | {"layers": 32, "name": "whole"}), H200])
    assert config["records"][1]["apart"] == "their configs differ: layers 32 and 4"
    assert {len(one["comparisons"]) for one in config["cases"]} == {0}

    variant = old.variants["float8_fused"]
    timed = variant.cases["decode"].timing
    assert timed
    changed = {
        "bytes": replace(variant.cases["decode"], bytes=1),
        "profiled": replace(variant.cases["decode"], timing=replace(timed, profiled=True)),
        "method": replace(variant.cases["decode"], timing=replace(timed, method="cuda_events")),
    }
    found = {
        name: compare(
            [
                other(
                    tmp_path / name,
                    {},
                    variants=old.variants | {"float8_fused": replace(variant, cases=variant.cases | {"decode": one})},
                ),
                H200,
            ]
        )
        for name, one in changed.items()
    }
    assert of(found["bytes"], "float8_fused")["comparisons"] == []
    assert any("state other bytes or operations: float8_fused decode" in note for note in found["bytes"]["notes"])
    assert of(found["profiled"], "float8_fused")["results"][0]["median_us"] is None
    assert of(found["profiled"], "float8_fused")["comparisons"] == []
    assert len(of(found["method"], "float8_fused")["comparisons"]) == 1
    assert any("were timed in another way: float8_fused decode" in note for note in found["method"]["notes"])


def test_one_record_stands_beside_the_newest_of_each_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    root = tmp_path / "checkout"
    (root / "problems").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    monkeypatch.setenv("WORKLOG_ROOT", str(root))
    reports = root / "reports" / "float8_weight_only"
    reports.mkdir(parents=True)
    alone = compare([H200])
    assert len(alone["records"]) == 1
    assert "holds no other whole record of a GPU" in alone["notes"][0]
    shutil.copytree(H200, reports / H200.name)
    shutil.copytree(CPU, reports / CPU.name)
    assert len(compare([H200])["records"]) == 1  # itself is no other, and a CPU's is none of a GPU
    for day, dirty, complete in (("01", False, True), ("02", False, True), ("03", True, True), ("04", False, False)):
        run_id = f"209901{day}-rtx4090-repro-abcdef"
        source = replace(load(H200).source, dirty=dirty)
        changes = {"run_id": run_id, "source": source, "complete": complete}
        other(reports / run_id, {}, started_utc=f"2099-01-{day}T00:00:00Z", **changes)
    found = compare([CPU])
    assert {record["run_id"] for record in found["records"][1:]} == {H200.name, "20990102-rtx4090-repro-abcdef"}
    newer = {"run_id": "20991231-h200-repro-abcdef", "started_utc": "2099-12-31T00:00:00Z"}
    config, hardware = load(H200).config | {"name": "x"}, load(H200).hardware
    other(reports / newer["run_id"], {}, hardware=hardware, config=config, **newer)
    found = compare([reports / "20990102-rtx4090-repro-abcdef"])  # of one GPU, one of the same config before newer ones
    assert {record["run_id"] for record in found["records"][1:]} == {H200.name, "20990101-rtx4090-repro-abcdef"}
    found = compare([CPU])
    assert {record["run_id"] for record in found["records"][1:]} == {newer["run_id"], "20990102-rtx4090-repro-abcdef"}


def test_dirty_incomplete_and_above_the_ceiling_are_said(tmp_path: Path) -> None:
    source = replace(load(H200).source, dirty=True)
    notes = compare([other(tmp_path / "a", {}, source=source, complete=False), H200])["notes"]
    assert any("is incomplete: its run was interrupted" in note for note in notes)
    assert any("is of a modified or unknown tree" in note for note in notes)
    assert any("comes above its ceilings in bf16_eager decode" in note for note in notes)


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["compare", *argv])
    return result.exit_code, result.stdout


def test_text_and_json(tmp_path: Path) -> None:
    this = other(tmp_path / "rtx", {"bf16_eager": 1.01, "float8_fused": 4.5})
    code, out = run(str(this), str(H200 / "record.json"))
    assert code == 0
    lines = [
        line for line in out.splitlines() if line.startswith("                               H200") and "x" in line
    ]
    assert any("~1.01x" in line for line in lines)
    assert any(" 4.50x" in line for line in lines)
    assert "Against H200: " in out
    assert f"{raw(H200)['claims'][0]['measured']:.4g} x holds" in out
    code, out = run(str(this), str(H200), "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(compare([this, H200])))


def test_records_of_the_same_gpu_keep_their_names_apart(tmp_path: Path) -> None:
    hardware = load(H200).hardware
    again = other(tmp_path / "again", {}, hardware=hardware, run_id="20991111-h200-repro-fedcba")
    rtx = other(tmp_path / "rtx", {"float8_fused": 4.5})
    _, out = run(str(rtx), str(H200), str(again))
    assert f"H200 {H200.name[-6:]}" in out
    assert "H200 fedcba" in out


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(ProblemError, match="every record given is"):
        compare([H200, H200])
    with pytest.raises(ProblemError, match=r"different problems \(float8_weight_only, other\)"):
        compare([other(tmp_path / "o", {}, problem="other"), H200])
    with pytest.raises(RecordError, match="cannot be read"):
        compare([tmp_path / "none", H200])
    monkeypatch.setattr("sys.argv", ["worklog", "compare", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)


def test_of_an_empty_record_nothing_is_compared(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"variants": {}, "claims": []}
    found = compare([other(tmp_path / "a", {}, **nothing), H200])
    assert all(one["comparisons"] == [] for one in found["cases"])
    assert isinstance(load(tmp_path / "a"), Record)
    assert run(str(tmp_path / "a"), str(H200))[0] == 0
