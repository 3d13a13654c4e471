"""What the worklog says about a machine, as numbers that a run bears out or not."""

from __future__ import annotations

from collections.abc import Callable

from worklog.claims import MissingError, case, claim, error, fastest, median
from worklog.record import Claim, Record

EAGER = ("eager", "eager_cudnn_benchmark", "eager_tf32_off")
COMPILED = ("compile", "compile_cudagraph", "compile_autotune")
COMPILED_BF16 = tuple(f"{slug}_bf16" for slug in COMPILED)
FIX, FIX_BF16 = "persistent", "persistent_bf16"
CONVOLUTIONS = 35  # 25 in conv blocks, 5 around them, 2 down, 2 up, 1 at the end


def gpu_claims(record: Record) -> list[Claim]:
    def floors(slug: str, step_us: Callable[[], float]) -> float:
        """How many times longer than reading the slug's least bytes at the copy bandwidth of this run."""
        if record.ceilings.copy_bytes_per_s is None:
            raise MissingError("the run has no copy ceiling")
        return step_us() / (1e6 * case(record, slug, "step").bytes / record.ceilings.copy_bytes_per_s)

    def ours(slug: str = FIX, name: str = "step") -> float:
        return median(record, slug, name)

    def theirs(slugs: tuple[str, ...], name: str = "step") -> float:
        return fastest(record, slugs, name)

    at_least: list[tuple[str, float, Callable[[], float]]] = [
        ("eager: a step over reading its weights once", 15, lambda: floors("eager", lambda: theirs(EAGER))),
        (
            "fastest torch.compile: a step over reading its weights once",
            8,
            lambda: floors("compile", lambda: theirs(COMPILED)),
        ),
        ("fix: a step's speed over the fastest torch.compile", 8, lambda: theirs(COMPILED) / ours()),
        ("fix in bf16: a step's speed over torch.compile in bf16", 14, lambda: theirs(COMPILED_BF16) / ours(FIX_BF16)),
        ("fix: a sampling's speed over eager", 25, lambda: theirs(EAGER, "sampling") / ours(name="sampling")),
    ]
    at_most: list[tuple[str, float, Callable[[], float]]] = [
        ("torch.compile: gain of bf16 weights", 1.5, lambda: theirs(COMPILED) / theirs(COMPILED_BF16)),
        ("fix: a step over reading its weights once", 2, lambda: floors(FIX, ours)),
        ("fix in bf16: a step over reading its weights once", 2.5, lambda: floors(FIX_BF16, lambda: ours(FIX_BF16))),
        ("fix: error of a step over eager's", 1, lambda: error(record, FIX, "step") / error(record, "eager", "step")),
    ]
    return [
        *(claim(name, "x", required, measure) for name, required, measure in at_least),
        *(claim(name, "x", required, measure, at_least=False) for name, required, measure in at_most),
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
