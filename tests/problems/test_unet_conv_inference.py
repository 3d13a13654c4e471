"""unet_conv_inference on a CPU: its formulas, its ladder of variants, its claims, its programs and notebooks."""

from __future__ import annotations

import dataclasses
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

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from worklog.workloads import resnet18, unet1d  # noqa: E402

NAME = "unet_conv_inference"
FOLDER = checkouts.REPOSITORY / "problems" / NAME
SOURCES = [checkouts.REPOSITORY / "src", FOLDER]
COPY = 4.0e12

unet = problem.load(NAME)
repro = unet.module
TINY = unet.config("tiny", "cpu")
PUSH_T = dataclasses.replace(unet.config("push_t", "cuda"), device="cpu")

import convolutions  # noqa: E402
import film_once  # noqa: E402
import operators  # noqa: E402
import power_tones  # noqa: E402
import push_t  # noqa: E402


def exact_step(config) -> torch.Tensor:
    return repro.plain(config, torch.float64)(*repro.inputs(config, torch.float64))


# The formulas of the config


@pytest.mark.parametrize("config", [PUSH_T, TINY, dataclasses.replace(TINY, batch=3, horizon=32)], ids=str)
def test_weights_and_operations_are_those_of_the_network(config) -> None:
    model, step = repro.plain(config, torch.float32), repro.inputs(config, torch.float32)
    assert config.parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(*step)
    assert config.step_flop == counted.get_total_flops()


def test_sampling_reads_what_makes_scales_and_shifts_once() -> None:
    names = [n for n, _ in repro.plain(TINY, torch.float32).named_modules() if n.endswith("cond_encoder.1")]
    assert len(names) == 12
    model = repro.plain(TINY, torch.float32)
    once = sum(model.get_submodule(name).weight.numel() for name in names)
    once += sum(model.diffusion_step_encoder[i].weight.numel() for i in (1, 3))
    assert TINY.sampling_parameters == TINY.steps * (TINY.parameters - once) + once


# One run of what a CPU can show, each variant in a process of its own.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run with the smallest config."""
    out = tmp_path_factory.mktemp("out")
    argv = [sys.executable, "-m", "worklog.cli", "repro", NAME, "--config", "tiny", "--out", str(out), "--json"]
    variables = {"WORKLOG_COMMIT": checkouts.COMMIT, "WORKLOG_DIRTY": "0", "OMP_NUM_THREADS": "1"}
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
    assert set(states) == {variant.slug for variant in unet.variants}
    for variant in unet.variants:
        assert states[variant.slug] == ("ok" if "cpu" in variant.devices else "skipped")
    cases = {slug: set(v.cases) for slug, v in result.variants.items() if v.cases}
    parts = {"vision", "denoise"} | ({"simulation"} if push_t.missing() is None else set())
    assert cases.pop("policy") == parts
    assert all(names == {"step", "sampling"} for names in cases.values())


def test_what_is_counted_without_a_gpu(result: record.Record) -> None:
    facts = {slug: variant.facts for slug, variant in result.variants.items()}
    eager = facts["eager"]
    assert eager["operators"]["aten.convolution"] == 35
    assert eager["operators"]["aten.native_group_norm"] == 25
    assert eager["parameter_bytes"] == 4 * TINY.parameters
    assert facts["eager_bf16"]["parameter_bytes"] == 2 * TINY.parameters
    assert eager["film_unchanged_share"] == pytest.approx(TINY.cond_dim / (TINY.cond_dim + TINY.step_dim))
    assert facts["compile"]["library_calls"]["extern_kernels.convolution"] == 35
    assert 0 < facts["compile"]["generated_kernel_calls"] < eager["operator_count"] / 2
    assert "aten.convolution" not in facts["conv_gemm"]["operators"]
    assert facts["conv_gemm"]["data_movement_count"] > 10 * eager["data_movement_count"]


