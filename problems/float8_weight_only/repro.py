"""Float8 weight-only quantisation halves the bytes of a weight, so decoding one token should take half the time.

With torchao 0.13.0 it takes many times longer. This file declares what is measured; WORKLOG.md tells what it means.

    python problems/float8_weight_only/repro.py                # the same run as: worklog repro float8_weight_only
    python problems/float8_weight_only/repro.py --variant bf16_eager --variant float8_fused
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worklog.problem import Case, Config, Variant, Workload
from worklog.record import Claim, Record

if TYPE_CHECKING:
    from torch import Tensor, nn

TITLE = "torchao 0.13.0 float8 weight-only decodes many times slower than bfloat16"
VERSIONS = ("0.13.0", "0.14.1", "0.18.0")
MODES = {"eager": None, "compile": "default", "cudagraph": "reduce-overhead", "cudagraph_cd": "reduce-overhead"}
LINEAR_TOKENS = (1, 2, 4, 8, 16, 32, 2048)
ROTATED_BYTES = 600_000_000  # weights that stand between two uses of one: ten times the L2 of an H200
MODEL_LIMIT = 0.05  # error of the logits: what bfloat16 activations cost over 32 layers, twice
LINEAR_LIMIT = 4e-3  # error of one linear: bfloat16 rounding of its result costs 1.7e-3
DYNAMIC_LIMIT = 0.2  # activations rounded to 4 significant bits in every linear


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Config):
    """Shapes as in worklog.workloads.llama; `layers` may be fewer than the model's, which scales the decoder only."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    decode_position: int
    decode_cache: int
    prefill_tokens: int
    linears: bool
    seed: int = 0


LLAMA_8B = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256}
TINY = {"dim": 256, "heads": 8, "kv_heads": 2, "hidden": 512, "vocab": 1024}
TOKENS = {"decode_position": 128, "decode_cache": 256, "prefill_tokens": 2048}
CONFIGS = (
    DecoderConfig(name="llama_8b", device="cuda", layers=32, linears=True, **LLAMA_8B, **TOKENS),
    DecoderConfig(name="llama_8b_4_layers", device="cuda", layers=4, linears=False, **LLAMA_8B, **TOKENS),
    DecoderConfig(
        name="tiny",
        device="cpu",
        layers=2,
        linears=False,
        **TINY,
        decode_position=20,
        decode_cache=64,
        prefill_tokens=32,
    ),
)


def _variants() -> Iterator[Variant]:
    cuda = ("cuda",)
    both = ("cpu", "cuda")
    yield Variant(slug="bf16_eager", summary="baseline: bfloat16, eager", options={"prefill": True, "linears": True})
    yield Variant(
        slug="bf16_compile", summary="torch.compile", devices=cuda, options={"mode": "compile", "prefill": True}
    )
    yield Variant(
        slug="bf16_cudagraph", summary="torch.compile with CUDA graphs", devices=cuda, options={"mode": "cudagraph"}
    )
    yield Variant(
        slug="bf16_cudagraph_cd",
        summary="the same with coordinate descent, the flag that torchao turns on for the whole process",
        devices=cuda,
        options={"mode": "cudagraph_cd"},
    )
    for version in VERSIONS:
        for mode in MODES:
            yield Variant(
                slug=f"torchao_{version.replace('.', '_')}_{mode}",
                summary=f"float8 weight-only of torchao {version}, {mode}",
                needs={"torchao": version},
                devices=both if mode == "eager" else cuda,
                options={"quantize": "weight_only", "mode": mode, "prefill": mode == "eager"},
            )
    yield Variant(
        slug="torchao_0_18_0_own_flags",
        summary="float8 weight-only of torchao 0.18.0, CUDA graphs, with all the inductor flags that quantize_ sets",
        needs={"torchao": "0.18.0"},
        devices=cuda,
        options={"quantize": "weight_only", "mode": "cudagraph", "own_flags": True},
    )
    yield Variant(
        slug="torchao_0_18_0_dynamic",
        summary="float8 weights and activations of torchao 0.18.0, CUDA graphs: another numeric contract",
        needs={"torchao": "0.18.0"},
        devices=cuda,
        options={"quantize": "dynamic", "mode": "cudagraph", "limit": DYNAMIC_LIMIT},
    )
    for slug, fixes, what in (
        ("bisect_none", (), "as released"),
        ("bisect_scale", ("scale",), "with the scale left unexpanded (torchao pull request 2950)"),
        ("bisect_op", ("op",), "with a traceable function for the opaque operator (torchao pull request 2961)"),
        ("bisect_both", ("scale", "op"), "with both"),
    ):
        yield Variant(
            slug=slug,
            summary=f"torchao 0.13.0, CUDA graphs and coordinate descent, {what}",
            needs={"torchao": "0.13.0"},
            devices=both,
            options={"quantize": "weight_only", "mode": "cudagraph_cd", "fixes": fixes},
        )
    yield Variant(
        slug="float8_linear",
        summary="our float8 linear swapped into the model, torch.compile with CUDA graphs",
        devices=cuda,
        options={"quantize": "linears", "mode": "cudagraph"},
    )
    yield Variant(
        slug="float8_fused",
        summary="our float8 linear with norms, activation and residuals inside, one CUDA graph",
        devices=cuda,
        options={"quantize": "blocks", "mode": "graph", "prefill": True, "linears": True},
    )
    yield Variant(
        slug="bf16_fused",
        summary="control: the same kernels on bfloat16 weights, to tell fusion from bytes",
        devices=cuda,
        options={"quantize": "blocks_bf16", "mode": "graph"},
    )


