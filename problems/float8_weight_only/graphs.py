"""What one quantised Linear asks of the machine: the graph that the compiler sees, and the bytes that its kernels move.

Both need no GPU. The graph is AOTAutograd's, before Inductor. The bytes are counted over the operators that really run,
those inside an opaque operator too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, COLUMNS = 512, 256


def linear_facts() -> dict[str, object]:
    """aten_graph; opaque_operators, those of it that the compiler cannot fuse; eager_bytes_per_element, counted."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16))
    quantize_(model, Float8WeightOnlyConfig(set_inductor_config=False))
    x = torch.randn(1, COLUMNS, dtype=torch.bfloat16)
    with torch.no_grad():
        targets = aten_graph(model, x)
        opaque = [t for t in targets if not t.startswith("aten.")]
        eager = bytes_per_element(model, x)
    return {
        "aten_graph": targets,
        "opaque_operators": opaque,
        "eager_bytes_per_element": eager,
    }


def aten_graph(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Targets of the forward graph's calls, in order."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(model, backend=aot_autograd(fw_compiler=keep))(x)
    torch._dynamo.reset()
    return [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]


def bytes_per_element(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that reading and writing tensors of the weight's size moves, over the weight's elements."""
    with Traffic() as traffic:
        model(x)
    return traffic.bytes // (ROWS * COLUMNS)


class Traffic(TorchDispatchMode):
    """Counts what each operator reads and writes of tensors with the weight's element count; views move nothing.

    An opaque operator is opened: its own kernel is called, so that the operators inside of it are seen.
    """

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace != "aten":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        read = [t for t in args if isinstance(t, torch.Tensor)]
        if out.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in read}:
            # a broadcast tensor counts by what is stored of it: an expanded scale is read once
            self.bytes += sum(t.untyped_storage().nbytes() for t in (*read, out) if t.numel() == ROWS * COLUMNS)
        return out
