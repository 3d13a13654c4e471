"""The process of one variant: `python -m worklog.child measure|capture|ceilings ...`.

`measure` writes a VariantResult as JSON, whole, after each case: a killed process leaves what it had.
`capture` runs a case inside a profiler's range and times nothing. What goes wrong is one sentence in the result; the
traceback goes to stderr, which the runner keeps as the run's log.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from worklog import container, environment
from worklog.capture import memory_snapshot, torch_profiler
from worklog.measure import case as measured
from worklog.measure import ceilings, timing
from worklog.problem import Case, Config, Device, Problem, ProblemError, Variant, Workload, load, packages_folder
from worklog.record import RecordError, VariantResult, write_whole

LEAST_TORCH = (2, 11)
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worklog.child", description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    measuring = modes.add_parser("measure")
    capturing = modes.add_parser("capture")
    measuring.add_argument("problem")
    measuring.add_argument("variant")
    measuring.add_argument("--config", required=True)
    measuring.add_argument("--result", type=Path, required=True)
    capturing.add_argument("problem")
    capturing.add_argument("--variant", required=True)
    capturing.add_argument("--config", help="default: the problem's first for cuda, or for cpu where there is no GPU")
    capturing.add_argument("--case", help="default: the first")
    capturing.add_argument("--iterations", type=int, default=3)
    capturing.add_argument("--trace", type=Path)
    capturing.add_argument("--snapshot", type=Path)
    capturing.add_argument("--plain", action="store_true", help="no shapes, stacks and modules in the trace")
    modes.add_parser("ceilings").add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args(argv)
    try:
        if chosen.mode == "ceilings":
            write_whole(chosen.result, msgspec.json.encode(ceilings.measure("cuda")))
            return 0
        problem = load(chosen.problem)
        variant = problem.variant(chosen.variant)
        use_packages(variant)
        if chosen.mode == "measure":
            measure(problem, variant, problem.config(chosen.config, "cuda"), chosen.result)
        else:
            capture(problem, variant, chosen)
    except (ProblemError, RecordError) as error:
        print(f"worklog: {error}", file=sys.stderr)
        return 2
    return 0


def use_packages(variant: Variant) -> None:
    """Put the folders of the packages that the variant needs first on the path, here and in processes begun here.

    AOTAutograd's cache is off: its key is the graph that Dynamo traced, in which two releases of a tensor subclass look
    alike, so one variant would run the code compiled for another. Inductor's own cache has the real graph as its key.
    """
    os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    folders = [str(packages_folder() / f"{name}-{version}") for name, version in variant.needs.items()]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))


def unmet(variant: Variant, config: Config) -> str | None:
    """What keeps the variant from running here, in one sentence; None: nothing. Imports torch last, if at all."""
    for name, version in variant.needs.items():
        remedy = f"./scripts/repro puts it into .packages/{name}-{version}"
        have = installed(name)
        if have is None:
            return f"needs {name} {version}, which is not installed; {remedy}"
        if have != version:
            return f"needs {name} {version}, but finds {have}; {remedy}"
    found, cuda = environment.torch_version()
    least = ".".join(map(str, LEAST_TORCH))
    if found is None:
        return f"needs torch {least} or later, which is not installed; ./scripts/repro installs it"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < LEAST_TORCH:
        return f"needs torch {least} or later, but finds {found}; ./scripts/repro installs it"
    if config.device == "cuda":
        reason = None
        if not environment.hardware("cuda").gpus:
            reason = "the driver shows none"
        elif cuda is None:
            reason = f"torch {found} is built without CUDA"
        elif here() != "cuda":
            fault = container.driver_fault(cuda, container.host_driver(), container.library())
            reason = "torch cannot use this one" + (f" ({fault[0]}: {fault[1]})" if fault else "")
        if reason:
            return f"config {config.name} needs a CUDA GPU and {reason}; --device cpu runs what a CPU can show"
    return None


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(problem: Problem, variant: Variant, config: Config, file: Path) -> None:
    """Build, then check and time each case; `file` holds the result so far at every moment."""
    packages = {name: version for name in variant.needs if (version := installed(name))}
    result = VariantResult(status="error", message="while it was set up", packages=packages)

    def keep(**changes: Any) -> VariantResult:
        changed = msgspec.structs.replace(result, **changes)
        write_whole(file, msgspec.json.encode(changed))
        return changed

    result = keep()
    if reason := unmet(variant, config):
        keep(status="unsupported", message=reason)
        return
    result = keep(message="while it was built")
    try:
        workload = build(problem, variant, config)
        result = keep(facts=dict(workload.facts))
    except ProblemError as reason:
        keep(status="unsupported", message=str(reason))
        return
    except Exception as error:
        status, message = measured.explain(error)
        keep(status=status, message=f"build: {message}")
        return
    with nvtx_range(variant.slug, config):
        for case in workload.cases:
            result = keep(message=f"in case {case.name}")
            done = measured.measure(case, config.device)
            result = keep(cases={**result.cases, case.name: done})
    bad = [(name, done) for name, done in result.cases.items() if done.status != "ok"]
    if bad:
        keep(status=bad[0][1].status, message="; ".join(f"case {name}: {done.message}" for name, done in bad))
    else:
        keep(status="ok", message=None)


def build(problem: Problem, variant: Variant, config: Config) -> Workload:
    import torch

    torch.manual_seed(SEED)
    workload = problem.build(variant, config)
    msgspec.json.encode(dict(workload.facts))  # a fact that is not JSON is an error of the build
    return workload


@contextlib.contextmanager
def nvtx_range(slug: str, config: Config) -> Iterator[None]:
    """The range by which nsys and ncu select the variant. Nothing on the CPU: its torch has no NVTX."""
    if config.device == "cpu":
        yield
        return
    import torch

    with torch.cuda.nvtx.range(slug):
        yield


def capture(problem: Problem, variant: Variant, chosen: argparse.Namespace) -> None:
    """Warm up, then `chosen.iterations` runs of one case, on CUDA between cudaProfilerStart and Stop. Each run is in a
    range of its own, named as the variant (NVTX, in torch's trace a user annotation): what repeats has a spread.

    The warm-up is `case.warmup` runs, two at least, so that what compiles or records a graph has done so. What is
    captured is what is timed, a graph's replay where the case asks for one; only the passes that attribute to Python
    and to the allocator run the case itself, because a replay has neither. Raises ProblemError for an unknown case or
    where the variant cannot run here.
    """
    config = problem.config(chosen.config, "cuda") if chosen.config else problem.config(None, here())
    if reason := unmet(variant, config):
        raise ProblemError(f"{variant.slug} {reason}")
    import torch

    case = find(build(problem, variant, config).cases, chosen.case)
    cuda, run = config.device == "cuda", case.run

    def runs() -> None:
        for _ in range(chosen.iterations):
            annotated = torch.profiler.record_function(variant.slug) if chosen.trace else contextlib.nullcontext()
            with nvtx_range(variant.slug, config), annotated:
                run()
        if cuda:
            torch.cuda.synchronize()

    with torch.inference_mode():
        for _ in range(max(case.warmup, 2)):
            run()
        if chosen.plain or not (chosen.trace or chosen.snapshot):
            run = timing.prepare(case, config.device)
            run()
        if cuda:
            torch.cuda.synchronize()
        if chosen.trace:
            torch_profiler.trace(runs, chosen.trace, plain=chosen.plain)
            leave()
        elif chosen.snapshot:
            memory_snapshot.snapshot(runs, chosen.snapshot)
        elif cuda:
            torch.cuda.profiler.start()
            runs()
            torch.cuda.profiler.stop()
        else:
            runs()


def leave() -> NoReturn:
    """End the process, well, without taking torch down: after torch.profiler, torch 2.11 on CUDA 13 aborts there
    (`free(): invalid pointer`). What the process had to do is on disk by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def find(cases: Sequence[Case], name: str | None) -> Case:
    for case in cases:
        if name in (None, case.name):
            return case
    raise ProblemError(f"No case {name!r}; there are: {', '.join(case.name for case in cases) or 'none'}.")


def here() -> Device:
    """cuda if torch can use a GPU on this machine."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
