"""The record of a run: its types, its rules, and how it is loaded, checked and saved.

`reports/<problem>/<run id>/record.json` holds one `Record`. Units stand in the field names; GB is 1e9 bytes, GiB 2^30.
A record is written once, on failure and on interruption too, and never edited.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1
Status = Literal["ok", "wrong_result", "out_of_memory", "timeout", "error", "unsupported", "skipped"]


class RecordError(Exception):
    """A record that breaks a rule; the message names the file and the place."""


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Source(_Struct, frozen=True, kw_only=True):
    commit: str | None
    dirty: bool | None
    image: str | None = None
    """Digest of the container image, where the run was in one."""


class Gpu(_Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    sm_count: int
    compute_capability: str
    l2_bytes: int


class Clocks(_Struct, frozen=True, kw_only=True):
    """One reading of NVML. None: the driver would not say."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None


class Hardware(_Struct, frozen=True, kw_only=True):
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpus: list[Gpu] = []
    driver: str | None = None
    power_limit_w: float | None = None
    mig: bool | None = None
    start: Clocks | None = None
    end: Clocks | None = None


class Ceilings(_Struct, frozen=True, kw_only=True):
    """What this machine reached in this run: the yardsticks of every fraction in the record."""

    copy_bytes_per_s: float | None = None
    """Device-to-device copy of a buffer much larger than L2, bytes read plus bytes written."""
    matmul_flop_per_s: float | None = None
    """8192^3 bf16 matrix product on random data."""


class Correctness(_Struct, frozen=True, kw_only=True):
    metric: str
    value: float | None
    """None where the result was not finite."""
    limit: float


class Timing(_Struct, frozen=True, kw_only=True):
    """Samples of one call, in microseconds. All of them are kept; the statistics are theirs."""

    method: Literal["cuda_events", "cuda_graph", "perf_counter"]
    samples_us: list[float]
    warmup: int
    calls: int
    """Equal calls inside one sample; samples_us is already divided by it."""
    flush_l2: bool
    profiled: bool = False
    """Taken under a profiler; such a time never enters a table of results."""

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def median_ms(self) -> float:
        return self.median_us / 1e3

    def quantile_us(self, q: float) -> float:
        """Linear interpolation between the sorted samples, 0 <= q <= 1."""
        ordered = sorted(self.samples_us)
        at = q * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    @property
    def p10_us(self) -> float:
        return self.quantile_us(0.1)

    @property
    def p90_us(self) -> float:
        return self.quantile_us(0.9)


class Memory(_Struct, frozen=True, kw_only=True):
    """Peak over one call, from torch's allocator (allocated, reserved) and from the driver (device)."""

    baseline_bytes: int
    """Allocated before the call: weights, caches, inputs."""
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int | None
    largest_temporary_bytes: int | None = None
    """Largest single block that was allocated during the call."""


class Energy(_Struct, frozen=True, kw_only=True):
    joules_per_call: float
    seconds: float


class CaseResult(_Struct, frozen=True, kw_only=True):
    status: Status
    message: str | None = None
    correctness: Correctness | None = None
    timing: Timing | None = None
    memory: Memory | None = None
    energy: Energy | None = None
    bytes: int = 0
    flop: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Least bytes over the median time."""
        assert self.timing
        return self.bytes / (self.timing.median_us * 1e-6)

    @property
    def flop_per_s(self) -> float:
        assert self.timing
        return self.flop / (self.timing.median_us * 1e-6)


class VariantResult(_Struct, frozen=True, kw_only=True):
    status: Status
    message: str | None = None
    """One sentence for any status but ok."""
    seconds: float = 0.0
    packages: dict[str, str] = {}
    cases: dict[str, CaseResult] = {}
    facts: dict[str, Any] = {}


class Claim(_Struct, frozen=True, kw_only=True):
    """What the problem says about this machine, and whether the run bears it out."""

    name: str
    holds: bool | None
    """None: this run has not what the claim needs."""
    measured: float | None
    required: float | None
    unit: str = ""
    reason: str | None = None


class Artifact(_Struct, frozen=True, kw_only=True):
    path: str
    """Relative to the run folder."""
    bytes: int
    sha256: str
    argv: list[str] = []
    """The command that made it; empty for files that are by-products of the run itself."""
    variant: str | None = None


class Record(_Struct, frozen=True, kw_only=True):
    schema_version: int
    run_id: str
    problem: str
    step: str
    argv: list[str]
    started_utc: str
    seconds: float
    complete: bool
    """False: the run was interrupted, or stopped before its last variant."""
    source: Source
    hardware: Hardware
    software: dict[str, str | None]
    config: dict[str, Any]
    ceilings: Ceilings = Ceilings()
    variants: dict[str, VariantResult] = {}
    claims: list[Claim] = []
    artifacts: list[Artifact] = []
    seal: str = ""
    """sha256 of the file's bytes with this field empty; `dumps` sets it, `load` refuses a file that it does not fit."""

    @property
    def gpu_name(self) -> str | None:
        return self.hardware.gpus[0].name if self.hardware.gpus else None