def test_without_a_cpp_compiler_the_compiled_variant_is_unsupported(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "worklog.cli", "repro", NAME, "--config", "tiny", "--variant", "compile", "--json"]
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    argv += ["--out", str(tmp_path / "out")]
    subprocess.run(argv, cwd=checkouts.REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    (folder,) = (tmp_path / "out").iterdir()
    found = record.load(folder).variants["compile"]
    assert (found.status, found.message) == (
        "unsupported",
        "torch.compile needs a C++ compiler on a CPU and finds none; install g++",
    )


def test_the_compilers_calls_are_counted_from_its_cache_too(result: record.Record) -> None:
    """The run has compiled the same network before, in another process."""
    variant = unet.variant("compile")
    facts = repro.build(variant, TINY).facts
    assert facts == result.variants["compile"].facts


def test_the_cpus_claims(result: record.Record) -> None:
    assert [(claim.measured, claim.holds) for claim in result.claims] == [
        (35, True),
        (result.variants["eager"].facts["operator_count"], True),
        (pytest.approx(20 / 36), True),
    ]
    fused = {"compile": msgspec.structs.replace(result.variants["compile"], facts={"library_convolutions": 10})}
    healed = unet.claims(msgspec.structs.replace(result, variants=result.variants | fused))
    assert [claim.holds for claim in healed] == [False, True, True]
    undecided = unet.claims(msgspec.structs.replace(result, variants={}))
    assert [claim.holds for claim in undecided] == [None, None, None]
    assert undecided[0].reason == "compile has no library_convolutions in this run"


def gpu_record(**medians_us: float) -> record.Record:
    """A run on a GPU that copies 4 TB/s, where reading the weights once takes 100 us (in bf16: 50), in round numbers,
    for the claims' arithmetic. A sampling takes as long as forty steps; errors are 1e-3, the fix's half of that."""

    def timed(us: float, size: float, error: float) -> record.CaseResult:
        return record.CaseResult(
            status="ok",
            correctness=record.Correctness(metric="relative_frobenius", value=error, limit=1.0),
            timing=record.Timing(method="cuda_graph", samples_us=[us], warmup=1, calls=1, flush_l2=False),
            bytes=int(size),
        )

    made = {}
    for slug, us in medians_us.items():
        size, error = COPY * 1e-4 * (0.5 if slug.endswith("bf16") else 1), 5e-4 if "persistent" in slug else 1e-3
        cases = {"step": timed(us, size, error), "sampling": timed(40 * us, size, error)}
        made[slug] = record.VariantResult(status="ok", cases=cases)
    gpu = record.Gpu(name="NVIDIA H200", memory_bytes=1, sm_count=132, compute_capability="9.0", l2_bytes=1)
    return record.Record(
        schema_version=record.SCHEMA_VERSION, run_id="test", problem=NAME, step="test", argv=[], started_utc="",
        seconds=0.0, complete=True, source=record.Source(commit=None, dirty=None),
        hardware=record.Hardware(cpu="", cpu_count=1, memory_bytes=1, gpus=[gpu]), software={}, config={},
        ceilings=record.Ceilings(copy_bytes_per_s=COPY), variants=made,
    )  # fmt: skip


TIMES = {
    "eager": 5000, "eager_cudnn_benchmark": 4000, "eager_tf32_off": 9000,
    "compile": 3000, "compile_cudagraph": 1500, "compile_autotune": 1600,
    "compile_bf16": 3000, "compile_cudagraph_bf16": 1200, "compile_autotune_bf16": 1300,
    "persistent": 150, "persistent_bf16": 80,
}  # fmt: skip
MEASURED = {
    "eager: a step over reading its weights once": 40,
    "fastest torch.compile: a step over reading its weights once": 15,
    "fix: a step's speed over the fastest torch.compile": 10,
    "fix in bf16: a step's speed over torch.compile in bf16": 15,
    "fix: a sampling's speed over eager": 4000 / 150,
    "torch.compile: gain of bf16 weights": 1.25,
    "fix: a step over reading its weights once": 1.5,
    "fix in bf16: a step over reading its weights once": 1.6,
    "fix: error of a step over eager's": 0.5,
}


def test_the_gpus_claims_are_the_arithmetic_of_the_record() -> None:
    found = unet.claims(gpu_record(**TIMES))
    assert {claim.name: claim.measured for claim in found} == pytest.approx(MEASURED)
    assert all(claim.holds for claim in found)


def test_the_gpus_claims_fail_where_the_run_says_otherwise() -> None:
    turned = {slug: 120.0 if slug.startswith(("eager", "compile")) else 400.0 for slug in TIMES}
    found = {claim.name: claim.holds for claim in unet.claims(gpu_record(**turned))}
    right = {"torch.compile: gain of bf16 weights", "fix: error of a step over eager's"}
    assert {name for name, holds in found.items() if holds} == right
    assert found.keys() == MEASURED.keys()


@pytest.mark.parametrize(
    ("without", "undecided"),
    [
        ("compile_autotune", [1, 2, 5]),
        ("eager_tf32_off", [0, 4]),
        ("eager", [0, 4, 8]),
        ("persistent_bf16", [3, 7]),
    ],
)
def test_a_claim_whose_variant_is_missing_is_undecided(without: str, undecided: list[int]) -> None:
    found = unet.claims(gpu_record(**{slug: us for slug, us in TIMES.items() if slug != without}))
    assert [i for i, claim in enumerate(found) if claim.holds is None] == undecided
    assert found[undecided[0]].reason == f"{without} has no time for step in this run"


# What the variants are made of


@pytest.mark.parametrize("how", convolutions.LAYERS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 10, 5, padding=2),
        nn.Conv1d(6, 10, 1),
        nn.Conv1d(6, 6, 3, 2, 1),
        nn.ConvTranspose1d(6, 4, 4, 2, 1),
    ],
    ids=["k5", "k1", "down", "up"],
)
def test_each_convolution_is_the_one_that_it_replaces(layer: nn.Module, how: str, batch: int) -> None:
    x = torch.randn(batch, 6, 8, dtype=torch.float64)
    layer = layer.double().requires_grad_(False)
    model = convolutions.swap(nn.Sequential(layer), how)
    assert type(model[0]) in convolutions.LAYERS[how]
    torch.testing.assert_close(model(x), layer(x))