VARIANTS = tuple(_variants())


def build(variant: Variant, config: DecoderConfig) -> Workload:
    """The decoder of `config` as `variant` runs it: decode, prefill and single linears, each with its reference."""
    import torch

    from worklog.workloads import llama

    mode = variant.options.get("mode", "eager") if config.device == "cuda" else "eager"
    torch._inductor.config.coordinate_descent_tuning = mode == "cudagraph_cd"
    names = ("dim", "layers", "heads", "kv_heads", "hidden", "vocab")
    shape = llama.LlamaShape(**{name: getattr(config, name) for name in names})
    model = quantize(llama.make(shape, config.decode_cache, config.device, seed=config.seed), variant)
    facts: dict[str, object] = {"coordinate_descent_tuning": torch._inductor.config.coordinate_descent_tuning}
    if variant.needs:
        from graphs import linear_facts

        facts |= linear_facts()
    wide = variant.options.get("quantize") in (None, "blocks_bf16")
    exact = unchanged if wide else dequantized
    weight_bytes = shape.linear_elements * (2 if wide else 1)
    output = shape.vocab * shape.dim  # the output projection works on the last token of a prompt alone

    def model_case(name: str, module: nn.Module, cache: int, tokens: Tensor, position: Tensor, **extra: object) -> Case:
        run = module if mode in ("eager", "graph") else torch.compile(module, mode=MODES[mode])

        def reference() -> Tensor:
            return llama.reference(shape, cache, tokens, position, exact, seed=config.seed)

        limit = variant.options.get("limit", MODEL_LIMIT)
        return Case(
            name=name, run=lambda: run(tokens, position), reference=reference, limit=limit, memory=True,
            bytes=weight_bytes, flop=2 * (tokens.shape[1] * (shape.linear_elements - output) + output),
            graph=mode == "graph", **extra,
        )  # fmt: skip

    generator = torch.Generator(device=config.device).manual_seed(config.seed)
    prompt = torch.randint(config.vocab, (1, config.prefill_tokens), generator=generator, device=config.device)
    position = torch.tensor([config.decode_position], device=config.device)
    cases = [model_case("decode", model, config.decode_cache, prompt[:, :1], position, samples=30, repeat=8)]
    if variant.options.get("prefill"):
        longer = with_cache(model, config)
        everywhere = torch.arange(config.prefill_tokens, device=config.device)
        cases.append(model_case("prefill", longer, config.prefill_tokens, prompt, everywhere, samples=20, warmup=3))
    if variant.options.get("linears") and config.linears:
        cases.extend(linear_cases(shape.linears(), config.seed, float8=variant.slug != "bf16_eager"))
    return Workload(cases=cases, facts=facts)


def unchanged(_: str, weight: Tensor) -> Tensor:
    return weight