def problems_of(record: Record) -> list[str]:
    """Every rule that the record breaks, one sentence each. An empty list: it is valid."""
    found = []
    if record.schema_version != SCHEMA_VERSION:
        found.append(f"schema_version is {record.schema_version}, this library reads {SCHEMA_VERSION}")
    for slug, variant in record.variants.items():
        if variant.status != "ok" and not variant.message:
            found.append(f"variants.{slug}: status {variant.status} without a message")
        for name, case in variant.cases.items():
            place = f"variants.{slug}.cases.{name}"
            if case.status != "ok" and case.timing is not None:
                found.append(f"{place}: status {case.status} carries a time")
            if case.status != "ok" and variant.status == "ok":
                found.append(f"{place}: status {case.status} inside a variant that is ok")
            if case.status == "ok" and case.correctness is not None:
                value = case.correctness.value
                if value is None or not value <= case.correctness.limit:
                    found.append(f"{place}: ok with an error of {value} above the limit {case.correctness.limit}")
            if case.timing is not None and not case.timing.samples_us:
                found.append(f"{place}: a timing without samples")
            if case.timing is not None and min(case.timing.samples_us, default=1.0) <= 0:
                found.append(f"{place}: a sample that is not positive")
    for claim in record.claims:
        if claim.holds is None and not claim.reason:
            found.append(f"claims.{claim.name}: undecided without a reason")
    return found


_SEAL = re.compile(rb'"seal": "([0-9a-f]*)"\n}\n\Z')


def dumps(record: Record) -> bytes:
    """The bytes of `record.json`, sealed: changing any one of them later makes `load` fail."""
    unsealed = msgspec.structs.replace(record, seal="")
    content = msgspec.json.format(msgspec.json.encode(unsealed), indent=1) + b"\n"
    return _SEAL.sub(b'"seal": "%s"\n}\n' % hashlib.sha256(content).hexdigest().encode(), content)


def _sealed(content: bytes) -> bool:
    found = _SEAL.search(content)
    empty = _SEAL.sub(b'"seal": ""\n}\n', content)
    return found is not None and found[1].decode() == hashlib.sha256(empty).hexdigest()


def load(path: Path) -> Record:
    """Read `record.json` (or the run folder that holds it).

    Raises RecordError if it is not there, is no JSON of this schema, was edited after it was written, or breaks a rule.
    """
    file = path / "record.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
        record = msgspec.json.decode(content, type=Record)
    except OSError as error:
        raise RecordError(f"{file}: cannot be read ({error.strerror}).") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"{file}: is no record of a run ({error}).") from error
    if not _sealed(content):
        raise RecordError(f"{file}: was edited after it was written (its seal does not fit its content).")
    if broken := problems_of(record):
        raise RecordError(f"{file}: {'; '.join(broken)}.")
    return record


def save(record: Record, folder: Path) -> Path:
    """Write `folder/record.json` whole or not at all.

    Raises RecordError if the record breaks a rule or the disk refuses it; then no file is left behind.
    """
    if broken := problems_of(record):
        raise RecordError(f"{folder}: {'; '.join(broken)}.")
    return write_whole(folder / "record.json", dumps(record))


def write_whole(file: Path, content: bytes) -> Path:
    """Write beside the file, flush to disk, rename: a reader sees the old file or the new one, never half of one."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(f"{file}: cannot be written ({error.strerror}).") from error
    return file


def artifact(folder: Path, file: Path, argv: list[str] | None = None, variant: str | None = None) -> Artifact:
    """Describe a file that lies in the run folder."""
    content = file.read_bytes()
    return Artifact(
        path=file.relative_to(folder).as_posix(),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        argv=argv or [],
        variant=variant,
    )
