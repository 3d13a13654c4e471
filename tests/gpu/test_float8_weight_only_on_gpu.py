"""The float8 linear and the fused decoder on a real GPU, against float64."""

from __future__ import annotations

import pytest

from worklog import problem
from worklog.measure.correctness import relative_error

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

MIB = 1 << 20
LIMIT = 4e-3
TOKENS = (*range(1, 34), 64, 65, 200, 2048)
SHAPES = ((4096, 4096), (1024, 14336), (6144, 4096), (96, 64), (160, 192), (4128, 4160), (32, 2048))  # N, K


@pytest.fixture(autouse=True)
def _inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def repro():
    return problem.load("float8_weight_only").module


@pytest.fixture(scope="module")
def ours():
    problem.load("float8_weight_only")
    import float8_linear

    return float8_linear


def drawn(*size: int, seed: int = 0, dtype=None):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda", dtype=dtype or torch.bfloat16)


def weight_of(rows: int, columns: int, seed: int = 1):
    """As a model's weight is: the result of a product has the size of its input. Rows differ in scale."""
    sizes = torch.logspace(-1, 1, rows, device="cuda", dtype=torch.float32)[:, None]
    return (drawn(rows, columns, seed=seed).float() * columns**-0.5 * sizes).bfloat16()


def truth(x, values, scale, *, norm=None, eps=0.0, gated=False, residual=None):
    """The operator's definition in float64. Gated rows stand in groups of 8 gate, 8 up."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.double()
    y = x @ (values.double() * scale.double()[:, None]).T
    if gated:
        gate, up = y.unflatten(-1, (-1, 2, 8)).unbind(-2)
        y = (gate * torch.sigmoid(gate) * up).flatten(-2)
    return y if residual is None else y + residual.double()


def call(x, values, scale, **extra):
    return torch.ops.float8_weight_only.linear(x, values, scale, **extra)


@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_is_the_product(ours, tokens):
    for rows, columns in SHAPES:
        x = drawn(tokens, columns)
        values, scale = ours.quantize(weight_of(rows, columns))
        found = call(x, values, scale)
        assert found.dtype == x.dtype
        assert relative_error(found, truth(x, values, scale)) < LIMIT, (rows, columns)


@pytest.mark.parametrize("tokens", [1, 8, 33, 65, 2048, 2049])
def test_some_columns_of_a_wider_weight(ours, tokens):
    """As the feed-forward of a long prompt takes w2, piece by piece, each added to the sum so far."""
    x, residual = drawn(tokens, 1408), drawn(tokens, 4096, seed=5)
    values, scale = ours.quantize(weight_of(4096, 1408))
    found, expected = residual, residual.double()
    for piece in (slice(0, 1024), slice(1024, 1408)):
        found = torch.ops.float8_weight_only.linear(x[:, piece], values[:, piece], scale, residual=found)
        expected = truth(x[:, piece], values[:, piece], scale, residual=expected)
    assert relative_error(found, expected) < LIMIT


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 65, 200, 2048])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_gate_and_residual_are_inside(ours, tokens, gated):
    rows, columns = 1024, 4096
    x, norm = drawn(1, tokens, columns), torch.rand(columns, device="cuda").bfloat16() + 0.5
    values, scale = ours.quantize(weight_of(rows, columns))
    out = rows // 2 if gated else rows
    residual = drawn(1, tokens, out, seed=5)
    for extra in (
        {"norm": norm, "eps": 1e-5},
        {"residual": residual},
        {"norm": norm, "eps": 1e-5, "residual": residual},
    ):
        before = {name: t.clone() for name, t in extra.items() if name != "eps"}
        expected = truth(x, values, scale, gated=gated, **extra)
        # where x is normalised apart from the product, it is rounded once more
        limit = LIMIT * (2 if tokens > 1 and "norm" in extra else 1)
        assert relative_error(call(x, values, scale, gated=gated, **extra), expected) < limit, (extra.keys(), gated)
        for name, tensor in before.items():
            assert torch.equal(extra[name], tensor), f"{name} was written"


def test_bf16_weights_for_one_token(ours):
    for rows, columns in SHAPES:
        x, weight = drawn(1, columns), weight_of(rows, columns)
        values, scale = ours.keep(weight)
        assert values.dtype == torch.bfloat16
        assert relative_error(call(x, values, scale), x.double() @ weight.double().T) < LIMIT, (rows, columns)


@pytest.mark.parametrize("tokens", [1, 2, 16, 65, 200, 2048])
def test_a_row_of_x_has_an_effect_on_its_own_result_alone(ours, tokens):
    """Padded rows of a tile repeat real ones: none may leak into another's result."""
    values, scale = ours.quantize(weight_of(256, 4096))
    x = drawn(tokens, 4096)
    base = call(x, values, scale)
    changed = x.clone()
    changed[tokens // 2] *= -3
    found = call(changed, values, scale)
    others = torch.arange(tokens, device="cuda") != tokens // 2
    assert torch.equal(found[others], base[others])
    assert relative_error(found[tokens // 2], -3 * base[tokens // 2].double()) < 2 * LIMIT


@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 65, 200, 2048])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_not_finite(ours, tokens, value):
    values, scale = ours.quantize(weight_of(128, 4096))
    x = drawn(tokens, 4096)
    x[tokens // 2, 7] = value
    found = call(x, values, scale)
    assert not found[tokens // 2].isfinite().any()
    others = torch.arange(tokens, device="cuda") != tokens // 2
    assert found[others].isfinite().all()


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1e4, 1e20])
@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 2048])
def test_any_size_of_x_that_bf16_holds(ours, tokens, size):
    values, scale = ours.quantize(weight_of(128, 4096))
    x = drawn(tokens, 4096) * size
    assert relative_error(call(x, values, scale), truth(x, values, scale)) < LIMIT


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("tokens", [1, 2, 65, 2048])
def test_every_code_of_e4m3_but_nan_is_read_exactly(tokens):
    """256 columns, one code each, times a unit vector: each result is one weight. Subnormals are among them."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(torch.float8_e4m3fn)
    values, scale = codes.expand(128, 256).contiguous(), torch.ones(128, device="cuda")
    for k in range(0, 256, tokens):
        x = torch.zeros(tokens, 256, device="cuda", dtype=torch.bfloat16)
        rows = torch.arange(tokens, device="cuda")
        x[rows, (k + rows) % 256] = 1
        expected = codes.float()[(k + rows) % 256][:, None].expand(tokens, 128)
        assert torch.equal(call(x, values, scale).float(), expected)


def test_x_that_is_not_contiguous(ours):
    values, scale = ours.quantize(weight_of(128, 4096))
    for tokens in (1, 16, 200):
        x = drawn(tokens, 8192)[:, ::2]
        assert relative_error(call(x, values, scale), truth(x, values, scale)) < LIMIT


def test_fake_operator_agrees(ours):
    with torch.inference_mode(False):
        values, scale = ours.quantize(weight_of(128, 4096))
        for tokens in (1, 16, 200):
            arguments = (drawn(1, tokens, 4096), values, scale)
            operator = torch.ops.float8_weight_only.linear.default
            torch.library.opcheck(operator, arguments, {"gated": True}, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_swapped_model_compiled_and_in_a_graph(ours, bias, tokens):
    def made():
        torch.manual_seed(0)
        layers = (torch.nn.Linear(512, 1024, bias=bias), torch.nn.SiLU(), torch.nn.Linear(1024, 512, bias=bias))
        return torch.nn.Sequential(*layers).cuda().bfloat16().requires_grad_(False)

    model, plain = ours.swap_linears(made()), made()
    for module in plain:
        if isinstance(module, torch.nn.Linear):
            values, scale = ours.quantize(module.weight)
            module.weight = torch.nn.Parameter(values.double() * scale.double()[:, None], False)
            module.bias = module.bias if module.bias is None else torch.nn.Parameter(module.bias.double(), False)
    x, other = drawn(tokens, 512), drawn(tokens, 512, seed=9)
    expected, expected_other = plain(x.double()), plain(other.double())
    limit = 2 * LIMIT  # two layers
    assert relative_error(model(x), expected) < limit

    torch._dynamo.reset()
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # warm-up, recording, two replays
        torch.compiler.cudagraph_mark_step_begin()
        assert relative_error(run(x).clone(), expected) < limit
    torch.compiler.cudagraph_mark_step_begin()
    assert relative_error(run(other).clone(), expected_other) < limit
    torch._dynamo.reset()

    stream, graph, static = torch.cuda.Stream(), torch.cuda.CUDAGraph(), x.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(static)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = model(static)
    for given, wanted in ((other, expected_other), (x, expected)):
        static.copy_(given)
        graph.replay()
        assert relative_error(y, wanted) < limit


def test_results_are_the_same_each_time(ours):
    """A launch that reads before its input is written would show here, under load."""
    values, scale = ours.quantize(weight_of(4096, 4096))
    x = drawn(1, 4096)
    norm = torch.full((4096,), 0.5, device="cuda", dtype=torch.bfloat16)

    def chain(tokens):
        y = x.expand(tokens, 4096).contiguous()
        for _ in range(50):
            y = call(y, values, scale, norm=norm, eps=1e-5)
        return y

    for tokens in (1, 16, 200):
        first = chain(tokens)
        assert first.isfinite().all()
        assert all(torch.equal(chain(tokens), first) for _ in range(20))


def allocations(run):
    """Bytes of each block that `run` asks the allocator for."""
    run()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=10_000)
    try:
        run()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [event["size"] for event in events if event["action"] == "alloc"]


def test_one_token_allocates_its_result_alone(ours):
    x = drawn(1, 4096)
    values, scale = ours.quantize(weight_of(28672, 4096))
    sizes = allocations(lambda: call(x, values, scale))
    assert sizes == [2 * 28672]
    values, scale = ours.quantize(weight_of(128256, 4096))
    assert max(allocations(lambda: call(x, values, scale))) < MIB


def test_a_prompt_allocates_nothing_of_the_weights_size(ours):
    x = drawn(128, 4096)
    values, scale = ours.quantize(weight_of(28672, 4096))
    result = 2 * 128 * 28672
    assert max(allocations(lambda: call(x, values, scale))) == result
    assert sum(allocations(lambda: call(x, values, scale))) <= result + 4 * x.numel() + MIB < values.numel() // 10


def test_quantising_takes_64_mib_at_most(ours):
    weight = weight_of(28672, 4096)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values, scale = ours.quantize(weight)
    kept = values.numel() + 4 * scale.numel()
    assert torch.cuda.max_memory_allocated() - before - kept < 5 * 64 * MIB  # a few float32 pieces of 64 MiB
    assert relative_error(values.double() * scale.double()[:, None], weight.double()) < 0.03


# The decoder


CACHE = 256
SMALL = {"dim": 1024, "layers": 2, "heads": 8, "kv_heads": 2, "hidden": 2048, "vocab": 1024}  # heads of 128, as 8B has


@pytest.fixture(scope="module")
def llama():
    from worklog.workloads import llama

    return llama


@pytest.fixture(scope="module")
def fused():
    problem.load("float8_weight_only")
    import fused_block

    return fused_block


@pytest.mark.parametrize("position", [0, 1, 127, 128, 129, 255])
@pytest.mark.parametrize("float8", [True, False])
def test_fused_decode_is_the_model(llama, fused, repro, position, float8):
    shape = llama.LlamaShape(**SMALL)
    token, at = torch.tensor([[5]], device="cuda"), torch.tensor([position], device="cuda")
    weight = repro.dequantized if float8 else repro.unchanged
    expected = llama.reference(shape, CACHE, token, at, weight)
    model = fused.swap_blocks(llama.make(shape, CACHE, "cuda"), float8=float8)
    assert relative_error(model(token, at), expected) < 0.02
    plain = llama.make(shape, CACHE, "cuda")
    plain(token, at)
    for block, twin in zip(model.blocks, plain.blocks, strict=True):
        for name in ("k_cache", "v_cache"):
            ours, theirs = getattr(block.attention, name), getattr(twin.attention, name)
            rest = torch.arange(CACHE, device="cuda") != position
            assert torch.equal(ours[:, :, rest], theirs[:, :, rest]), f"{name} was written elsewhere"
            # the weights' rounding to float8 is in these too
            assert relative_error(ours[:, :, position], theirs[:, :, position]) < (0.1 if float8 else 0.02)


@pytest.mark.parametrize("tokens", [2, 33, 200])
def test_fused_prefill_then_decode_is_the_model(llama, fused, repro, tokens):
    """The keys and values that a prompt leaves in the cache are those that the next token reads."""
    shape = llama.LlamaShape(**SMALL)
    ids = torch.randint(shape.vocab, (1, tokens + 1), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    where = torch.arange(tokens + 1, device="cuda")
    model = fused.swap_blocks(llama.make(shape, CACHE, "cuda"))
    prefill = model(ids[:, :-1], where[:-1])
    assert relative_error(prefill, llama.reference(shape, CACHE, ids[:, :-1], where[:-1], repro.dequantized)) < 0.02
    decode = model(ids[:, -1:], where[-1:])
    assert relative_error(decode, llama.reference(shape, CACHE, ids, where, repro.dequantized)) < 0.02


def test_fused_prompt_in_chunks(llama, fused, repro, monkeypatch):
    """More tokens than one chunk of the feed-forward, and no multiple of it; and more columns than one piece."""
    monkeypatch.setattr(fused, "PIECE", SMALL["hidden"] * 3 // 4)
    shape, tokens = llama.LlamaShape(**SMALL), fused.CHUNK + 200
    ids = torch.arange(tokens, device="cuda")[None] % shape.vocab
    where = torch.arange(tokens, device="cuda")
    model = fused.swap_blocks(llama.make(shape, tokens, "cuda"))
    assert relative_error(model(ids, where), llama.reference(shape, tokens, ids, where, repro.dequantized)) < 0.02


def test_fused_decode_with_a_long_cache(llama, fused, repro):
    """Beyond MAX_SEQ positions torch's own attention takes over."""
    shape, cache = llama.LlamaShape(**SMALL), 2 * fused.MAX_SEQ
    token, at = torch.tensor([[5]], device="cuda"), torch.tensor([cache - 1], device="cuda")
    model = fused.swap_blocks(llama.make(shape, cache, "cuda"))
    assert relative_error(model(token, at), llama.reference(shape, cache, token, at, repro.dequantized)) < 0.02


def test_fused_decode_in_a_graph_follows_its_position(llama, fused, repro):
    shape = llama.LlamaShape(**SMALL)
    model = fused.swap_blocks(llama.make(shape, CACHE, "cuda"))
    token, at = torch.tensor([[5]], device="cuda"), torch.tensor([3], device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(token, at)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        logits = model(token, at)
    drawn_caches = llama.make(shape, CACHE, "cuda").state_dict()
    for position in (200, 7):
        for name, cache in model.named_buffers():
            if name.endswith("_cache"):
                cache.copy_(drawn_caches[name])
        at.fill_(position)
        graph.replay()
        assert relative_error(logits, llama.reference(shape, CACHE, token, at, repro.dequantized)) < 0.02
