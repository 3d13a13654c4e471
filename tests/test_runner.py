"""Decisions of the runner that need no run; tests/test_repro.py has the runs."""

from __future__ import annotations

import pytest
from test_record import record

from worklog import runner
from worklog.record import Claim, VariantResult


def outcome(*states: str, holds: bool | None = True, complete: bool = True) -> int:
    variants = {f"v{i}": VariantResult(status=state, message="m") for i, state in enumerate(states)}
    claims = [Claim(name="c", holds=holds, measured=1.0, required=1.0, reason="r")]
    return runner.exit_code(record(variants=variants, claims=claims, complete=complete))


@pytest.mark.parametrize(
    ("code", "states", "holds"),
    [
        (0, ("ok", "ok"), True),
        (0, ("ok", "skipped"), None),
        (1, ("ok", "ok"), False),
        (1, ("ok", "wrong_result"), True),
        (1, ("ok", "timeout"), True),
        (1, ("ok", "unsupported"), True),
        (1, ("error", "unsupported"), None),
        (2, ("unsupported", "skipped"), None),
    ],
)
def test_exit_code(code, states, holds):
    assert outcome(*states, holds=holds) == code


def test_exit_code_of_an_interrupted_run():
    assert outcome("ok", "skipped", complete=False) == 130


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-16GB", "v100sxm216gb"),
        ("NVIDIA", "gpu"),
    ],
)
def test_gpu_slug(name, slug):
    assert runner.gpu_slug(name) == slug


@pytest.mark.parametrize(("inside", "what"), [(False, "another folder with --out"), (True, "scripts/docker-run")])
def test_remedy_for_a_full_folder(monkeypatch: pytest.MonkeyPatch, inside: bool, what: str) -> None:
    monkeypatch.setattr(runner.container, "inside", lambda: inside)
    assert what in runner.remedy()
