"""float8_weight_only on a CPU: its graphs and byte counts, its claims, its model."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkouts
import msgspec
import pytest

from worklog import problem, record
from worklog.measure.correctness import relative_error

Python = Callable[..., "subprocess.CompletedProcess[str]"]

torch = pytest.importorskip("torch")

NAME = "float8_weight_only"
FOLDER = checkouts.REPOSITORY / "problems" / NAME
OPAQUE = "torchao.dequantize_affine_float8.default"
CAST_AND_SCALE = ["aten._to_copy.default", "aten.mul.Tensor", "aten._to_copy.default"]

float8 = problem.load(NAME)
repro = float8.module
TINY = float8.config("tiny", "cpu")
LLAMA = next(c for c in float8.configs if c.name == "llama_8b")


# One run of what a CPU can show, each variant in a process of its own.


@pytest.fixture(scope="module")
def run(torchao: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one CPU run of all variants for the CPU."""
    out = tmp_path_factory.mktemp("out")
    argv = [sys.executable, "-m", "worklog.cli", "repro", NAME, "--device", "cpu", "--out", str(out), "--json"]
    # more threads than cores, with other tests beside, would take minutes
    variables = {
        "WORKLOG_PACKAGES": str(torchao),
        "WORKLOG_COMMIT": checkouts.COMMIT,
        "WORKLOG_DIRTY": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **variables}
    done = subprocess.run(argv, cwd=checkouts.REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (folder,) = out.iterdir()
    return folder


@pytest.fixture(scope="module")
def result(run: Path) -> record.Record:
    return record.load(run)


def test_every_variant_is_right_or_says_that_it_needs_a_gpu(result: record.Record) -> None:
    states = {slug: variant.status for slug, variant in result.variants.items()}
    assert set(states) == {variant.slug for variant in float8.variants}
    for variant in float8.variants:
        assert states[variant.slug] == ("ok" if "cpu" in variant.devices else "skipped")
    assert sum(status == "ok" for status in states.values()) == 8


@pytest.mark.parametrize(
    ("slug", "opaque", "eager"),
    [
        # cast 1 + 4, scale written in full 4, product 4 + 4 + 4, rounding 4 + 2, matrix product 2
        ("torchao_0_13_0_eager", [OPAQUE], 29),
        # the scale is broadcast: neither written in full nor read back
        ("torchao_0_14_1_eager", [], 21),
        ("torchao_0_18_0_eager", [], 21),
        ("bisect_none", [OPAQUE], 29),
        ("bisect_scale", [OPAQUE], 21),  # fewer bytes, and still none of the compiler's business
        ("bisect_op", [], 29),  # as many bytes, in operators that can fuse
        ("bisect_both", [], 21),
    ],
)
def test_graph_and_bytes(result: record.Record, slug: str, opaque: list[str], eager: int) -> None:
    facts = result.variants[slug].facts
    assert facts["opaque_operators"] == opaque
    assert facts["eager_bytes_per_element"] == eager
    assert facts["aten_graph"][-1] == "aten.mm.default"
    if opaque:
        assert facts["aten_graph"] == [OPAQUE, "aten.t.default", "aten.mm.default"]
    elif eager == 21:
        assert [op for op in facts["aten_graph"] if op not in ("aten.t.default", "aten.mm.default")] == CAST_AND_SCALE
    else:
        assert {"aten.expand.default", "aten.clone.default"} < set(facts["aten_graph"])  # what repeat_interleave became


def test_both_fixes_make_of_the_old_release_the_new_one(result: record.Record) -> None:
    facts = {slug: variant.facts for slug, variant in result.variants.items()}
    assert facts["bisect_none"] == facts["torchao_0_13_0_eager"]
    assert facts["bisect_both"] == facts["torchao_0_14_1_eager"]


def test_no_variant_leaves_the_flag_of_torchao_on(result: record.Record) -> None:
    """quantize_ turns coordinate descent on for the whole process unless it is told not to."""
    for slug, variant in result.variants.items():
        if variant.status == "ok":
            assert variant.facts["coordinate_descent_tuning"] is False, slug


def test_dequantisation_allocates_the_largest_weight_in_float32(result: record.Record) -> None:
    largest = TINY.vocab * TINY.dim
    for slug, variant in result.variants.items():
        if variant.status == "ok":
            found = variant.cases["decode"].memory.largest_temporary_bytes
            assert found < largest if slug == "bf16_eager" else found == 4 * largest, slug


def test_releases_and_arms_compute_the_same(result: record.Record) -> None:
    errors = {
        slug: variant.cases["decode"].correctness.value
        for slug, variant in result.variants.items()
        if variant.status == "ok" and slug != "bf16_eager"
    }
    assert len(set(errors.values())) == 1, errors


def test_quantised_models_are_as_near_to_their_reference_as_bf16_is(result: record.Record) -> None:
    bf16 = result.variants["bf16_eager"].cases["decode"].correctness.value
    assert result.variants["torchao_0_18_0_eager"].cases["decode"].correctness.value < 1.5 * bf16


DEQUANTIZED = """
import json, sys
import torch
import repro
from torchao.quantization import Float8WeightOnlyConfig, quantize_
from worklog.workloads import llama
weight = llama.parameter("blocks.0.attention.wo.weight", (512, 256), "cpu", torch.bfloat16)
linear = torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
quantize_(torch.nn.Sequential(linear), Float8WeightOnlyConfig(set_inductor_config=False))
theirs, ours = linear.weight.dequantize().double(), repro.dequantized("wo", weight).double()
print(json.dumps([((theirs - ours).norm() / ours.norm()).item(), ((ours - weight).norm() / weight.norm()).item()]))
"""


@pytest.mark.parametrize("version", repro.VERSIONS)
def test_reference_is_what_torchao_dequantises_to(python: Python, torchao: Path, version: str) -> None:
    library = torchao / f"torchao-{version}"
    done = python("-c", DEQUANTIZED, path=[library, FOLDER, checkouts.REPOSITORY / "src"])
    off, lost = json.loads(done.stdout.splitlines()[-1])
    assert 0.02 < lost < 0.03  # e4m3 has 3 bits of mantissa
    assert off < 2**-8  # torchao rounds the product to bfloat16, the reference does not


# Claims


def without(made: record.Record, *slugs: str) -> record.Record:
    kept = {slug: variant for slug, variant in made.variants.items() if slug not in slugs}
    return msgspec.structs.replace(made, variants=kept)


def test_cpu_claims_hold_on_a_real_run(result: record.Record) -> None:
    found = float8.claims(result)
    assert found == result.claims
    assert [(claim.measured, claim.required, claim.holds) for claim in found] == [
        (1, 1, True),
        (0, 0, True),
        (29, 29, True),
        (4, 4, True),
    ]


def test_cpu_claims_without_their_variants_are_undecided(result: record.Record) -> None:
    found = float8.claims(without(result, "torchao_0_13_0_eager"))
    assert [claim.holds for claim in found] == [None, True, None, None]
    assert found[0].reason == "torchao_0_13_0_eager has no opaque_operators in this run"
    assert found[3].reason == "torchao_0_13_0_eager has no time for decode in this run"


def test_cpu_claims_fail_if_the_phenomenon_is_gone(result: record.Record) -> None:
    healed = {**result.variants, "torchao_0_13_0_eager": result.variants["torchao_0_14_1_eager"]}
    found = float8.claims(msgspec.structs.replace(result, variants=healed))
    assert [claim.holds for claim in found] == [False, True, False, True]


WEIGHTS = 7_504_658_432
LINEARS = {"wqkv": 25_165_824, "wo": 16_777_216, "w1": 58_720_256, "w2": 58_720_256, "output": 525_336_576}
COPY = 4.0e12


def timed(
    us: float, size: int = 0, *, allocated: int = 0, temporary: int = 0, error: float = 1e-3
) -> record.CaseResult:
    return record.CaseResult(
        status="ok",
        correctness=record.Correctness(metric="relative_frobenius", value=error, limit=1.0),
        timing=record.Timing(method="cuda_graph", samples_us=[us], warmup=1, calls=1, flush_l2=False),
        memory=record.Memory(
            baseline_bytes=0, allocated_bytes=allocated, reserved_bytes=allocated, device_bytes=None,
            largest_temporary_bytes=temporary,
        ),
        bytes=size,
    )  # fmt: skip


def gpu_record() -> record.Record:
    """A run on a GPU that copies 4 TB/s, in round numbers, for the arithmetic of the claims."""

    def variant(**cases: record.CaseResult) -> record.VariantResult:
        return record.VariantResult(status="ok", cases=cases)

    def linears(width: int, us: float) -> dict[str, record.CaseResult]:
        """At one token 1/0.95 of the copy time; at more tokens `us` whatever the shape."""
        found = {}
        for name, elements in LINEARS.items():
            for tokens in (1, 2, 4, 8, 16, 32):
                size = width * elements
                time_us = size / COPY / 0.95 * 1e6 if tokens == 1 else us
                found[f"linear_{name}_m{tokens}"] = timed(time_us, size, error=2e-3)
        return found

    variants = {
        "bf16_eager": variant(
            decode=timed(6000, allocated=16_000), prefill=timed(33_000, allocated=17_000), **linears(2, 40)
        ),
        "bf16_compile": variant(decode=timed(4500), prefill=timed(30_000)),
        "bf16_cudagraph": variant(decode=timed(4200)),
        "bf16_cudagraph_cd": variant(decode=timed(4000)),
        "bf16_fused": variant(decode=timed(3600)),
        "torchao_0_13_0_eager": variant(decode=timed(60_000)),
        "torchao_0_13_0_cudagraph_cd": variant(decode=timed(56_000)),
        "torchao_0_14_1_cudagraph_cd": variant(decode=timed(5500)),
        "torchao_0_18_0_cudagraph": variant(decode=timed(6000)),
        "torchao_0_18_0_cudagraph_cd": variant(decode=timed(5000)),
        "torchao_0_18_0_dynamic": variant(decode=timed(3000)),
        "float8_linear": variant(decode=timed(2400)),
        "float8_fused": variant(
            decode=timed(2000, WEIGHTS, allocated=8_000, temporary=1000),
            prefill=timed(27_000, allocated=9_350, temporary=4096 * 128256 // 32),
            **linears(1, 30),
        ),
    }
    gpu = record.Gpu(name="NVIDIA H200", memory_bytes=1, sm_count=132, compute_capability="9.0", l2_bytes=1)
    return record.Record(
        schema_version=1, run_id="20261120-h200-test-000000", problem=NAME, step="test", argv=[],
        started_utc="2026-11-20T00:00:00Z", seconds=1.0, complete=True,
        source=record.Source(commit=checkouts.COMMIT, dirty=False),
        hardware=record.Hardware(cpu="x", cpu_count=1, memory_bytes=1, gpus=[gpu]),
        software={}, config=LLAMA.as_dict(), ceilings=record.Ceilings(copy_bytes_per_s=COPY), variants=variants,
    )  # fmt: skip


BF16 = "bf16_eager bf16_compile bf16_cudagraph bf16_cudagraph_cd"
# claim -> what the record above gives, and the variants without which it cannot be decided
GPU_CLAIMS = {
    "0.13.0 decodes slower than bf16": (14.0, f"torchao_0_13_0 {BF16}"),
    "0.18.0 in CUDA graphs still decodes slower than bf16": (1.5, f"torchao_0_18_0 {BF16}"),
    "fix: decode speed over the fastest torchao release": (
        2.5,
        "torchao_0_14_1 torchao_0_18_0 float8_fused",
    ),  # dynamic: another contract
    "fix: decode speed over the fastest bf16": (2.0, f"{BF16} float8_fused"),  # bf16_fused: a control
    "fix: decode, share of copy bandwidth": (WEIGHTS / 2e-3 / COPY, "float8_fused"),
    "fix: single linears at one token, least share of copy bandwidth": (0.95, "float8_fused"),
    "fix: single linears at 2 to 32 tokens, longest time over bf16": (0.75, "float8_fused bf16_eager"),
    "fix: peak allocated over bf16, decode and prefill": (0.55, "float8_fused bf16_eager"),
    "fix: largest temporary over the largest weight": (1 / 32, "float8_fused"),
    "fix: prefill time over the fastest bf16": (0.9, "float8_fused bf16_eager bf16_compile"),
    "fix: worst error of a single linear": (2e-3, "float8_fused"),
}


def test_gpu_claims_are_the_arithmetic_of_the_record() -> None:
    made = gpu_record()
    assert record.problems_of(made) == []
    found = {claim.name: claim for claim in float8.claims(made)}
    expected = {name: value for name, (value, _) in GPU_CLAIMS.items()}
    assert {name: claim.measured for name, claim in found.items()} == pytest.approx(expected)
    assert all(claim.holds for claim in found.values())


@pytest.mark.parametrize(
    "slug",
    [
        "torchao_0_13_0",
        "torchao_0_14_1",
        "torchao_0_18_0",
        "torchao",
        "float8_linear",
        "float8_fused",
        "bf16_eager",
        "bf16",
    ],
)
def test_gpu_claims_without_their_variants_are_undecided(slug: str) -> None:
    made = gpu_record()
    found = float8.claims(without(made, *(s for s in made.variants if s.startswith(slug))))
    for claim in found:
        needs = GPU_CLAIMS[claim.name][1].split()
        missing = any(need.startswith(slug) for need in needs)
        assert (claim.holds is None) == (claim.measured is None) == (claim.reason is not None) == missing, claim
        assert claim.reason is None or slug.partition("_")[0] in claim.reason


def test_gpu_claims_without_a_ceiling() -> None:
    found = float8.claims(msgspec.structs.replace(gpu_record(), ceilings=record.Ceilings()))
    undecided = {claim.name: claim.reason for claim in found if claim.holds is None}
    assert len(undecided) == 2
    assert set(undecided.values()) == {"the run has no copy ceiling"}


def test_gpu_claims_on_a_run_in_which_a_linear_failed() -> None:
    made = gpu_record()
    old = made.variants["float8_fused"]
    failed = record.CaseResult(status="error", message="RuntimeError: launch failed")
    changed = msgspec.structs.replace(
        old, status="error", message="a case failed", cases={**old.cases, "linear_wo_m1": failed}
    )
    found = float8.claims(msgspec.structs.replace(made, variants={**made.variants, "float8_fused": changed}))
    (undecided,) = (claim for claim in found if claim.holds is None and "one token" in claim.name)
    assert "linear_wo_m1" in undecided.reason
    assert all(claim.holds for claim in found if "linears" not in claim.name and "single" not in claim.name)


# The workload


@pytest.fixture(scope="module")
def llama():
    from worklog.workloads import llama

    return llama


@pytest.fixture
def _inference():
    with torch.inference_mode():
        yield


def textbook(shape, tensors, tokens):
    """Logits of the last token, from Llama's definition: head by head, position by position, complex rope. float64."""

    def normed(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.eps) * weight

    def turned(x, position):
        half = shape.head_dim // 2
        angle = position * shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    x = tensors["embedding.weight"][tokens]
    width, group = shape.head_dim, shape.heads // shape.kv_heads
    for i in range(shape.layers):
        own = {name.removeprefix(f"blocks.{i}."): t for name, t in tensors.items() if name.startswith(f"blocks.{i}.")}
        heads = (normed(x, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T).unflatten(1, (-1, width))
        out = torch.zeros(len(tokens), shape.heads, width, dtype=torch.float64)
        for t in range(len(tokens)):
            for head in range(shape.heads):
                key = shape.heads + head // group
                q = turned(heads[t, head], t)
                score = torch.stack([q @ turned(heads[s, key], s) for s in range(t + 1)]) / width**0.5
                out[t, head] = torch.softmax(score, 0) @ heads[: t + 1, key + shape.kv_heads]
        x = x + out.flatten(1) @ own["attention.wo.weight"].T
        h = normed(x, own["feed_forward_norm.weight"])
        gate = h @ own["feed_forward.w1.weight"].T
        up = h @ own["feed_forward.w3.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ own["feed_forward.w2.weight"].T
    return (normed(x, tensors["norm.weight"]) @ tensors["output.weight"].T)[-1:]


@pytest.mark.usefixtures("_inference")
def test_prefill_then_decode_is_llama(llama) -> None:
    model = llama.make(llama.TINY, 16, "cpu", dtype=torch.float64, seed=3)
    tokens = torch.randint(llama.TINY.vocab, (9,), generator=torch.Generator().manual_seed(1))
    prefill = model(tokens[None, :8], torch.arange(8))
    assert relative_error(prefill, textbook(llama.TINY, dict(model.named_parameters()), tokens[:8])) < 1e-5
    decode = model(tokens[None, 8:], torch.tensor([8]))
    assert relative_error(decode, textbook(llama.TINY, dict(model.named_parameters()), tokens)) < 1e-5


@pytest.mark.usefixtures("_inference")
def test_reference_is_the_model_in_float64(llama) -> None:
    tokens, position = torch.tensor([[5]]), torch.tensor([11])
    model = llama.make(llama.TINY, 16, "cpu", dtype=torch.float64, seed=3)
    wide = {"dtype": torch.float64, "drawn_as": torch.float64}
    assert (
        relative_error(model(tokens, position), llama.reference(llama.TINY, 16, tokens, position, seed=3, **wide))
        < 1e-6
    )
    other = llama.reference(llama.TINY, 16, tokens, position, seed=4, **wide)
    assert relative_error(model(tokens, position), other) > 0.5


@pytest.mark.usefixtures("_inference")
def test_each_wrong_tensor_of_the_model_is_beyond_the_limit(llama) -> None:
    """The reference knows nothing of the model under test: whatever is wrong there shows."""
    tokens, position = torch.tensor([[5]]), torch.tensor([TINY.decode_position])
    truth = llama.reference(llama.TINY, TINY.decode_cache, tokens, position)
    model = llama.make(llama.TINY, TINY.decode_cache, "cpu")
    assert relative_error(model(tokens, position), truth) < repro.MODEL_LIMIT
    names = [
        *(name for name, _ in model.named_parameters()),
        "blocks.0.attention.k_cache",
        "blocks.1.attention.v_cache",
    ]
    assert len(names) == 3 + 2 * 7 + 2
    for name in names:
        model = llama.make(llama.TINY, TINY.decode_cache, "cpu")
        tensor = model.state_dict()[name]
        tensor.copy_(llama.parameter(name, tensor.shape, "cpu", tensor.dtype, seed=1))
        assert relative_error(model(tokens, position), truth) > repro.MODEL_LIMIT, name
    torch.testing.assert_close(llama.reference(llama.TINY, TINY.decode_cache, tokens, position), truth, rtol=0, atol=0)


def test_seeds_reproduce(llama) -> None:
    first, again, other = (llama.make(llama.TINY, 16, "cpu", seed=seed).state_dict() for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert name == "rope" or not torch.equal(tensor, other[name]), name
    w1, w3 = (first[f"blocks.0.feed_forward.{name}.weight"] for name in ("w1", "w3"))
    assert not torch.equal(w1, w3)  # one shape, two names, two tensors


@pytest.mark.usefixtures("_inference")
def test_activations_keep_their_size(llama) -> None:
    """Otherwise errors and saturation would depend on the layer."""
    logits = llama.make(llama.TINY, 16, "cpu")(torch.tensor([[5]]), torch.tensor([11]))
    assert 0.3 < logits.float().std() < 3


@pytest.mark.usefixtures("_inference")
def test_the_twin_shares_weights_and_not_caches(llama) -> None:
    model = llama.make(llama.TINY, TINY.decode_cache, "cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = repro.with_cache(model, TINY)
    for (name, ours), (same, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (name, ours.data_ptr()) == (same, theirs.data_ptr())
    caches = {name for name in before if name.endswith("_cache")}
    assert len(caches) == 4
    for name in caches:
        assert twin.get_buffer(name).shape[2] == TINY.prefill_tokens
        assert twin.get_buffer(name).data_ptr() != model.get_buffer(name).data_ptr()
    tokens, position = torch.arange(TINY.prefill_tokens)[None], torch.arange(TINY.prefill_tokens)
    truth = llama.reference(llama.TINY, TINY.prefill_tokens, tokens, position)
    assert relative_error(twin(tokens, position), truth) < repro.MODEL_LIMIT
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_bytes_of_a_token_are_the_linears_of_an_8b_model(llama) -> None:
    assert llama.LLAMA_3_1_8B.linear_elements == WEIGHTS
    assert {
        name: rows * columns for name, (rows, columns) in llama.LLAMA_3_1_8B.linears().items() if name != "w3"
    } == LINEARS
    total = WEIGHTS + 128256 * 4096 + 65 * 4096
    assert total == 8_030_261_248  # parameters of Llama-3.1-8B, as its model card counts them


# The notebook


def answers(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the notebook's cells leave, run one after another on the records of the checkout `root`."""
    monkeypatch.setenv("WORKLOG_ROOT", str(root))
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((FOLDER / "analysis.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"display": lambda table: shown.append(table)}
    shown = names["shown"] = []
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    import matplotlib.pyplot as plt

    names["figures"] = len(plt.get_fignums())
    plt.close("all")
    return names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout that has this problem and no runs."""
    (tmp_path / "problems").mkdir()
    (tmp_path / "problems" / NAME).symlink_to(FOLDER)
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_notebook_without_runs_says_so(root: Path, monkeypatch, capsys) -> None:
    found = answers(root, monkeypatch)
    assert "No runs yet. ./scripts/repro float8_weight_only makes one" in capsys.readouterr().out
    assert (found["figures"], len(found["times"]), len(found["claims"])) == (0, 0, 0)


def test_notebook_on_a_cpu_run(run: Path, root: Path, monkeypatch, capsys) -> None:
    shutil.copytree(run, root / "out" / NAME / run.name)  # where a run of one's own lies
    found = answers(root, monkeypatch)
    words = capsys.readouterr().out
    assert "Runs on a CPU only" in words
    assert "bisect_op                    _to_copy -> unsqueeze -> expand -> clone" in words
    assert found["predicted"].loc["bisect_scale", "eager"] == 21
    assert len(found["claims"]) == 4
    assert len(found["decode"]) == 8
    assert found["figures"] == 3  # times, bytes, memory


def test_notebook_on_a_gpu_run_and_captures(run: Path, root: Path, monkeypatch, capsys) -> None:
    reports = root / "reports" / NAME
    shutil.copytree(run, reports / run.name)
    made = gpu_record()
    folder = reports / made.run_id
    folder.mkdir()
    history = [
        {"action": "alloc", "addr": 16, "size": 2**30, "time_us": 5, "frames": []},
        {"action": "free_requested", "addr": 16, "size": 2**30, "time_us": 9, "frames": []},
    ]
    file = folder / "memory.float8_fused.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"segments": [], "device_traces": [history]}).encode()))
    made = msgspec.structs.replace(made, claims=float8.claims(made), artifacts=[record.artifact(folder, file)])
    record.save(made, folder)
    smaller = folder.with_name(made.run_id.replace("test", "tiny"))  # of another size, and newer: not to be mixed in
    fast = {"float8_fused": record.VariantResult(status="ok", cases={"decode": timed(1)})}
    config = {**made.config, "name": "llama_8b_4_layers"}
    small = msgspec.structs.replace(made, run_id=smaller.name, config=config, variants=fast, claims=[], artifacts=[])
    record.save(small, smaller)
    found = answers(root, monkeypatch)
    assert "memory.float8_fused.json.gz: peak 1.000 GiB" in capsys.readouterr().out
    assert found["decode"].loc["torchao_0_13_0_eager", "over fastest bf16"] == 15  # the GPU's run, not the CPU's
    assert found["decode"].loc["float8_fused", "over fastest bf16"] == 0.5
    alone = found["linears"].query("tokens == 1 and variant == 'float8_fused'")
    assert sorted(alone["linear"]) == sorted(LINEARS)
    assert alone["of_copy"].tolist() == pytest.approx([0.95] * 5)
    assert found["figures"] == 1 + 1 + 1 + 2  # times, bytes, memory, linears of two variants
