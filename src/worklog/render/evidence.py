"""What a page may read: recorded runs, and the small files in their folders.

`Run`, `VariantView` and `CaseView` give dotted access to a record, every number as a Quantity that knows its run.
Asking for something that a record does not hold is a PageError that says what there is instead.
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import msgspec

from worklog import record as records
from worklog.record import CaseResult, Record, VariantResult
from worklog.render import artifacts
from worklog.render.quantity import BYTE_RATE, BYTES, ENERGY, FLOP, FLOP_RATE, TIME, UNITS, PageError, Quantity, tagged


class CaseView:
    """One case of one variant: its times, bytes, error, memory and energy."""

    def __init__(self, name: str, variant: VariantView, result: CaseResult) -> None:
        self._result = result
        self._variant = variant
        self.name = name
        self.variant = variant.slug
        self.status = result.status
        self.message = result.message

    def _number(self, value: float | None, what: str, scale: float = 1.0, dims: Any = (0, 0, 0, 0)) -> Quantity:
        if value is None:
            place = f"{self._variant.run.id}: {self.variant}.{self.name}"
            why = self.message or f"status {self.status}"
            raise PageError(f"{place} has no {what} ({why})")
        return Quantity(value, scale, dims, self._variant.run.origin)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(n for n in dir(self) if not n.startswith("_"))
        raise PageError(f"{self.variant}.{self.name} has no {name!r}; a case has: {known}")

    @property
    def _timing(self) -> records.Timing | None:
        timing = self._result.timing
        if timing and timing.profiled:
            raise PageError(f"{self.variant}.{self.name} was timed under a profiler; such a time is no result")
        return timing

    def _time(self, of: str) -> Quantity:
        value = getattr(self._timing, of) if self._timing else None
        return self._number(value, "time", 1e-3 if of.endswith("_ms") else 1e-6, TIME)

    @property
    def median_us(self) -> Quantity:
        return self._time("median_us")

    @property
    def median_ms(self) -> Quantity:
        return self._time("median_ms")

    @property
    def p10_us(self) -> Quantity:
        return self._time("p10_us")

    @property
    def p90_us(self) -> Quantity:
        return self._time("p90_us")

    @property
    def spread(self) -> Quantity:
        """(p90 - p10) / median."""
        return (self.p90_us - self.p10_us) / self.median_us

    @property
    def samples(self) -> Quantity:
        return self._number(len(self._timing.samples_us) if self._timing else None, "samples")

    @property
    def samples_us(self) -> list[Quantity]:
        values = self._timing.samples_us if self._timing else []
        return [self._number(value, "samples", 1e-6, TIME) for value in values]

    @property
    def method(self) -> str | None:
        return self._timing.method if self._timing else None

    @property
    def flush_l2(self) -> bool | None:
        return self._timing.flush_l2 if self._timing else None

    @property
    def bytes(self) -> Quantity:
        """The least that one call must move."""
        return self._number(self._result.bytes or None, "byte count", 1.0, BYTES)

    @property
    def flop(self) -> Quantity:
        return self._number(self._result.flop or None, "operation count", 1.0, FLOP)

    @property
    def bytes_per_s(self) -> Quantity:
        return self.bytes / self.median_us

    @property
    def flop_per_s(self) -> Quantity:
        return self.flop / self.median_us

    @property
    def fraction(self) -> Quantity:
        """bytes_per_s over the copy bandwidth that the same run measured."""
        return self.bytes_per_s / self._variant.run.ceiling("copy_bytes_per_s")

    @property
    def flop_fraction(self) -> Quantity:
        """flop_per_s over the matrix-product rate that the same run measured."""
        return self.flop_per_s / self._variant.run.ceiling("matmul_flop_per_s")

    @property
    def error(self) -> Quantity:
        """The measured correctness value."""
        found = self._result.correctness
        return self._number(found.value if found else None, "correctness value")

    @property
    def error_limit(self) -> Quantity:
        found = self._result.correctness
        return self._number(found.limit if found else None, "correctness limit")

    @property
    def memory(self) -> Any:
        """allocated_bytes, reserved_bytes, device_bytes, baseline_bytes, largest_temporary_bytes."""
        if self._result.memory is None:
            self._number(None, "memory measurement")
        return tagged("", msgspec.to_builtins(self._result.memory), self._variant.run.origin)

    @property
    def energy(self) -> Any:
        """joules_per_call."""
        if self._result.energy is None:
            self._number(None, "energy measurement")
        origin = self._variant.run.origin
        return {"joules_per_call": Quantity(self._result.energy.joules_per_call, 1.0, ENERGY, origin)}  # type: ignore[union-attr]


class VariantView:
    """One variant of a run; its cases by name: `run("...").bf16_eager.decode` or `...["linear m=1"]`."""

    def __init__(self, slug: str, run: Run, result: VariantResult) -> None:
        self.run = run
        self.slug = slug
        self.status = result.status
        self.message = result.message
        self.packages = dict(result.packages)
        self.facts = tagged("", result.facts, run.origin)
        self.cases = [CaseView(name, self, case) for name, case in result.cases.items()]

    def __getattr__(self, name: str) -> CaseView:
        for case in self.__dict__.get("cases", []):
            if case.name == name:
                return case  # type: ignore[no-any-return]
        known = ", ".join(case.name for case in self.__dict__.get("cases", [])) or "none"
        why = f" ({self.status}: {self.message})" if self.__dict__.get("status") != "ok" else ""
        raise PageError(f"{self.run.id}: {self.slug} has no case {name!r}{why}; its cases: {known}")

    __getitem__ = __getattr__


class ClaimView:
    def __init__(self, claim: records.Claim, origin: frozenset[str]) -> None:
        scale, dims = UNITS.get(claim.unit, (1.0, (0, 0, 0, 0)))
        self.name, self.holds, self.reason, self.unit = claim.name, claim.holds, claim.reason, claim.unit
        self.measured = None if claim.measured is None else Quantity(claim.measured, scale, dims, origin)
        self.required = None if claim.required is None else Quantity(claim.required, scale, dims, origin)


class Run:
    """A recorded run."""

    def __init__(self, record: Record, folder: Path) -> None:
        self.origin = frozenset({record.run_id})
        self._folder = folder  # a page has no business with a Path
        self.id = record.run_id
        self.problem = record.problem
        self.step = record.step
        self.gpu = record.gpu_name or record.hardware.cpu
        self.date = record.started_utc[:10]
        self.command = shlex.join(record.argv)
        self.commit = record.source.commit
        self.seconds = Quantity(record.seconds, 1.0, TIME, self.origin)
        self.config = tagged("", record.config, self.origin)
        self.hardware = tagged("", msgspec.to_builtins(record.hardware), self.origin)
        self.software = dict(record.software)
        ceilings = record.ceilings
        self.ceilings = {
            key: Quantity(value, 1.0, dims, self.origin)
            for key, value, dims in (
                ("copy_bytes_per_s", ceilings.copy_bytes_per_s, BYTE_RATE),
                ("matmul_flop_per_s", ceilings.matmul_flop_per_s, FLOP_RATE),
            )
            if value is not None
        }
        self.claims = {claim.name: ClaimView(claim, self.origin) for claim in record.claims}
        self.artifacts = {artifact.path: artifact for artifact in record.artifacts}
        self.variants = [VariantView(slug, self, result) for slug, result in record.variants.items()]

    def ceiling(self, name: str) -> Quantity:
        if name not in self.ceilings:
            raise PageError(f"{self.id} measured no {name}")
        return self.ceilings[name]

    def pick(self, *slugs: str) -> list[VariantView]:
        """These variants, in this order: rows for table()."""
        return [getattr(self, slug) for slug in slugs]

    def __getattr__(self, name: str) -> VariantView:
        for variant in self.__dict__.get("variants", []):
            if variant.slug == name:
                return variant  # type: ignore[no-any-return]
        known = ", ".join(variant.slug for variant in self.__dict__.get("variants", [])) or "none"
        raise PageError(f"{self.__dict__.get('id')} has no variant {name!r}; its variants: {known}")

    __getitem__ = __getattr__


class Library:
    """The recorded runs that a page of `problem` may cite."""

    def __init__(self, root: Path, problem: str) -> None:
        self.root = root
        self.problem = problem
        self.used: dict[str, Run] = {}

    def run(self, run_id: str) -> Run:
        """The run `<run id>` of this problem, or `<problem>/<run id>` of another.

        Raises PageError if it is not there, is not valid, is incomplete, or was not made from a known, clean commit.
        """
        if run_id in self.used:
            return self.used[run_id]
        place = run_id if "/" in run_id else f"{self.problem}/{run_id}"
        folder = self.root / "reports" / place
        if not (folder / "record.json").is_file():
            raise PageError(f"there is no recorded run reports/{place}")
        try:
            record = records.load(folder)
        except records.RecordError as error:
            raise PageError(str(error).replace(f"{self.root}/", "")) from error
        if record.source.dirty is not False or not record.source.commit:
            state = "modified" if record.source.dirty else "unknown"
            raise PageError(f"reports/{place} was made from a tree in {state} state; commit, run again, cite that run")
        if not record.complete:
            raise PageError(f"reports/{place} is incomplete; an interrupted run is not cited")
        self.used[run_id] = Run(record, folder)
        return self.used[run_id]

    def file(self, run: str | Run, path: str) -> Path:
        """A file of a run folder. Raises PageError unless the record lists it with this very content."""
        run = self.run(run) if isinstance(run, str) else run
        listed = run.artifacts.get(path)
        if listed is None:
            raise PageError(f"{run.id} lists no artifact {path!r}; it lists: {', '.join(run.artifacts) or 'none'}")
        file = run._folder / path
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != listed.sha256:
            raise PageError(f"{run.id}: {path} is missing or not the file that the record describes")
        return file

    def evidence(self, run: str | Run, path: str, range_name: str | None = None) -> Any:
        """A JSON, CSV, .sqlite (nsys) or .ncu-rep of a run folder; its numbers are Quantities, units from keys' ends.

        A trace by torch.profiler (torch.*.json.gz), an allocator's snapshot (memory.*.json.gz), an export of nsys and a
        report of ncu are what worklog.traces makes of them; `range_name` is an NVTX range of an export of nsys.
        """
        run = self.run(run) if isinstance(run, str) else run
        return artifacts.quantities(self.file(run, path), path, run.artifacts[path].sha256, run.origin, range_name)
