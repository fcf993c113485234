"""What a compiled module keeps and needs, read off the two graphs that the compiler makes of a step; what compiles."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch._inductor.lowering  # which PyTorch's decomposition of max_pool2d takes to be there
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from memrewrite.runtime import kernels
from memrewrite.torch_internals.pytrees import tree_flatten


@dataclass(frozen=True)
class CompiledBytes:
    """Bytes of activations and gradients: ``kept`` between the two graphs, ``peak`` at most in either of them.

    ``backward`` counts the operators of the second graph by their names.
    """

    kept: int
    peak: int
    backward: Counter[str]


def counted_inductor(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts what Inductor would compile, which would need a C++ compiler; it is run as AOTAutograd makes it."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(kernels, "Code", counter)
    monkeypatch.setattr(kernels, "keep_code", lambda *kept: None)
    monkeypatch.setattr(kernels, "code_kept", lambda file: None)
    torch.compiler.reset()
    return counter


def compiled_bytes(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> CompiledBytes:
    """Of one step of ``module`` compiled as one graph, which ``loss`` calls.

    A value lives from the node that makes it to its last reader.
    """
    graphs: list[fx.Graph] = []

    def note(graph_module: fx.GraphModule, _: object) -> Any:
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    torch.compiler.reset()
    loss(cast(nn.Module, torch.compile(module, backend=backend, fullgraph=True, dynamic=False))).backward()
    torch.compiler.reset()
    module.zero_grad(set_to_none=True)
    forward, backward = graphs
    outside = {key for node in forward.find_nodes(op="placeholder") for key in _storages(node)}
    made = {node.name for node in forward.output_node().all_input_nodes}
    kept: dict[int, int] = {}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in made:
            kept |= _storages(node)
    size = sum(count for key, count in kept.items() if key not in outside)
    names = Counter(str(node.target) for node in backward.nodes)
    return CompiledBytes(size, max(_peak(graph, outside) for graph in graphs), names)


def _peak(graph: fx.Graph, outside: set[int]) -> int:
    """The most bytes alive while a node of the graph runs, of storages that are not ``outside``."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    bytes_of: dict[int, int] = {}
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    for node, i in number.items():
        last = max((number[user] for user in node.users), default=i)
        for key, count in _storages(node).items():
            if key not in outside:
                bytes_of[key] = count
                birth.setdefault(key, 0 if node.op == "placeholder" else i)
                death[key] = max(death.get(key, i), last)
    steps = [0] * (len(number) + 1)
    for key, count in bytes_of.items():
        steps[birth[key]] += count
        steps[death[key] + 1] -= count
    live = peak = 0
    for step in steps:
        live += step
        peak = max(peak, live)
    return peak


def _storages(node: fx.Node) -> dict[int, int]:
    """The bytes of the storages of what a node gives, by storage."""
    leaves, _ = tree_flatten(node.meta.get("val"))
    found = (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor))
    return {storage._cdata: storage.nbytes() for storage in found}
