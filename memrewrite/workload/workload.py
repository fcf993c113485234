"""What a call of ``optimize``, ``estimate``, ``measure`` or ``verify`` is about: a model, its inputs and its step."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memrewrite.records.errors import UsageError
from memrewrite.records.loop import TUTORIAL, Loop
from memrewrite.records.mesh import Mesh
from memrewrite.runtime.differences import has_parts
from memrewrite.torch_internals.fsdp_states import is_sharded
from memrewrite.torch_internals.pytrees import tensors_in, tree_leaves
from memrewrite.torch_internals.spread import is_sparse_or_nested
from memrewrite.workload.held import held_beside, held_by
from memrewrite.workload.in_backward import InBackward
from memrewrite.workload.optimizers import OptimizerFactory, groups_in, own_name
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepping import checked, factory_of
from memrewrite.workload.stepspec import amp_dtype, in_backward, optimizer_factory

Optimizer = (
    str
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | type[torch.optim.Optimizer]
    | OptimizerFactory
    | None
)
Mode = Literal["train", "inference"] | None


@dataclass(frozen=True)
class Workload:
    """A model and the step that it takes on these inputs."""

    model: nn.Module
    inputs: Inputs
    step: Step

    @property
    def context(self) -> AbstractContextManager[object]:
        """``torch.inference_mode`` where tensors of a forward were made under it: outside, autograd refuses these."""
        attributes = itertools.chain(*(vars(module).values() for module in self.model.modules()))
        plain = (value for value in attributes if isinstance(value, Tensor))
        tensors = (*self.model.parameters(), *self.model.buffers(), *plain, *self.inputs.tensors())
        there = self.step.mode == "inference" and any(tensor.is_inference() for tensor in tensors)
        return torch.inference_mode() if there else nullcontext()


def workload(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: dict[str, Any] | None,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor] | None,
    amp: str | torch.dtype | None,
    mode: Mode,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: Mesh | None = None,
    given: nn.Module | None = None,
) -> Workload:
    """The workload that the arguments of ``optimize`` and the like mean, for what ``model`` was ``given`` as.

    Raises ``UsageError`` for names and numbers that mean nothing, and for a mode the model is not in.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    if not isinstance(example_kwargs, Mapping | None):
        raise UsageError(f"example_kwargs is {_kind(example_kwargs)}; give a dictionary of arguments by name.")
    _refuse_lazy(model)
    _refuse_wrapped(model)
    stepped = given if given is not None and is_sharded(given) else model
    step = make_step(model, optimizer, loss_fn, amp, mode, micro_batches, loop, mesh, stepped)
    inputs = Inputs(args, dict(example_kwargs or {}))
    _refuse_unseen(inputs)
    return Workload(model, inputs, step)


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any], Tensor] | None,
    amp: str | torch.dtype | None,
    mode: Mode,
    micro_batches: int = 1,
    loop: str | Loop = TUTORIAL,
    mesh: Mesh | None = None,
    stepped: nn.Module | None = None,
) -> Step:
    """The step of a ``workload``; where the model is a copy, optimizers have parameters of what is ``stepped``."""
    if loss_fn is not None and (not callable(loss_fn) or isinstance(loss_fn, type)):
        raise UsageError(
            f"loss_fn is {_kind(loss_fn)}; give a function of the output, lambda output: criterion(output, target) say."
        )
    how_stepped = _stepped(stepped or model, optimizer, loss_fn)
    if amp not in (None, torch.bfloat16, torch.float16) and not isinstance(amp, str):
        raise UsageError(f"amp={amp!r} is no type that autocast computes in; give 'bf16' or 'fp16'.")
    if not isinstance(micro_batches, Integral):  # NumPy's are some
        raise UsageError(f"micro_batches={micro_batches!r} is no whole number; give one, 4 say.")
    if micro_batches < 1:
        raise UsageError(f"A step cannot take {micro_batches} micro-batches; give at least 1.")
    if mode not in (None, "train", "inference"):
        raise UsageError(f"mode={mode!r} is unknown; give 'train' or 'inference'.")
    now: Literal["train", "inference"] = "train" if model.training else "inference"
    if mode is not None and mode != now:
        own = f"model.{'train' if mode == 'train' else 'eval'}()"
        call = f"torch.nn.Module.train(model, {mode == 'train'})" if "eval" in vars(model) else own  # torch.export's
        raise UsageError(f"The model is in {now} mode; call {call} first.")
    if now == "train" and not any(p.requires_grad for p in model.parameters()):
        raise UsageError("No parameter requires a gradient, so there is no training step; call model.eval() first.")
    _refuse_contexts(model, now)
    kind = amp_dtype(amp) if isinstance(amp, str) else amp
    mesh = None if mesh is None else mesh.of_mode(now)
    how: dict[str, Any] = {"micro_batches": int(micro_batches), "loop": Loop.parse(loop), "mesh": mesh}
    return checked(Step(now, loss_fn=loss_fn, amp=kind, **how, **how_stepped))


