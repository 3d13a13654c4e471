"""What one step asks of the machine, counted without a GPU: PyTorch's operators, and what Inductor makes of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten._unsafe_view"}
COPIES = {"aten.clone", "aten.copy_", "aten._to_copy", "aten.cat", "aten.constant_pad_nd"}


class Operators(TorchDispatchMode):
    """Counts the operators that run a kernel: not views, not allocations.

    One operator is at least one launch on a GPU; cuDNN may launch several.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.read: dict[int, int] = {}
        """Address of each tensor that was read -> its bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        if isinstance(out, Tensor | tuple) and not func.is_view and name not in NO_KERNEL:
            self.calls[name] += 1
            self.read |= {t.data_ptr(): t.nbytes for t in args if isinstance(t, Tensor)}
        return out


def count(model: torch.nn.Module, run: Callable[[], Tensor]) -> dict[str, Any]:
    """Operators of one `run`, most frequent first; how many only move data; the bytes of parameters that were read."""
    with torch.no_grad(), Operators() as seen:  # inference mode would hide what linear, conv1d and pad consist of
        run()
    parameters = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return {
        "operators": dict(seen.calls.most_common()),
        "operator_count": seen.calls.total(),
        "data_movement_count": sum(seen.calls[name] for name in COPIES),
        "parameter_bytes": sum(size for address, size in parameters.items() if address in seen.read),
    }


def unchanged_share(model: torch.nn.Module, sample: Tensor, cond: Tensor) -> float:
    """Of the numbers that the model's scale-and-shift linears read, the share that is the same in two steps."""
    seen: list[Tensor] = []
    films = [block.cond_encoder[1] for block in model.modules() if hasattr(block, "cond_encoder")]
    hooks = [film.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for film in films]
    with torch.inference_mode():
        for timestep in (3, 40):
            model(sample, timestep, cond)
    for hook in hooks:
        hook.remove()
    same = [(a == b).sum().item() for a, b in zip(seen[: len(films)], seen[len(films) :], strict=True)]
    return sum(same) / sum(t.numel() for t in seen[: len(films)])


def compiler_fault() -> str | None:
    """Why torch.compile cannot write code for this CPU, in one sentence; None: it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on a CPU and finds none; install g++"
    return None


def lowered(run: Callable[[], Tensor]) -> dict[str, Any]:
    """Compiles `run` by its first call, and counts in the code that Inductor wrote for it: calls of library code by
    name, and calls of kernels that Inductor wrote itself."""
    from torch._inductor.utils import run_and_get_code

    with torch.inference_mode():
        _, modules = run_and_get_code(run)
    code = "\n".join(modules)
    library = Counter(re.findall(r"\b(extern_kernels\.\w+|torch\.ops\.aten\.\w+)(?:\.\w+)?\(", code))
    own = re.findall(r"^\s+(?:triton_\w+\.run|cpp_fused_\w+|kernels\.cpp_fused_\w+)\(", code, re.M)
    return {
        "library_calls": dict(library.most_common()),
        "library_convolutions": sum(n for name, n in library.items() if "convolution" in name),
        "generated_kernel_calls": len(own),
    }
