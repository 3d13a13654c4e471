"""The captures that ask a finding's next question, as command lines.

Options: https://docs.nvidia.com/nsight-systems/UserGuide (CLI profile command) and
https://docs.nvidia.com/nsight-compute/NsightComputeCli. Python backtraces come only with `--cudabacktrace` and with CPU
sampling on, and cost the host time: they say where, not how long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from worklog.traces.activity import short_name

PLAIN = "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --output=plain python PROGRAM"
NODES = "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --output=nodes python PROGRAM"
OPERATORS = (
    "nsys profile --trace=cuda,nvtx,cudnn,cublas --pytorch=autograd-shapes-nvtx --sample=none --output=operators "
    "python PROGRAM"
)
STACKS = (
    "nsys profile --trace=cuda,nvtx,osrt --cudabacktrace=kernel --python-backtrace=cuda --output=host python PROGRAM"
)
WAITS = (
    "nsys profile --trace=cuda,nvtx,osrt --cudabacktrace=sync,memory --python-backtrace=cuda "
    "--output=waits python PROGRAM"
)
COPIES = (
    "nsys profile --trace=cuda,nvtx --cudabacktrace=memory --python-backtrace=cuda --cuda-memory-usage=true "
    "--output=copies python PROGRAM"
)
LAUNCHES = 20
"""Counted by ncu; ours: some layers of a model, in seconds."""


def traffic(kernels: Iterable[str], output: str) -> str:
    """DRAM bytes of these kernels (demangled names), which a timeline does not hold."""
    bases = sorted({short_name(name).partition("<")[0] for name in kernels})
    plain = [base for base in bases if re.fullmatch(r"\w+", base)]  # names come from other programs
    chosen = f"--kernel-name='regex:^({'|'.join(plain)})$' " if plain and plain == bases else ""
    return (
        f"ncu {chosen}--launch-count={LAUNCHES} --clock-control=none --cache-control=all "
        "--metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum "
        f"--export={output} python PROGRAM"
    )
