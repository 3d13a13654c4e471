"""What the worklog says about a machine, as numbers that a run bears out or not."""

from __future__ import annotations

from worklog.claims import MissingError, case, claim, fastest
from worklog.record import Claim, Record

LARGEST_WEIGHT_BYTES = 128256 * 4096  # the output projection in float8
BF16 = ("bf16_eager", "bf16_compile", "bf16_cudagraph", "bf16_cudagraph_cd")
BF16_PREFILL = ("bf16_eager", "bf16_compile")
TORCHAO = ("torchao_0_14_1_cudagraph_cd", "torchao_0_18_0_cudagraph_cd")
MANY_TOKENS = (2, 4, 8, 16, 32)
LINEARS = ("wqkv", "wo", "w1", "w2", "output")


def gpu_claims(record: Record) -> list[Claim]:
    copy = record.ceilings.copy_bytes_per_s

    def fraction(slug: str, name: str) -> float:
        if copy is None:
            raise MissingError("the run has no copy ceiling")
        return case(record, slug, name).bytes_per_s / copy

    def decode_us(slug: str) -> float:
        return case(record, slug, "decode").timing.median_us

    def linears_over_bf16() -> float:
        return max(
            case(record, "float8_fused", f"linear_{n}_m{m}").timing.median_us
            / case(record, "bf16_eager", f"linear_{n}_m{m}").timing.median_us
            for n in LINEARS
            for m in MANY_TOKENS
        )

    def memory_over_bf16() -> float:
        def peak(slug: str, name: str) -> float:
            return case(record, slug, name).memory.allocated_bytes

        return max(peak("float8_fused", n) / peak("bf16_eager", n) for n in ("decode", "prefill"))

    def largest_temporary() -> float:
        sizes = [case(record, "float8_fused", n).memory.largest_temporary_bytes for n in ("decode", "prefill")]
        return max(sizes) / LARGEST_WEIGHT_BYTES

    def worst_linear_error() -> float:
        names = (f"linear_{n}_m{m}" for n in LINEARS for m in (1, *MANY_TOKENS))
        return max(case(record, "float8_fused", name).correctness.value for name in names)

    return [
        claim(
            "0.13.0 decodes slower than bf16",
            "x",
            5.0,
            lambda: decode_us("torchao_0_13_0_cudagraph_cd") / fastest(record, BF16, "decode"),
        ),
        claim(
            "0.18.0 in CUDA graphs still decodes slower than bf16",
            "x",
            1.0,
            lambda: decode_us("torchao_0_18_0_cudagraph") / fastest(record, BF16, "decode"),
        ),
        claim(
            "fix: decode speed over the fastest torchao release",
            "x",
            1.0,
            lambda: fastest(record, TORCHAO, "decode") / decode_us("float8_fused"),
        ),
        claim(
            "fix: decode speed over the fastest bf16",
            "x",
            1.8,
            lambda: fastest(record, BF16, "decode") / decode_us("float8_fused"),
        ),
        claim("fix: decode, share of copy bandwidth", "", 0.85, lambda: fraction("float8_fused", "decode")),
        claim(
            "fix: single linears at one token, least share of copy bandwidth",
            "",
            0.90,
            lambda: min(fraction("float8_fused", f"linear_{n}_m1") for n in LINEARS),
        ),
        claim(
            "fix: single linears at 2 to 32 tokens, longest time over bf16", "x", 1.0, linears_over_bf16, at_least=False
        ),
        claim("fix: peak allocated over bf16, decode and prefill", "x", 0.56, memory_over_bf16, at_least=False),
        claim("fix: largest temporary over the largest weight", "", 0.05, largest_temporary, at_least=False),
        claim(
            "fix: prefill time over the fastest bf16",
            "x",
            1.0,
            lambda: case(record, "float8_fused", "prefill").timing.median_us / fastest(record, BF16_PREFILL, "prefill"),
            at_least=False,
        ),
        claim("fix: worst error of a single linear", "", 4e-3, worst_linear_error, at_least=False),
    ]


def cpu_claims(record: Record) -> list[Claim]:
    def fact(slug: str, name: str) -> float:
        variant = record.variants.get(slug)
        if variant is None or name not in variant.facts:
            raise MissingError(f"{slug} has no {name} in this run")
        value = variant.facts[name]
        return float(len(value) if isinstance(value, list) else value)

    def temporary() -> float:
        """Largest block that decoding allocates, in bytes a weight element of the largest layer."""
        found = case(record, "torchao_0_13_0_eager", "decode").memory.largest_temporary_bytes
        return found / (record.config["vocab"] * record.config["dim"])

    old, new = "torchao_0_13_0_eager", "torchao_0_14_1_eager"
    return [
        claim(
            "0.13.0 hides the dequantisation in one opaque operator",
            "operators",
            1,
            lambda: fact(old, "opaque_operators"),
        ),
        claim(
            "0.14.1 leaves the compiler operators that it can fuse",
            "opaque operators",
            0,
            lambda: fact(new, "opaque_operators"),
            at_least=False,
        ),
        claim(
            "0.13.0 moves 29 bytes a weight element where bf16 moves 2",
            "bytes",
            29,
            lambda: fact(old, "eager_bytes_per_element"),
        ),
        claim("0.13.0 allocates float32 copies of the largest weight", "bytes an element", 4, temporary),
    ]
