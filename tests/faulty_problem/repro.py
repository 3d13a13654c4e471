"""A tiny problem most of whose variants are faulty on purpose; the runner's tests run it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from worklog.problem import Case, Config, ProblemError, Variant, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from worklog.record import Claim, Record

TITLE = "Variants of one matrix product, most of them faulty"


@dataclass(frozen=True, kw_only=True)
class MatmulConfig(Config):
    size: int = 64


CONFIGS = (MatmulConfig(name="cuda", device="cuda", size=4096), MatmulConfig(name="cpu", device="cpu"))

VARIANTS = (
    Variant(slug="plain", summary="the baseline, sound"),
    Variant(slug="wrong", summary="off by 10 %"),
    Variant(slug="wrong_later", summary="right the first time, wrong after"),
    Variant(slug="not_a_number", summary="one NaN in the result"),
    Variant(slug="wrong_shape", summary="a row too few"),
    Variant(slug="raises", summary="raises in its second case"),
    Variant(slug="hangs", summary="sleeps in its second case, in a grandchild too", timeout_s=6.0),
    Variant(slug="killed", summary="kills itself in its second case"),
    Variant(slug="exits", summary="leaves with code 7 while it is built"),
    Variant(slug="out_of_memory", summary="asks for more memory than its limit"),
    Variant(slug="fills_disk", summary="writes into $FAULTY_PROBLEM_FILL until the disk is full"),
    Variant(slug="no_package", summary="needs what nobody has", needs={"no-such-package": "1.0"}),
    Variant(slug="other_version", summary="needs msgspec of long ago", needs={"msgspec": "0.0.1"}),
    Variant(slug="gpu_only", summary="for a GPU alone", devices=("cuda",)),
    Variant(slug="refuses", summary="says while it is built that it is not for this machine"),
    Variant(slug="also_plain", summary="sound, after all of them"),
)


def build(variant: Variant, config: MatmulConfig) -> Workload:
    import torch

    left, right = torch.randn(2, config.size, config.size, device=config.device, dtype=torch.float32)
    state = {"calls": 0}
    if variant.slug == "exits":
        print("about to leave")
        sys.exit(7)
    if variant.slug == "refuses":
        raise ProblemError("it is for a machine with three hands")

    def reference() -> Tensor:
        return left.double() @ right.double()

    def sound() -> Tensor:
        return left @ right

    def faulty() -> Tensor:
        state["calls"] += 1
        result = left @ right
        match variant.slug:
            case "wrong":
                return result * 1.1
            case "wrong_later" if state["calls"] > 1:
                return result * 1.1
            case "not_a_number":
                result[3, 5] = float("nan")
            case "wrong_shape":
                return result[1:]
            case "raises":
                raise RuntimeError("this variant raises\nand says more on a second line")
            case "hangs":
                if os.fork() == 0:
                    os.execvp("sleep", ["sleep", os.environ.get("FAULTY_PROBLEM_SLEEP_S", "987")])
                time.sleep(987)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fills_disk":
                with suppress(OSError), Path(os.environ["FAULTY_PROBLEM_FILL"]).open("wb", buffering=0) as file:
                    while file.write(b"x" * 512):
                        pass
            case "out_of_memory":
                limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                return torch.ones(limit, dtype=torch.float32)
        return result

    size = 4 * config.size**2
    common = {"reference": reference, "limit": 1e-5, "samples": 5, "warmup": 1, "bytes": 3 * size}
    cases = [
        Case(name="first", run=sound, flop=2 * config.size**3, memory=True, **common),
        Case(name="second", run=faulty, flop=2 * config.size**3, **common),
        Case(name="third", run=sound, **common),
    ]
    return Workload(cases=cases, facts={"size": config.size})


def claims(record: Record) -> list[Claim]:
    from worklog.record import Claim

    if os.environ.get("FAULTY_PROBLEM_CLAIMS") == "raise":
        raise KeyError("no_such_variant")
    plain = record.variants.get("plain")
    if plain is None or "first" not in plain.cases or plain.cases["first"].timing is None:
        return [
            Claim(name="a product takes time", holds=None, measured=None, required=None, reason="plain did not run")
        ]
    taken = plain.cases["first"].timing.median_us
    required = float(os.environ.get("FAULTY_PROBLEM_REQUIRED_US", "0"))
    return [Claim(name="a product takes time", holds=taken > required, measured=taken, required=required, unit="us")]


if __name__ == "__main__":
    from worklog.cli import problem_main

    problem_main(__file__)
