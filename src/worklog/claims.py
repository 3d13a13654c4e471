"""What a problem's claims are made of: numbers of a record, or the reason why it lacks them."""

from __future__ import annotations

from collections.abc import Callable

from worklog.record import CaseResult, Claim, Record


class MissingError(Exception):
    """The run lacks what a claim needs."""


def case(record: Record, slug: str, name: str) -> CaseResult:
    """A case that has a time. Raises MissingError."""
    variant = record.variants.get(slug)
    found = variant.cases.get(name) if variant else None
    if found is None or found.timing is None:
        raise MissingError(f"{slug} has no time for {name} in this run")
    return found


def median(record: Record, slug: str, name: str) -> float:
    """Of the time of a call, in microseconds. Raises MissingError."""
    timing = case(record, slug, name).timing
    assert timing
    return timing.median_us


def error(record: Record, slug: str, name: str) -> float:
    """Against the reference, in the case's own metric. Raises MissingError."""
    found = case(record, slug, name).correctness
    if found is None or found.value is None:
        raise MissingError(f"{slug} has no error for {name} in this run")
    return found.value


def fastest(record: Record, slugs: tuple[str, ...], name: str) -> float:
    """Least median in microseconds over these variants; all of them must have run, or the fastest may be missing."""
    return min(median(record, slug, name) for slug in slugs)


def claim(name: str, unit: str, required: float, measure: Callable[[], float], at_least: bool = True) -> Claim:
    """`measure()` against `required`, at least or at most; undecided where it raises MissingError."""
    try:
        measured = measure()
    except MissingError as gap:
        return Claim(name=name, holds=None, measured=None, required=required, unit=unit, reason=str(gap))
    holds = measured >= required if at_least else measured <= required
    return Claim(name=name, holds=holds, measured=measured, required=required, unit=unit)
