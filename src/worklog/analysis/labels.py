"""What a frame is called, and what it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from worklog.traces.schema import ANNOTATION, MODULE, OPERATOR, PYTHON

BACKWARD, SIZE = 5, 6
"""Kind of a frame beside the schema's: the operator of a backward pass; and how many kinds there are."""
KINDS = {ANNOTATION: "range", MODULE: "module", PYTHON: "python", OPERATOR: "operator", BACKWARD: "backward"}
EVALUATE = "autograd::engine::evaluate_function: "
EMITTED = (
    r"(?s)^(?P<name>.*?)(?:, seq = (?P<sequence>\d{1,18}))?(?P<id>, op_id = \d+)?"
    r"(?:, sizes = \[.*\])?(?:, input_op_ids = \[.*\])?$"
)
"""What torch/csrc/profiler/standalone/nvtx_observer.cpp writes; each part but the name may be absent."""
PYTHON_FRAME = re.compile(r"(?P<path>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
PLUMBING = re.compile(
    r"<|(.*-packages/)?torch/|(.*/lib/python3[^/]*/)?(contextlib|functools|runpy|threading|typing)\.py\("
)
"""Python frames that say nothing of the program: built-in functions, frozen modules, torch itself, what wraps calls."""
INSTANCE = re.compile(r"_\d+$")
"""What torch.profiler puts after the class of a module: the first Linear that ran is Linear_0."""
OPERATORS = re.compile(r"[A-Za-z_]\w*::\S")
BACKWARDS = re.compile(rf"{EVALUATE}|.*Backward\d*$", re.DOTALL)


@dataclass(frozen=True)
class Labels:
    """Of frames, one after another."""

    kind: Any
    """Of KINDS: a range with the name of an operator is one."""
    text: Any
    """Index into `texts`."""
    texts: list[str]
    sequence: Any
    """-1: none."""
    plumbing: Any


def labels(frames: pd.DataFrame) -> Labels:
    kind, code = frames["kind"].to_numpy().astype(np.int64), frames["name"].cat.codes.to_numpy()
    bare, emitted, sequence_of = _emitted([str(name) for name in frames["name"].cat.categories])
    short, names = pd.factorize(np.asarray(bare, dtype=object))
    matches = (np.asarray([bool(p.match(name)) for name in names], bool) for p in (OPERATORS, BACKWARDS, PLUMBING))
    operator, backward, plumbing = (match[short][code] for match in matches)
    named = kind == ANNOTATION
    sequence = np.where(named, sequence_of[code], frames["sequence"].to_numpy())
    kind[named & (operator | emitted[code])] = OPERATOR
    kind[(kind == OPERATOR) & (backward | ((frames["forward_thread"].to_numpy() > 0) & (sequence >= 0)))] = BACKWARD
    pair, pairs = pd.factorize(short[code] * SIZE + kind)
    text, texts = pd.factorize(np.asarray([_text(str(names[p // SIZE]), int(p % SIZE)) for p in pairs], dtype=object))
    return Labels(kind, text[pair], list(texts), sequence, (kind == PYTHON) & plumbing)


def _emitted(names: Sequence[str]) -> tuple[Sequence[str], Any, Any]:
    """Each name without emit_nvtx's arguments; whether it had any; its sequence number, -1: none."""
    if not any(", seq = " in name or ", op_id = " in name for name in names):
        return names, np.zeros(len(names), bool), np.full(len(names), -1, np.int64)
    parts = pc.extract_regex(pa.array([name.encode(errors="replace").decode() for name in names]), EMITTED)
    sequence = parts.field("sequence").to_pylist()
    had = [bool(number or op_id) for number, op_id in zip(sequence, parts.field("id").to_pylist(), strict=True)]
    numbers = [int(number) if number else -1 for number in sequence]
    return parts.field("name").to_pylist(), np.asarray(had, bool), np.asarray(numbers, np.int64)


def _text(name: str, kind: int) -> str:
    """`ProfilerStep#4` and its like are one; `train.py(21): loss_of` is `train.py:21 loss_of`."""
    if kind == MODULE:
        return name.removeprefix("nn.Module: ")
    if kind == ANNOTATION:
        return "ProfilerStep" if name.startswith("ProfilerStep#") else name
    if kind == PYTHON and (frame := PYTHON_FRAME.fullmatch(name)):
        return f"{frame['path'].rsplit('-packages/')[-1]}:{frame['line']} {frame['function']}"
    if kind == PYTHON:
        return re.sub(r" at 0x[0-9a-f]+", "", name)
    return name.removeprefix(EVALUATE)