@pytest.mark.parametrize("how", convolutions.LAYERS)
def test_no_convolution_of_the_network_is_left(how: str) -> None:
    model = convolutions.swap(repro.plain(TINY, torch.float32), how)
    made = [m for m in model.modules() if isinstance(m, convolutions.LAYERS[how])]
    assert len(made) == 35
    assert not any(isinstance(m, nn.Conv1d | nn.ConvTranspose1d) for m in model.modules())


@pytest.mark.parametrize("batch", [1, 3])
def test_scales_and_shifts_of_all_steps_in_one_product(batch: int) -> None:
    config = dataclasses.replace(TINY, batch=batch, steps=5)
    model, table = repro.plain(config, torch.float32), unet1d.ddpm_coefficients(config.steps)
    cond, noise = repro.inputs(config, torch.float32)[2], repro.starting_noise(config)
    sampler = film_once.sampler(model, table)
    linears = {}
    for name, sample in (
        ("once", lambda: sampler(noise, cond)),
        ("each", lambda: unet1d.sample_actions(model, noise, cond, table)),
    ):
        linears[name] = operators.count(model, sample)["operators"]["aten.addmm"]
        assert relative_error(sample(), repro.exact_actions(config, cond.double())) < repro.EXACT_LIMIT
    assert linears == {"once": 2 + 1, "each": config.steps * (2 + 12)}


