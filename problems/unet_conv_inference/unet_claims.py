"""What the worklog says about a machine, as numbers that a run bears out or not."""

from __future__ import annotations

from collections.abc import Callable

from worklog.record import CaseResult, Claim, Record

EAGER = ("eager", "eager_cudnn_benchmark", "eager_tf32_off")
COMPILED = ("compile", "compile_cudagraph", "compile_autotune")
CONVOLUTIONS = 35  # 25 in conv blocks, 5 around them, 2 down, 2 up, 1 at the end


class MissingError(Exception):
    """The run lacks what a claim needs."""


def case(record: Record, slug: str, name: str) -> CaseResult:
    variant = record.variants.get(slug)
    found = variant.cases.get(name) if variant else None
    if found is None or found.timing is None:
        raise MissingError(f"{slug} has no time for {name} in this run")
    return found


def median(record: Record, slug: str, name: str) -> float:
    """Microseconds."""
    timing = case(record, slug, name).timing
    assert timing
    return timing.median_us


def fastest(record: Record, slugs: tuple[str, ...], name: str) -> float:
    """Least median in microseconds over these variants; all of them must have run, or the fastest may be missing."""
    return min(median(record, slug, name) for slug in slugs)


def claim(name: str, unit: str, required: float, measure: Callable[[], float], at_least: bool = True) -> Claim:
    try:
        measured = measure()
    except MissingError as gap:
        return Claim(name=name, holds=None, measured=None, required=required, unit=unit, reason=str(gap))
    holds = measured >= required if at_least else measured <= required
    return Claim(name=name, holds=holds, measured=measured, required=required, unit=unit)


def gpu_claims(record: Record) -> list[Claim]:
    def floor_us(slug: str, name: str) -> float:
        """What reading the least bytes takes at the copy bandwidth of this run."""
        if record.ceilings.copy_bytes_per_s is None:
            raise MissingError("the run has no copy ceiling")
        return 1e6 * case(record, slug, name).bytes / record.ceilings.copy_bytes_per_s

    return [
        claim(
            "eager: a step over reading its weights once",
            "x",
            15.0,
            lambda: fastest(record, EAGER, "step") / floor_us("eager", "step"),
        ),
        claim(
            "fastest torch.compile: a step over reading its weights once",
            "x",
            8.0,
            lambda: fastest(record, COMPILED, "step") / floor_us("compile", "step"),
        ),
        claim(
            "half the bytes do not make torch.compile 1.5 times faster",
            "x",
            1.5,
            lambda: (
                fastest(record, COMPILED, "step") / fastest(record, tuple(f"{slug}_bf16" for slug in COMPILED), "step")
            ),
            at_least=False,
        ),
    ]


def cpu_claims(record: Record) -> list[Claim]:
    def fact(slug: str, name: str) -> float:
        variant = record.variants.get(slug)
        if variant is None or name not in variant.facts:
            raise MissingError(f"{slug} has no {name} in this run")
        return float(variant.facts[name])

    return [
        claim(
            "torch.compile leaves every convolution to a library call",
            "convolutions",
            CONVOLUTIONS,
            lambda: fact("compile", "library_convolutions"),
        ),
        claim("one step runs more than a hundred operators", "operators", 100, lambda: fact("eager", "operator_count")),
        claim(
            "most of what the scales and shifts are made from is the same in every step",
            "",
            0.5,
            lambda: fact("eager", "film_unchanged_share"),
        ),
    ]
