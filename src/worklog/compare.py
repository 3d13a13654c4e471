"""`worklog compare`: records of one problem beside each other, as the JSON that the verb prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worklog.problem import ProblemError
from worklog.record import CaseResult, Ceilings, Record, Timing, load
from worklog.runner import usable


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """The first record against the others; against the newest one of each GPU in reports/ where it is the only one.

    Keys: problem; baseline (the first record's first variant); records, the first one first [{run_id, device, gpu, cpu,
    driver, torch, started_utc, commit, dirty, complete, config, copy_bytes_per_s, matmul_flop_per_s, apart (why its
    times are not set against the first one's, or None)}]; cases [{case, variant, results, comparisons}]; claims [{name,
    unit, results [{run_id, holds, measured, required, reason}]}]; notes, sentences.
    results [{run_id, status, method, median_us, p10_us, p90_us, samples, ratio_to_baseline (of the times in the same
    record), copy_fraction, matmul_fraction}]: fractions are of the ceilings that the same run measured, least bytes or
    operations over the median time; so they compare over GPUs as times do not.
    comparisons [{run_id, time_ratio, time_beyond_spread, ceiling, fraction_difference, fraction_beyond_spread}] of the
    first record with each that ran the same work on the same kind of device; ratio and difference are this over, this
    less the other; `ceiling` is the one that this record comes closer to. Beyond the spread: p10 .. p90 of the two do
    not overlap; a ceiling's own spread is in no record.
    Raises RecordError for what is no record, ProblemError for records of several problems.
    """
    records = [load(path) for path in paths]
    this, *others = records
    if len(records) == 1:
        others = _references(this)
    names = {record.problem for record in (this, *others)}
    if len(names) > 1:
        raise ProblemError(f"The records are of different problems ({', '.join(sorted(names))}); give those of one.")
    others = [other for other in others if other.run_id != this.run_id]
    if len(records) > 1 and not others:
        raise ProblemError(f"{paths[0]}: every record given is {this.run_id}; give another one beside it, or it alone.")
    every = [this, *others]
    known = {record.run_id: _apart(this, record) for record in every}
    cases = dict.fromkeys((c, slug) for record in every for slug, v in record.variants.items() for c in v.cases)
    order = {case: at for at, case in enumerate(dict.fromkeys(case for case, _ in cases))}
    return {
        "problem": this.problem,
        "baseline": (baseline := next(iter(this.variants), "")),
        "records": [{**_machine(record), "apart": known[record.run_id]} for record in every],
        "cases": [
            {
                "case": case,
                "variant": slug,
                "results": [_result(record, slug, case, baseline) for record in every if _case(record, slug, case)],
                "comparisons": [
                    found
                    for other in others
                    if known[other.run_id] is None and (found := _comparison(this, other, slug, case))
                ],
            }
            for case, slug in sorted(cases, key=lambda pair: order[pair[0]])
        ],
        "claims": _claims(every),
        "notes": _notes(this, others, known),
    }


def _references(this: Record) -> list[Record]:
    """The newest record of each GPU, those of the same config before others."""
    found: dict[str | None, Record] = {}
    ranked = sorted(usable(this.problem), key=lambda r: (r.config == this.config, r.started_utc), reverse=True)
    for record in ranked:
        if record.run_id != this.run_id:
            found.setdefault(record.gpu_name, record)
    return list(found.values())


def _machine(record: Record) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "device": record.config["device"],
        "gpu": record.gpu_name,
        "cpu": record.hardware.cpu,
        "driver": record.hardware.driver,
        "torch": record.software.get("torch"),
        "started_utc": record.started_utc,
        "commit": record.source.commit,
        "dirty": record.source.dirty,
        "complete": record.complete,
        "config": record.config["name"],
        "copy_bytes_per_s": record.ceilings.copy_bytes_per_s,
        "matmul_flop_per_s": record.ceilings.matmul_flop_per_s,
    }


def _apart(this: Record, other: Record) -> str | None:
    """Why no time of theirs may be set against one another; None: they may."""
    one, two = this.config["device"], other.config["device"]
    if one != two:
        return f"one ran on the {_device(one)}, the other on the {_device(two)}"
    if other.config != this.config:
        keys = sorted(key for key in {**this.config, **other.config} if this.config.get(key) != other.config.get(key))
        differing = [f"{key} {this.config.get(key)} and {other.config.get(key)}" for key in keys if key != "name"]
        return f"their configs differ: {', '.join(differing or ['name'])}"
    return None


def _device(name: str) -> str:
    return {"cuda": "GPU", "cpu": "CPU"}.get(name, name)


def _case(record: Record, slug: str, case: str) -> CaseResult | None:
    variant = record.variants.get(slug)
    return variant.cases.get(case) if variant else None


def _timing(case: CaseResult | None) -> Timing | None:
    """A time taken under a profiler is no result."""
    return case.timing if case and case.timing and not case.timing.profiled else None


def _fraction(result: CaseResult, ceilings: Ceilings, of: str, us: float) -> float | None:
    """Of the ceiling `of`, at this time of a call; None: the run did not measure it, or the case states no amount."""
    amount, ceiling = (
        (result.bytes, ceilings.copy_bytes_per_s) if of == "copy" else (result.flop, ceilings.matmul_flop_per_s)
    )
    return amount / (us * 1e-6) / ceiling if amount and ceiling else None


def _result(record: Record, slug: str, name: str, baseline: str) -> dict[str, Any]:
    case = _case(record, slug, name)
    assert case is not None
    taken, first = _timing(case), _timing(_case(record, baseline, name))
    return {
        "run_id": record.run_id,
        "status": case.status,
        "method": taken.method if taken else None,
        "median_us": taken.median_us if taken else None,
        "p10_us": taken.p10_us if taken else None,
        "p90_us": taken.p90_us if taken else None,
        "samples": len(taken.samples_us) if taken else 0,
        "ratio_to_baseline": taken.median_us / first.median_us if taken and first else None,
        "copy_fraction": _fraction(case, record.ceilings, "copy", taken.median_us) if taken else None,
        "matmul_fraction": _fraction(case, record.ceilings, "matmul", taken.median_us) if taken else None,
    }


def _comparison(this: Record, other: Record, slug: str, name: str) -> dict[str, Any] | None:
    one, two = _case(this, slug, name), _case(other, slug, name)
    if one is None or two is None or (one.bytes, one.flop) != (two.bytes, two.flop):
        return None
    mine, theirs = _timing(one), _timing(two)
    if mine is None or theirs is None:
        return None
    shares = {of: _fraction(one, this.ceilings, of, mine.median_us) for of in ("copy", "matmul")}
    ceiling = max(shares, key=lambda of: shares[of] or 0.0)
    share = shares[ceiling]
    against = _fraction(two, other.ceilings, ceiling, theirs.median_us)
    known = share is not None and against is not None
    spans = [
        [_fraction(case, record.ceilings, ceiling, us) or 0.0 for us in (taken.p90_us, taken.p10_us)]
        for case, record, taken in ((one, this, mine), (two, other, theirs))
    ]
    return {
        "run_id": other.run_id,
        "time_ratio": mine.median_us / theirs.median_us,
        "time_beyond_spread": _beyond((mine.p10_us, mine.p90_us), (theirs.p10_us, theirs.p90_us)),
        "ceiling": ceiling if known else None,
        "fraction_difference": share - against if share is not None and against is not None else None,
        "fraction_beyond_spread": _beyond(*spans) if known else None,
    }


def _beyond(one: Sequence[float], two: Sequence[float]) -> bool:
    return one[1] < two[0] or two[1] < one[0]


def _claims(records: Sequence[Record]) -> list[dict[str, Any]]:
    units = {claim.name: claim.unit for record in reversed(records) for claim in record.claims}
    names = dict.fromkeys(claim.name for record in records for claim in record.claims)
    return [
        {
            "name": name,
            "unit": units[name],
            "results": [
                {
                    "run_id": record.run_id,
                    "holds": claim.holds,
                    "measured": claim.measured,
                    "required": claim.required,
                    "reason": claim.reason,
                }
                for record in records
                for claim in record.claims
                if claim.name == name
            ],
        }
        for name in names
    ]


def _notes(this: Record, others: Sequence[Record], apart: dict[str, str | None]) -> list[str]:
    found = []
    if not others:
        found.append(f"reports/{this.problem} holds no other whole record of a GPU: there is nothing to compare with.")
    for other in others:
        if (reason := apart[other.run_id]) is not None:
            found.append(f"Times of {this.run_id} and {other.run_id} are not set against one another: {reason}.")
            continue
        pairs = [
            (slug, name, _case(this, slug, name), case)
            for slug, variant in other.variants.items()
            for name, case in variant.cases.items()
        ]
        timed = [(s, n, one, two) for s, n, one, two in pairs if one and _timing(one) and _timing(two)]
        if changed := [f"{s} {n}" for s, n, one, two in timed if (one.bytes, one.flop) != (two.bytes, two.flop)]:
            found.append(f"Against {other.run_id} these state other bytes or operations: {', '.join(changed)}.")
        if methods := [f"{s} {n}" for s, n, one, two in timed if _method(one) != _method(two)]:
            found.append(f"Against {other.run_id} these were timed in another way: {', '.join(methods)}.")
    for record in (this, *others):
        if above := _above(record):
            found.append(
                f"{record.run_id} comes above its ceilings in {', '.join(above)}: its ceilings were measured too low, "
                "or these state more work than they do."
            )
        if not record.complete:
            found.append(f"{record.run_id} is incomplete: its run was interrupted.")
        if record.source.dirty is not False:
            found.append(f"{record.run_id} is of a modified or unknown tree, and is not to be cited.")
    return found


def _above(record: Record) -> list[str]:
    """Cases that did more than the run's own ceilings allow."""
    return [
        f"{slug} {name}"
        for slug, variant in record.variants.items()
        for name, case in variant.cases.items()
        if (taken := _timing(case))
        and any((_fraction(case, record.ceilings, of, taken.median_us) or 0) > 1 for of in ("copy", "matmul"))
    ]


def _method(case: CaseResult) -> tuple[str, bool] | None:
    return (case.timing.method, case.timing.flush_l2) if case.timing else None
