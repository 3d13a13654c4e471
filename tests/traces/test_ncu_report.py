"""Reports of ncu. A real one needs a GPU: those that runs have recorded are read where there are any."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import pytest

from worklog.problem import ProblemError
from worklog.traces import ncu

pytest.importorskip("ncu_report")
LAUNCH = ncu.Launch(
    index=4,
    name="elementwise_kernel",
    demangled="void at::native::elementwise_kernel<4, at::native::MulFunctor<float>>(int)",
    grid=(132, 2, 1),
    block=(128, 1, 1),
    metrics={
        "gpu__time_duration.sum": 12345,
        "dram__bytes_read.sum": 33_554_432,
        "dram__bytes_write.sum": 1024.0,
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 91.5,
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": 12.25,
        "lts__t_sector_hit_rate.pct": 50.0,
        "launch__registers_per_thread": 32,
        "sm__warps_active.avg.pct_of_peak_sustained_active": 75.0,
        "launch__waves_per_multiprocessor": 0.25,
    },
    units={
        "gpu__time_duration.sum": "ns",
        "dram__bytes_read.sum": "byte",
        "dram__bytes_write.sum": "byte",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%",
        "lts__t_sector_hit_rate.pct": "%",
        "launch__registers_per_thread": "register/thread",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
        "launch__waves_per_multiprocessor": "",
    },
    stalls={"long_scoreboard": 6.0, "selected": 1.0, "wait": 2.0, "barrier": 0.5, "drain": 0.5},
)


def test_fields_of_a_launch_and_their_units() -> None:
    assert ncu.row(LAUNCH) == {
        "name": "elementwise_kernel<MulFunctor>",
        "full_name": LAUNCH.demangled,
        "grid": [132, 2, 1],
        "block": [128, 1, 1],
        "duration_ns": 12345,
        "dram_read_bytes": 33_554_432,
        "dram_write_bytes": 1024,
        "dram_fraction": pytest.approx(0.915),
        "sm_fraction": pytest.approx(0.1225),
        "l2_hit_fraction": 0.5,
        "registers_per_thread": 32,
        "occupancy_fraction": 0.75,
        "waves": 0.25,
        "stalls": [
            {"reason": "long_scoreboard", "share": 0.6},
            {"reason": "wait", "share": 0.2},
            {"reason": "barrier", "share": 0.05},
        ],
    }
    assert ncu.row(dataclasses.replace(LAUNCH, stalls={}))["stalls"] is None


def test_scaled_units_are_taken_back_and_unknown_ones_refused() -> None:
    scaled = dataclasses.replace(LAUNCH, units={**LAUNCH.units, "dram__bytes_read.sum": "Mbyte"})
    assert ncu.row(scaled)["dram_read_bytes"] == 33_554_432_000_000
    strange = dataclasses.replace(LAUNCH, units={**LAUNCH.units, "gpu__time_duration.sum": "cycle"})
    with pytest.raises(ProblemError, match=r"launch 4: gpu__time_duration\.sum stands in 'cycle'"):
        ncu.row(strange)


def test_files_that_are_no_report(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="no such file"):
        ncu.read(tmp_path / "y.ncu-rep")
    for name, content in (("x.ncu-rep", b"no report"), ("x.ncu-rep.gz", gzip.compress(b"no")), ("z.ncu-rep.gz", b"no")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProblemError, match=name):
            ncu.read(tmp_path / name)
