"""What a problem declares: variants, configs, cases and claims; and how problems are found.

A problem is a folder `problems/<name>/` whose `repro.py` defines

    TITLE     one sentence, the symptom
    VARIANTS  tuple[Variant, ...], the baseline first
    CONFIGS   tuple[Config, ...], one for "cuda", one for "cpu" at least; the first that fits the device is the default
    build(variant, config) -> Workload      imports torch inside, runs in the variant's own process; raises ProblemError
                                            where this machine cannot run the variant
    claims(record) -> list[Claim]           reads the finished record, imports nothing heavy

Nothing in this module imports torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from worklog.record import Claim, Record

Device = Literal["cpu", "cuda"]


class ProblemError(Exception):
    """A user's mistake or a missing requirement, in one sentence. The CLI prints it and exits 2."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the workload. Its slug is the CLI value, the NVTX range, the record's key, the worklog's word."""

    slug: str
    summary: str
    needs: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> exact version that must come from a directory of its own, e.g. {"torchao": "0.13.0"}."""
    devices: tuple[Device, ...] = ("cpu", "cuda")
    timeout_s: float = 900.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `build` reads."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that changes a number. Problems subclass it and add fields; all fields land in the record."""

    name: str
    device: Device

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a variant measures.

    `run` does the work once and returns its result; it is checked against `reference` before it is timed.
    """

    name: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor] | None = None
    """Float64 or float32 result of the same shape; None for a case that has no result to check."""
    limit: float = 0.0
    """Largest relative Frobenius error, ||run - reference|| / ||reference||."""
    calls: int = 1
    """Equal calls that one `run` makes (rotated buffers); times are divided by it."""
    repeat: int = 1
    """Runs in one sample, one after another without waiting, so that the host's work for one hides behind the GPU's
    work for the one before; times are divided by it too."""
    bytes: int = 0
    """Least bytes that ONE call must move through device memory."""
    flop: int = 0
    """Floating-point operations of ONE call, a multiply-add counted as two."""
    graph: bool = False
    """Time the replay of a CUDA graph of `run`; otherwise each sample is one `run` between two events."""
    flush_l2: bool = False
    """Overwrite the L2 cache before each sample (cases whose data would fit into it)."""
    samples: int = 30
    warmup: int = 5
    memory: bool = False
    """Also measure the peak allocated memory of one `run`."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What `build` returns: the cases, and facts that need no timing (graphs, byte counts, flags)."""

    cases: Sequence[Case]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values; they land in the variant's record as they are."""


@dataclass(frozen=True)
class Problem:
    """A problem folder, loaded."""

    name: str
    folder: Path
    module: ModuleType

    @property
    def title(self) -> str:
        return self.module.TITLE  # type: ignore[no-any-return]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return self.module.VARIANTS  # type: ignore[no-any-return]

    @property
    def configs(self) -> tuple[Config, ...]:
        return self.module.CONFIGS  # type: ignore[no-any-return]

    def variant(self, slug: str) -> Variant:
        for variant in self.variants:
            if variant.slug == slug:
                return variant
        known = ", ".join(v.slug for v in self.variants)
        raise ProblemError(f"{self.name} has no variant {slug!r}; it has: {known}.")

    def config(self, name: str | None, device: Device) -> Config:
        """The config called `name`, or the first one for `device`."""
        for config in self.configs:
            if config.name == name or (name is None and config.device == device):
                return config
        known = ", ".join(c.name for c in self.configs)
        raise ProblemError(f"{self.name} has no config {name or device!r}; it has: {known}.")

    def build(self, variant: Variant, config: Config) -> Workload:
        return self.module.build(variant, config)  # type: ignore[no-any-return]

    def claims(self, record: Record) -> list[Claim]:
        return self.module.claims(record)  # type: ignore[no-any-return]


def root() -> Path:
    """The repository: $WORKLOG_ROOT, else the nearest folder above here or the working folder that has problems/.

    Raises ProblemError outside of a checkout.
    """
    if given := os.environ.get("WORKLOG_ROOT"):
        return Path(given).resolve()
    for start in (Path.cwd(), Path(__file__).resolve()):
        for folder in (start, *start.parents):
            if (folder / "problems").is_dir() and (folder / "pyproject.toml").is_file():
                return folder
    raise ProblemError("No problems/ folder here or above; run inside a checkout or set WORKLOG_ROOT to one.")


def packages_folder() -> Path:
    """Where packages that need a folder of their own lie, as `<name>-<version>/`: $WORKLOG_PACKAGES or .packages/."""
    return Path(os.environ.get("WORKLOG_PACKAGES") or root() / ".packages")


def names() -> list[str]:
    """The problems of this checkout, sorted."""
    return sorted(p.parent.name for p in (root() / "problems").glob("*/repro.py"))


def load(name: str) -> Problem:
    """The problem called `name` (a folder under problems/), or the one at the path `name`.

    Raises ProblemError if there is none, or if its repro.py does not declare what a problem must.
    """
    folder = Path(name) if (Path(name) / "repro.py").is_file() else root() / "problems" / name
    script = folder / "repro.py"
    if not script.is_file():
        raise ProblemError(f"No problem {name!r}; there are: {', '.join(names()) or 'none'}.")
    folder = folder.resolve()
    sys.path.insert(0, str(folder))  # a problem's own modules (its kernels) are imported by plain name
    spec = importlib.util.spec_from_file_location(f"problem_{folder.name}", folder / "repro.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ProblemError(f"{script} cannot be loaded: {type(error).__name__}: {error}.") from error
    missing = [n for n in ("TITLE", "VARIANTS", "CONFIGS", "build", "claims") if not hasattr(module, n)]
    if missing:
        raise ProblemError(f"{script} does not define {', '.join(missing)}.")
    return Problem(folder.name, folder, module)