def _stepped(model: nn.Module, optimizer: Optimizer, loss_fn: Callable[[Any], Tensor] | None) -> dict[str, Any]:
    """What the step of a model is told of its optimizer: optimizers step the parameters that they have, if any.

    Those may be the loss function's, as of losses that learn a center for each class.
    """
    if isinstance(optimizer, str):
        return {"optimizer": optimizer_factory(optimizer), "in_backward": in_backward(optimizer)}
    several = isinstance(optimizer, list | tuple)
    given: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not given or not all(isinstance(each, torch.optim.Optimizer) for each in given):
        if several or not (optimizer is None or callable(optimizer)):
            raise UsageError(
                f"optimizer is {_kind(optimizer)}; give a name, an optimizer, a list of several, a class or a function "
                "of the parameters."
            )
        return {"optimizer": optimizer}
    beside = held_beside(model) + [each for found in (held_by(loss_fn) if loss_fn else ()) for each in found]
    if several:
        given = [each for each in given if any(groups_in([each], model, beside))]
        if not given:
            raise UsageError(f"None of the optimizers steps a parameter of {type(model).__name__} that trains.")
        counts = Counter(name for group in groups_in(given, model) for name in group)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise UsageError(f"Two of the {len(given)} optimizers step {twice}; say optimizer=, one that a step takes.")
    told: dict[str, Any] = {"optimizer": factory_of(given), "in_backward": isinstance(given[0], InBackward)}
    groups = groups_in(given, model, beside)
    left = {own_name(n) for n, p in model.named_parameters() if p.requires_grad}.difference(*groups)
    if not any(groups) or (len(groups) == 1 and not left and all(isinstance(each, str) for each in groups[0])):
        return told
    return told | {"groups": groups, "left": frozenset(left)}


def _refuse_contexts(model: nn.Module, mode: Literal["train", "inference"]) -> None:
    """Raise ``UsageError`` in contexts of the caller's that a step would be under besides its own."""
    if mode == "train" and not torch.is_grad_enabled():
        raise UsageError(
            "Gradients are off here (torch.no_grad, torch.inference_mode or torch.set_grad_enabled(False)), and a "
            "training step takes them; leave that context first, or call model.eval()."
        )
    for kind in {parameter.device.type for parameter in model.parameters()}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            raise UsageError(
                "Autocast is on here; leave its context first, and give amp='bf16' or 'fp16' for a step whose forward "
                "is under it."
            )


def refuse_meta(inputs: Inputs, *models: nn.Module) -> None:
    """Raise ``UsageError`` for what lies on the meta device, of which only an estimate can be made."""
    if what := on_meta(inputs, *models):
        raise UsageError(
            f"{what} lies on the meta device and holds no numbers, which a proof or a measurement takes; give it some, "
            'plan without any (model.to_empty(device="cpu") and verify=False), or use memrewrite.estimate.'
        )


def on_meta(inputs: Inputs, *models: nn.Module) -> str:
    """What of them lies on the meta device, in words; "" where nothing does."""
    named = ([*model.named_parameters(), *model.named_buffers()] for model in models)
    found = next((name for name, tensor in itertools.chain(*named) if tensor.is_meta), "")
    return found or ("An input" if any(tensor.is_meta for tensor in inputs.tensors()) else "")


def refuse_laid_out(inputs: Inputs, model: nn.Module) -> None:
    """Raise ``UsageError`` for sparse and nested tensors that are given: nothing tells what a step on them takes."""
    buffers = dict(model.named_buffers())
    named = [*model.named_parameters(), *buffers.items(), *(("An input", tensor) for tensor in inputs.tensors())]
    for name, tensor in named:
        if is_sparse_or_nested(tensor):
            kind = "nested" if tensor.is_nested else "sparse"
            dense = f"set model.{name} = model.{name}.to_dense() where forward does not need it so, or "
            raise UsageError(
                f"{name} is a {kind} tensor ({tensor.layout}), whose memory nothing tells before a step has run; "
                f"{dense if name in buffers and kind == 'sparse' else ''}compute with the tensors that it is made of, "
                "by index_select and index_add say, or call memrewrite.measure."
            )


def refuse_scripted(model: nn.Module) -> None:
    """Raise ``UsageError`` for TorchScript, which has no Python to copy or to trace."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{path or 'The model'} is TorchScript, of which nothing can be rewritten; give the module that it was "
                "made from."
            )


def refuse_unready(inputs: Inputs, model: nn.Module) -> None:
    """Raise ``UsageError`` for a model and inputs of which no step can be taken, or none that could be counted."""
    _refuse_lazy(model)
    _refuse_wrapped(model)
    _refuse_unseen(inputs)


def _refuse_lazy(model: nn.Module) -> None:
    """Raise ``UsageError`` for parameters and buffers that have no shape yet."""
    for path, module in model.named_modules():
        if any(map(is_lazy, itertools.chain(module._parameters.values(), module._buffers.values()))):
            raise UsageError(
                f"{path or 'The model'} ({type(module).__name__}) has no parameters before it has run once; call the "
                "model on some inputs first."
            )


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ``UsageError`` for weights whose bytes lie in other tensors, where nothing here looks for them."""
    for name, parameter in model.named_parameters():
        if has_parts(parameter) and not is_sparse_or_nested(parameter):
            raise UsageError(
                f"{name} is a tensor of a class of its own ({type(parameter).__name__}), as libraries that quantize "
                "make them, whose bytes lie in others and would not be counted; give the model before it is quantized."
            )


def _refuse_unseen(inputs: Inputs) -> None:
    """Raise ``UsageError`` for an input that is no tensor and holds some, which would not be counted."""
    for leaf in tree_leaves((inputs.args, inputs.kwargs)):
        inside = list(getattr(leaf, "__dict__", {}).values())
        if isinstance(leaf, Tensor | nn.Module | type) or callable(leaf) or not tensors_in(inside):
            continue
        named = "" if not isinstance(leaf, Mapping) else " (arguments by name are example_kwargs)"
        raise UsageError(
            f"An input is of type {type(leaf).__name__}, whose tensors would not be counted; give a dictionary, a list "
            f"or a tuple of them{named}."
        )


def _kind(value: Any) -> str:
    """What is given where something else is meant."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