def dequantized(name: str, weight: Tensor) -> Tensor:
    """What float8 weight-only stands for: the e4m3 values times their row's scale, unrounded, in float32.

    The scale is taken in the weight's own bfloat16, as torchao takes it: another one would give other e4m3 values.
    """
    if "norm" in name or "embedding" in name:
        return weight
    import torch

    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).float()
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def quantize(model: nn.Module, variant: Variant) -> nn.Module:
    """Swap the model's linears in place, as the variant says. quantize_'s own global flags are left off (build sets the
    one that matters) but for the variant that is about them."""
    how = variant.options.get("quantize")
    if how in ("weight_only", "dynamic"):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, quantize_

        if fixes := variant.options.get("fixes"):
            from bisect_0_13 import apply

            apply(fixes)
        if how == "dynamic":
            from torchao.quantization import PerRow

            quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False))
        else:
            own_flags = variant.options.get("own_flags", False)
            quantize_(model, Float8WeightOnlyConfig(set_inductor_config=own_flags))
    elif how == "linears":
        from float8_linear import swap_linears

        swap_linears(model)
    elif how in ("blocks", "blocks_bf16"):
        from fused_block import swap_blocks

        swap_blocks(model, float8=how == "blocks")
    return model


def with_cache(model: nn.Module, config: DecoderConfig) -> nn.Module:
    """The same weights with caches for the whole prompt."""
    from worklog.workloads import llama

    caches = [name for name, _ in model.named_buffers() if name.endswith("_cache")]
    shared = [*model.parameters(), *(b for n, b in model.named_buffers() if n not in caches)]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for name in caches:
        old = twin.get_buffer(name)
        size = (*old.shape[:2], config.prefill_tokens, old.shape[3])
        owner = twin.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], llama.parameter(name, size, old.device, old.dtype, config.seed))
    twin.rope = llama.rope_table(model.shape, config.prefill_tokens, config.device)
    return twin


def linear_cases(linears: dict[str, tuple[int, int]], seed: int, float8: bool) -> Iterator[Case]:
    """Each linear of the model alone, for each number of tokens: one call after another in a CUDA graph, over so many
    weights that each comes from memory, not from L2."""
    for name, (rows, columns) in linears.items():
        if name == "w3":  # the same shape as w1
            continue
        for tokens in LINEAR_TOKENS:
            if tokens == LINEAR_TOKENS[-1] and name == "output":  # a prefill needs the logits of one token only
                continue
            yield linear_case(name, rows, columns, tokens, seed, float8)


@functools.lru_cache(maxsize=1)
def linear_weights(rows: int, columns: int, seed: int, float8: bool) -> list[tuple[Tensor, ...]]:
    """So many seeded weights of one shape that 600 MB lie between two uses of one; one shape is held at a time."""
    copies = max(2, -(-ROTATED_BYTES // (rows * columns * (1 if float8 else 2))))
    if not float8:
        return [(linear_weight(rows, columns, seed + i),) for i in range(copies)]
    import float8_linear

    return [float8_linear.quantize(linear_weight(rows, columns, seed + i)) for i in range(copies)]


def linear_weight(rows: int, columns: int, seed: int) -> Tensor:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cuda", dtype=torch.bfloat16) * columns**-0.5


def linear_case(name: str, rows: int, columns: int, tokens: int, seed: int, float8: bool) -> Case:
    import torch
    import torch.nn.functional as F

    weight_bytes = rows * columns * (1 if float8 else 2)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)

    def run() -> Tensor:
        weights = linear_weights(rows, columns, seed, float8)
        call = torch.ops.float8_weight_only.linear if float8 else F.linear
        results = [call(x, *weight) for weight in weights]
        return results[0]

    def reference() -> Tensor:
        weight = linear_weight(rows, columns, seed)
        return x.double() @ (dequantized("", weight) if float8 else weight).double().T

    return Case(
        name=f"linear_{name}_m{tokens}", run=run, reference=reference, limit=LINEAR_LIMIT, graph=True,
        calls=max(2, -(-ROTATED_BYTES // weight_bytes)), bytes=weight_bytes, flop=2 * tokens * rows * columns,
        samples=20, warmup=2,
    )  # fmt: skip


def claims(record: Record) -> list[Claim]:
    """On a GPU: the symptom, what a newer release leaves of it, what the fix must reach. On a CPU: what graphs show."""
    from claims import cpu_claims, gpu_claims

    return gpu_claims(record) if record.hardware.gpus else cpu_claims(record)


if __name__ == "__main__":
    from worklog.cli import problem_main

    problem_main(__file__)