def test_a_conv_block_that_does_not_run_is_beyond_the_limit() -> None:
    """The seed's code skips one of the 25 for a shape that it has no branch for, and its test cannot see it."""
    truth = exact_step(TINY)
    step = repro.inputs(TINY, torch.float32)
    modules = repro.plain(TINY, torch.float32).named_modules()
    names = [name for name, module in modules if isinstance(module, unet1d.Conv1dBlock)]
    assert len(names) == 25
    for name in names:
        model = repro.plain(TINY, torch.float32)
        assert relative_error(model(*step), truth) < repro.EXACT_LIMIT
        conv = model.get_submodule(name).block[0]
        conv.weight.zero_()
        conv.bias.zero_()
        assert relative_error(model(*step), truth) > max(repro.LIMITS.values()), name


def test_the_seeds_loop_records_for_autograd_and_is_right() -> None:
    recorded = []
    model = repro.plain(TINY, torch.float32)
    model.register_forward_hook(lambda *call: recorded.append(call[2].grad_fn is not None))
    table = unet1d.ddpm_coefficients(TINY.steps)
    with torch.inference_mode():  # as the library measures everything
        out = repro.step_as_seed(model, TINY, table)
    assert recorded == [True]
    assert relative_error(out, exact_step(TINY)) < repro.EXACT_LIMIT


def test_a_view_is_no_operator() -> None:
    x = torch.randn(4, 6)
    counted = operators.count(nn.Identity(), lambda: x.T.reshape(3, 8).unsqueeze(0)[0] + 1)
    assert counted["operators"] == {"aten.clone": 1, "aten.add": 1}
    assert counted["data_movement_count"] == 1


@pytest.mark.parametrize("name", repro.KERNELS)
def test_kernels_that_cannot_run_here_say_so(name: str) -> None:
    model, step = repro.plain(TINY, torch.float32), repro.inputs(TINY, torch.float32)
    with pytest.raises(problem.ProblemError, match=f"kernels/{name} cannot run here: .*GPU"):
        repro.callables(unet.variant(name), model, step[0], unet1d.ddpm_coefficients(TINY.steps))


# The programs


def test_forward_passes_by_the_command_line(python: Python) -> None:
    done = python(FOLDER / "policy.py", "--config", "tiny", "--evals", 3, "--variant", "conv_gemm", path=SOURCES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("conv_gemm: 3 forward passes, ")


def test_an_episode_by_part(python: Python) -> None:
    pytest.importorskip("gym_pusht")
    words = ["--mode", "policy", "--predictions", 2, "--config", "push_t_10_steps"]
    done = python(FOLDER / "policy.py", *words, path=SOURCES)
    assert done.returncode == 0, done.stderr
    shares = [float(line.split("│")[3].strip(" %")) for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert shares[2] == max(shares)


def test_policy_mode_without_the_simulator_says_what_to_do(python: Python, tmp_path: Path) -> None:
    (tmp_path / "gym_pusht.py").write_text("raise ModuleNotFoundError(\"No module named 'gym_pusht'\")\n")
    done = python(FOLDER / "policy.py", "--mode", "policy", path=[tmp_path, *SOURCES])
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs gym-pusht, which ./scripts/repro unet_conv_inference installs" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--variant", "nonsense"], "has no variant 'nonsense'"),
        (["--variant", "graph"], "graph runs on cuda only"),
        (["--mode", "policy", "--variant", "eager_bf16"], "which eager_bf16 is not for"),
        (["--mode", "policy", "--variant", "persistent"], "persistent runs on cuda only"),
        (["--mode", "policy", "--config", "tiny"], "config tiny has another condition than Push-T's"),
        (["--variant", "policy"], "policy has no U-Net"),
    ],
)
def test_a_users_mistake_is_one_sentence(python: Python, words: list[str], what: str) -> None:
    if "policy" in words:
        pytest.importorskip("gym_pusht")
    done = python(FOLDER / "policy.py", *words, path=SOURCES)
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prediction_is_the_vision_encoder_then_all_steps() -> None:
    config = dataclasses.replace(TINY, cond_dim=1028)
    assert push_t.fits(config)
    assert not push_t.fits(TINY)
    *_, case = repro.build(unet.variant("eager"), config).cases
    assert case.name == "prediction"
    with torch.inference_mode():
        actions, exact = case.run(), case.reference()
        assert relative_error(actions, exact) < repro.EXACT_LIMIT
        images, positions = push_t.observed(config)
        moved = push_t.condition(resnet18.build(config.seed), images, positions + 30.0)
        elsewhere = repro.exact_actions(config, moved.double())
    assert relative_error(elsewhere, exact) > 0.01, "the position has no effect"


