"""What Inductor's code for CUDA would hold beside its results, written without CUDA and without Triton.

Its decisions need the device's properties alone; kernels are written as text and compiled by nobody.
"""

import functools
import re
import sys
import types
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as settings
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map

from memrewrite.targets.allocator import rounded
from memrewrite.torch_internals.compiled_code import CompiledCode

_CUDA = torch.device("cuda:0")
_HOPPER = types.SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    is_integrated=0,
    gcnArchName="",
)
_MADE = re.compile(r"(\w+) = empty_strided_cuda\((\(.*?\)), (\(.*?\)), torch\.(\w+)\)")
_RENAMED = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(buf\d+)\b")
_GONE = re.compile(r"\bdel (\w+)")
_OF_DEVICE = {  # what code asks of a device, and what does instead
    "torch.cuda._DeviceGuard(0)": "__import__('contextlib').nullcontext()",
    "torch.cuda.set_device(0)": "pass",
    "get_raw_stream(0)": "0",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "",
}


def held_by_cuda_code(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> int:
    """The bytes at the peak of the code for ``function(*given)`` beyond its results; ``given`` are fake."""
    source = written(function, given)
    blocks: dict[str, str] = {}  # what each name stands for
    names: dict[str, int] = {}  # how many names a block has now
    sizes: dict[str, int] = {}
    peak = 0
    for line in source.rpartition("def call(")[2].partition("runner = Runner")[0].splitlines():
        if made := _MADE.search(line):
            name, size, stride, dtype = made.groups()
            tensor = torch.empty_strided(*map(literal_eval, (size, stride)), dtype=getattr(torch, dtype), device="meta")
            sizes[name], blocks[name], names[name] = rounded(tensor.untyped_storage().nbytes()), name, 1
        elif (renamed := _RENAMED.search(line)) and renamed[2] in blocks:
            block = blocks[renamed[1]] = blocks[renamed[2]]
            names[block] += 1
        peak = max(peak, _held(sizes, names))
        for gone in _GONE.findall(line):
            if gone in blocks:
                names[blocks[gone]] -= 1
    assert sizes, source
    return peak - _held(sizes, names)


def _held(sizes: dict[str, int], names: dict[str, int]) -> int:
    return sum(size for block, size in sizes.items() if names[block])


def written(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> str:
    """What Inductor writes for a function of fake tensors that lie on the CPU, as if these lay on CUDA."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, V.set_fake_mode(mode):
        tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in given]
        graph = make_fx(function, select_decomp_table())(*tensors)
        graph = compile_fx._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
    return _lowered(graph, tensors, mode, is_inference=True)


def compiled_for_cuda(graph: fx.GraphModule, backward: bool) -> CompiledCode:
    """The code of one graph of AOTAutograd's whose fake tensors lie on the CPU, as if these lay on CUDA.

    Backward may write over all that was kept for it. The graph is changed. What kernels compute is left out.
    """
    given = graph.graph.find_nodes(op="placeholder")
    tensors = [node.meta["val"] for node in given]
    mode = next(each.fake_mode for each in tensors if isinstance(each, FakeTensor))
    donated = [i for i, node in enumerate(given) if not node.name.startswith(("primals", "tangents"))]
    with mock.patch("torch._inductor.graph.get_donated_idxs", return_value=donated if backward else None):
        source = _lowered(graph, tensors, mode, is_inference=False, is_backward=backward)
    for there, instead in _OF_DEVICE.items():
        source = source.replace(there, instead)
    module = types.ModuleType("code")
    triton = {name: mock.MagicMock() for name in ("triton", "triton.language")}
    with (
        mock.patch.object(AsyncCompile, "triton", return_value=types.SimpleNamespace(run=_nothing)),
        mock.patch.object(AsyncCompile, "wait", _nothing),
        mock.patch.dict(sys.modules, {} if find_spec("triton") else triton),
    ):
        exec(compile(source, f"<{'backward' if backward else 'forward'}>", "exec"), vars(module))  # noqa: S102
    return CompiledCode(backward, module.call)


def _lowered(graph: fx.GraphModule, tensors: Sequence[Any], mode: FakeTensorMode, **how: Any) -> str:
    """What Inductor writes for a graph that computes with tensors of a mode."""
    with mode, V.set_fake_mode(mode):
        view_to_reshape(graph)
        FakeTensorProp(graph, mode).propagate(*tensors)
        compile_fx._recursive_record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=how["is_inference"])
        FakeTensorProp(graph, mode).propagate(*tensors)
    with _as_if_there(), mode, V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock()):
        for node in graph.graph.nodes:
            node.meta = {name: tree_map(_moved, value) for name, value in node.meta.items()}
            node.kwargs = {name: _CUDA if name == "device" else value for name, value in node.kwargs.items()}
        graph.recompile()
        moved = [_moved(t) for t in tensors]
        lowering = GraphLowering(graph, example_inputs=moved, **how)
        with V.set_graph_handler(lowering):
            lowering.run(*moved)
            return str(lowering.codegen()[0].value)


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)


@contextmanager
def _as_if_there() -> Iterator[None]:
    """What Inductor asks of a device is answered for a Hopper one; nothing may run there."""
    answers = {
        "get_device_properties": _HOPPER,
        "get_device_capability": (9, 0),
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "get_compute_capability": 90,
    }
    with ExitStack() as stack:
        for owner in (CudaInterface, CudaInterface.Worker, torch.cuda):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    always = functools.partial(_always, answer)
                    instead = always if owner is torch.cuda else staticmethod(always)
                    stack.enter_context(mock.patch.object(owner, name, instead))
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", _nothing))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", create=True, return_value=True))
        stack.enter_context(settings.patch(compile_threads=1))
        yield


def _always(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what would set up the device, or run there."""
