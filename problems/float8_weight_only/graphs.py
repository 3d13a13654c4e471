"""What one quantised Linear asks of the machine: the graph that the compiler sees, and the bytes that its kernels move.

Both need no GPU. The graph is AOTAutograd's, before Inductor. The bytes are counted over the operators that really ran,
those inside an opaque operator too, as torch.profiler lists them with shapes and types.
"""

from __future__ import annotations

import re

import torch
from torch import nn

ROWS, COLUMNS = 512, 256
WIDTH = {"c10::Float8_e4m3fn": 1, "c10::BFloat16": 2, "float": 4}


def linear_facts(device: str) -> dict[str, object]:
    """aten_graph, opaque_operators; bytes a weight element: eager (operators run), compiled (what fusion leaves)."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False, device=device, dtype=torch.bfloat16))
    quantize_(model, Float8WeightOnlyConfig(set_inductor_config=False))
    x = torch.randn(1, COLUMNS, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        targets = aten_graph(model, x)
        opaque = [t for t in targets if not t.startswith("aten.")]
        eager = bytes_per_element(model, x)
    # Without an opaque operator the chain fuses: read float8, write bfloat16, read it in the product.
    compiled = eager if opaque else WIDTH["c10::Float8_e4m3fn"] + 2 * WIDTH["c10::BFloat16"]
    return {
        "aten_graph": targets,
        "opaque_operators": opaque,
        "eager_bytes_per_element": eager,
        "compiled_bytes_per_element": compiled,
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
    model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model(x)
    total, covered = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.start_ns() < covered:
            continue  # inside an operator that is counted as a whole
        whole = [
            WIDTH[kind]
            for kind, size in zip(event.dtypes(), event.shapes(), strict=False)
            if kind in WIDTH and sorted(n for n in size if n > 1) == sorted((ROWS, COLUMNS))
        ]
        name = re.sub(r"^aten::", "", event.name())
        if name == "copy_":  # destination written, source read
            total += sum(whole)
        elif name == "mul":  # operands read, float32 product written
            total += sum(whole) + WIDTH["float"]
        elif name == "mm":  # weight read
            total += sum(whole)
        elif name == "repeat_interleave":  # the expanded scale written; its source is one column
            total += WIDTH["float"]
        else:
            continue
        covered = event.start_ns() + event.duration_ns()
    return total