def test_the_simulation_restarts_where_an_episode_ends() -> None:
    pytest.importorskip("gym_pusht")
    world = push_t.PushT(seed=0)
    world.steps = push_t.EPISODE_STEPS - 1
    world.play([(256.0, 256.0)])
    assert world.done
    world.play([(256.0, 256.0)] * 3)
    assert (world.steps, world.done) == (3, False)
    assert world.seen[-1]["pixels"].shape == (96, 96, 3)


def test_a_melody_is_periods_of_its_notes() -> None:
    found = list(power_tones.notes("A A- C", octaves=1, quarter_s=0.5))
    assert [note.period_s for note in found[:2]] == pytest.approx([1 / 880] * 2)
    assert [note.periods for note in found[:2]] == [440, 880]
    assert 1 / found[2].period_s == pytest.approx(523.251, abs=1e-3)  # C5 where A4 is 440 Hz


def test_tones_are_off_by_default_and_refused_without_a_gpu(python: Python) -> None:
    quiet = python(FOLDER / "power_tones.py", path=SOURCES)
    assert quiet.returncode == 0
    assert "at your own risk" in quiet.stderr
    assert "Nothing was played" in quiet.stderr
    if not torch.cuda.is_available():
        refused = python(FOLDER / "power_tones.py", "--play", path=SOURCES)
        assert refused.returncode == 2
        assert "needs a CUDA GPU" in refused.stderr


# The notebooks


def answers(notebook: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the notebook's cells leave, run one after another on the records of the checkout `root`."""
    monkeypatch.setenv("WORKLOG_ROOT", str(root))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in json.loads((FOLDER / notebook).read_text())["cells"]:
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


def test_the_convolutions_indexing(root: Path, monkeypatch, capsys) -> None:
    found = answers("conv_indexing.ipynb", root, monkeypatch)
    words = capsys.readouterr().out
    assert found["checked"] == 25
    assert words.count("equal to PyTorch") == 4 + 1
    assert "equal to Conv1d, GroupNorm, Mish, scale and shift of PyTorch" in words
    assert "channel 241: store to element 4097 of 4096" in words


def test_notebook_without_runs_says_so(root: Path, monkeypatch, capsys) -> None:
    found = answers("analysis.ipynb", root, monkeypatch)
    assert "No runs yet. ./scripts/repro unet_conv_inference makes one" in capsys.readouterr().out
    assert (found["figures"], len(found["times"]), len(found["claims"])) == (0, 0, 0)
    assert found["floor"]["weights"].sum() == 79_947_266


def test_notebook_on_a_cpu_run(run: Path, root: Path, monkeypatch, capsys) -> None:
    shutil.copytree(run, root / "out" / NAME / run.name)  # where a run of one's own lies
    found = answers("analysis.ipynb", root, monkeypatch)
    words = capsys.readouterr().out
    assert "Runs on a CPU only" in words
    assert "'extern_kernels.convolution': 35" in words
    assert len(found["claims"]) == 3
    assert len(found["step"]) == sum("cpu" in v.devices for v in unet.variants) - 1
    assert len(found["policy"]) == len(found["step"])
    assert (found["policy"]["at most"] > 1).all()
    assert found["figures"] == 2
