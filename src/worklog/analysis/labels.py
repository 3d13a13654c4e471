"""What a frame is called, and what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces.schema import ANNOTATION, MODULE, OPERATOR, PYTHON

BACKWARD, SIZE = 5, 6
"""Kind of a frame beside the schema's: the operator of a backward pass; and how many kinds there are."""
KINDS = {ANNOTATION: "range", MODULE: "module", PYTHON: "python", OPERATOR: "operator", BACKWARD: "backward"}
EVALUATE = "autograd::engine::evaluate_function: "
PYTHON_FRAME = re.compile(r"(?P<path>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
PLUMBING = re.compile(
    r"<|(.*-packages/)?torch/|(.*/lib/python3[^/]*/)?(contextlib|functools|runpy|threading|typing)\.py\("
)
"""Python frames that say nothing of the program: built-in functions, frozen modules, torch itself, what wraps calls."""
INSTANCE = re.compile(r"_\d+$")
"""What torch.profiler puts after the class of a module: the first Linear that ran is Linear_0."""
OPERATORS = re.compile(r"(aten|prims?|torch|autograd|c10d?)::\S")
"""Ranges that are operators even without what emit_nvtx adds to a name; others, as FSDP::forward, may be anything."""
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


def labels(frames: pd.DataFrame, rows: Any) -> Labels:
    """Of the frames at `rows`."""
    kind, sequence, forward_thread = (frames[name].to_numpy()[rows] for name in ("kind", "sequence", "forward_thread"))
    which, pairs = pd.factorize(frames["name"].cat.codes.to_numpy()[rows].astype(np.int64) * SIZE + kind)
    names = frames["name"].cat.categories.to_numpy()[pairs // SIZE]
    known = [_label(str(name), own) for name, own in zip(names, (pairs % SIZE).tolist(), strict=True)]
    kinds, texts, numbers, plumbing = zip(*known, strict=True) if known else ((), (), (), ())
    kind, sequence = np.asarray(kinds, np.int64)[which], np.maximum(sequence, np.asarray(numbers, np.int64)[which])
    kind[(kind == OPERATOR) & (forward_thread > 0) & (sequence >= 0)] = BACKWARD
    text, distinct = pd.factorize(np.asarray(texts, dtype=object))
    return Labels(kind, text[which], list(distinct), sequence, np.asarray(plumbing, bool)[which])


def _label(name: str, kind: int) -> tuple[int, str, int, bool]:
    """kind, text, sequence number and whether it is plumbing, as far as the name tells."""
    number = -1
    if kind == ANNOTATION:
        bare, number = _emitted(name)
        if number >= -1 or OPERATORS.match(bare):
            name, kind = bare, OPERATOR
    if kind == OPERATOR and BACKWARDS.match(name):
        kind = BACKWARD
    return kind, _text(name, kind), number, kind == PYTHON and bool(PLUMBING.match(name))


def _emitted(name: str) -> tuple[str, int]:
    """What torch's emit_nvtx makes of an operator: its name, and its sequence number, -1: none; else the name, -2.

    Written by torch/csrc/profiler/standalone/nvtx_observer.cpp; each part but the name may be absent, and older
    versions wrote no op_id. A range of the program's own may well be called `prefill, seq = 512`.
    """
    bare, found, rest = name.partition(", seq = ")
    if found:
        number = rest.partition(", ")[0]
        if number.isdecimal() and len(number) < 19 and (", op_id = " in rest or _is_torch(bare)):
            return bare, int(number)
        return name, -2
    bare, found, rest = name.partition(", op_id = ")
    if found and rest.partition(",")[0].isdecimal():
        return bare, -1
    bare, found, _ = name.partition(", sizes = [")
    return (bare, -1) if found and _is_torch(bare) else (name, -2)


def _is_torch(name: str) -> bool:
    return bool(OPERATORS.match(name) or BACKWARDS.match(name))


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
