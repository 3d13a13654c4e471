"""Every counter that we ask ncu for exists, says NVIDIA's own catalogue (libnvperf_host.so in ncu-report).

ncu gives no column for a name that its chip does not have, so a wrong name would show only on a GPU, as nothing.
Structures and calls: nvperf_host.h, nvperf_cuda_host.h of CUPTI.
"""

from __future__ import annotations

import importlib.util
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_size_t,
    c_uint8,
    c_void_p,
    cast,
    create_string_buffer,
    sizeof,
    string_at,
)
from functools import cache
from pathlib import Path

import pytest

from worklog.capture.ncu import METRICS
from worklog.traces.ncu import FIELDS, STALL_METRICS, STALLS

pytest.importorskip("ncu_report")


class Initialize(Structure):
    _fields_ = [("size", c_size_t), ("private", c_void_p)]


class ScratchSize(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("private", c_void_p),
        ("chip", c_char_p),
        ("availability", c_void_p),
        ("scratch_size", c_size_t),
    ]


class Evaluator(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("private", c_void_p),
        ("scratch", c_void_p),
        ("scratch_size", c_size_t),
        ("chip", c_char_p),
        ("availability", c_void_p),
        ("data", c_void_p),
        ("data_size", c_size_t),
        ("evaluator", c_void_p),
    ]


class Names(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("private", c_void_p),
        ("evaluator", c_void_p),
        ("type", c_uint8),
        ("names", c_void_p),
        ("begins", POINTER(c_size_t)),
        ("count", c_size_t),
    ]


def call(library: CDLL, function: str, parameters: Structure) -> None:
    parameters.size = sizeof(parameters)
    assert getattr(library, function)(byref(parameters)) == 0, function


@cache
def catalogue(chip: str) -> frozenset[str]:
    """Base names of the chip's counters, ratios and throughputs."""
    spec = importlib.util.find_spec("ncu_report")
    assert spec
    assert spec.submodule_search_locations
    library = CDLL(str(Path(spec.submodule_search_locations[0]) / "libnvperf_host.so"))
    call(library, "NVPW_InitializeHost", Initialize())
    size = ScratchSize(chip=chip.encode())
    call(library, "NVPW_CUDA_MetricsEvaluator_CalculateScratchBufferSize", size)
    scratch = create_string_buffer(size.scratch_size)
    made = Evaluator(scratch=cast(scratch, c_void_p), scratch_size=size.scratch_size, chip=chip.encode())
    call(library, "NVPW_CUDA_MetricsEvaluator_Initialize", made)
    found: set[str] = set()
    for kind in range(3):
        names = Names(evaluator=made.evaluator, type=kind)
        call(library, "NVPW_MetricsEvaluator_GetMetricNames", names)
        found |= {string_at(names.names + names.begins[at]).decode() for at in range(names.count)}
    return frozenset(found)


@pytest.mark.parametrize("chip", ["GA100", "GA102", "AD102", "GH100", "GB100"])
def test_every_metric_exists(chip: str) -> None:
    assert [name for name in METRICS if name.partition(".")[0] not in catalogue(chip)] == []


@pytest.mark.parametrize("chip", ["GA100", "AD102", "GH100", "GB100"])
def test_every_metric_that_is_read_exists(chip: str) -> None:
    names = {name.partition(".")[0] for name in FIELDS.values() if not name.startswith("launch__")}
    assert names - catalogue(chip) == set()


def test_states_of_warps_are_those_of_the_catalogue() -> None:
    for pattern in STALL_METRICS:
        names = {pattern.format(reason).partition(".")[0] for reason in STALLS}
        assert names - catalogue("GH100") == set()


def test_the_catalogue_tells_a_wrong_name() -> None:
    assert "dram__bytes_op_read" not in catalogue("GH100")
    assert "sm__ops_path_tensor_src_fp16_dst_fp32" not in catalogue("GH100")
