"""What lives all through a training step besides what a graph makes: counted where its compilation begins.

Parameters, buffers and optimizer state live always; the inputs of the graph and what earlier graphs of the step keep
for backward live while it runs. All of it is read off real tensors: the model's own, those the graph is given, and the
autograd graph behind these, in which earlier graphs, and code between them that is not compiled, keep what they do.
Of gradients, those of parameters of later graphs count as if all were there: these run backward first. Graphs that come
later are not known yet: what they keep is taken to be as much more as they have more parameters.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from memrewrite.records.errors import UsageError, first_line
from memrewrite.records.tensor_like import TensorLike
from memrewrite.simulate.memory.tracker import Tracker
from memrewrite.targets.allocator import rounded
from memrewrite.targets.layout import Layout, layout_of
from memrewrite.targets.workspaces import measured
from memrewrite.torch_internals.autograd_nodes import nodes_behind
from memrewrite.torch_internals.compiling import real_tensors_of, saved_by
from memrewrite.torch_internals.fake_tensors import FakeTensorMode
from memrewrite.torch_internals.foreach import foreach_on_fake_tensors, not_compiling
from memrewrite.torch_internals.fsdp_states import in_transit, shards_of_gathered
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.optimizers import one_of
from memrewrite.workload.stepspec import optimizer_factory


@dataclass(frozen=True)
class Resident:
    """Bytes that live besides what a graph makes.

    ``model`` are parameters and buffers, with DDP's buckets for gradients, ``state`` is what the optimizer keeps and
    ``transient`` what its step takes besides, ``inputs`` what the graph is given, ``earlier`` what is kept for the
    backward of what ran before, ``gradients`` those of all parameters, ``own`` those that this graph makes, ``others``
    those that later graphs make, ``transit`` what FSDP2 gathers ahead and reduces meanwhile, of which there is
    ``reduced`` in backward, and ``libraries`` what cuBLAS holds, whether or not this graph is the one that multiplies.
    ``kept`` are the bytes of each tensor in the state, ``later`` how many times the parameters of this graph those are
    of which nothing has run yet. ``biases`` are the bytes of ``libraries`` that are there only where a product adds
    one, where no other graph may have such a product. ``layout`` is how the model and the inputs lie on the device, by
    addresses of this process.
    """

    model: int
    state: int
    transient: int
    inputs: int
    earlier: int
    gradients: int
    own: int
    others: int
    libraries: int
    transit: int = 0
    reduced: int = 0
    kept: tuple[int, ...] = ()
    later: float = 0.0
    biases: int = 0
    layout: Layout = field(default=(), compare=False, repr=False)

    @property
    def base(self) -> int:
        """What lives while the graph runs forward and backward."""
        return self.model + self.state + self.inputs + self.earlier + self.others + self.transit + self.libraries

    @property
    def of_optimizer(self) -> int:
        """What lives at most while the optimizer works."""
        return self.model + self.state + self.gradients + self.transient + self.libraries


def resident(graph: fx.GraphModule, model: nn.Module | None, optimizer: str) -> Resident:
    """What lives besides what the graph of Dynamo's makes, which is of ``model`` or a part of it; ``optimizer`` is a
    name as in ``StepSpec``."""
    given = [tensor for tensor in real_tensors_of(graph) if tensor is not None]
    saved, leaves = _behind(given)
    whole: list[Tensor] = [*model.parameters(), *model.buffers()] if model is not None else []
    mine = [tensor for tensor in given if isinstance(tensor, nn.Parameter)]
    shards = shards_of_gathered(model) if model is not None else {}
    there = [*mine, *leaves]  # by now, with what an optimizer has of those that are gathered
    there += [shards[id(each)] for each in there if id(each) in shards]
    every = _unique([*whole, *there])
    trained = [each for each in every if isinstance(each, nn.Parameter) and each.requires_grad]
    parameters = [each for each in trained if id(each) not in shards]
    known = {_key(tensor) for tensor in every}
    inputs = [tensor for tensor in given if _key(tensor) not in known]
    held = known | {_key(tensor) for tensor in inputs}
    earlier = [tensor for tensor in saved if _key(tensor) not in held]
    before = {id(each) for each in there}
    kept, transient = optimizer_bytes(parameters, optimizer)
    later = _later(whole, mine, there)
    buckets, inside = _buckets(model)
    made_apart = [] if inside else parameters  # whose gradients are no part of buckets
    libraries = [_libraries(each) for each in {tensor.device for tensor in [*given, *every]}]
    gathered, reduced = (0, 0) if model is None else in_transit(model)
    reduced = reduced if later else 0  # backward of the last graph is the first
    return Resident(
        model=_bytes(every) + buckets,
        state=sum(map(rounded, kept)),
        transient=transient,
        inputs=_bytes(inputs),
        earlier=_bytes(earlier),
        gradients=_bytes(made_apart),
        own=_bytes([each for each in mine if each.requires_grad]),
        others=_bytes([each for each in made_apart if id(each) not in before]),
        transit=gathered + reduced,
        reduced=reduced,
        libraries=max((size for size, _ in libraries), default=0),
        kept=kept,
        later=later,
        biases=0 if leaves or later else min((biases for _, biases in libraries if biases), default=0),
        layout=layout_of([*given, *every]),
    )


def _buckets(model: nn.Module | None) -> tuple[int, bool]:
    """The bytes of the buckets that DDP keeps for gradients, and whether these lie in them."""
    if model is None or not any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        return 0, False
    from memrewrite.torch_internals.ddp import buckets_of  # a second, for those who need it

    return buckets_of(model)


def _libraries(device: torch.device) -> tuple[int, int]:
    """What cuBLAS and cuBLASLt hold on a device, and what of that only products that add a bias ask for.

    That is nothing where cuBLASLt was chosen for all products.
    """
    size = measured(device)
    usual = bool(size) and str(torch.backends.cuda.preferred_blas_library()).endswith(".Cublas")
    return size, size - measured(device, biases=False) if usual else 0


def _later(whole: Sequence[Tensor], mine: Sequence[Tensor], there: Sequence[Tensor]) -> float:
    """How many times the numbers of a graph's parameters those of the model have that are not there by now.

    Of sharded ones it is those of all processes, as a graph has these.
    """
    known = {_key(tensor) for tensor in there}
    own = sum({_key(tensor): tensor.numel() for tensor in mine}.values())
    rest = [each for each in whole if isinstance(each, nn.Parameter) and _key(each) not in known]
    return sum(each.numel() for each in rest) / own if own else 0.0


def optimizer_bytes(parameters: Iterable[nn.Parameter], name: str) -> tuple[tuple[int, ...], int]:
    """The bytes of what an optimizer keeps, tensor by tensor, and those of its step besides; on fake tensors."""
    return _optimizer_bytes(tuple(TensorLike.of(local_part(each)) for each in parameters), name)


@functools.lru_cache(maxsize=8)  # each graph of a model asks, and each time that one is compiled again
def _optimizer_bytes(likes: tuple[TensorLike, ...], name: str) -> tuple[tuple[int, ...], int]:
    factory = optimizer_factory(name)
    if factory is None or not likes:
        return (), 0
    device_type = likes[0].device.type
    try:
        with FakeTensorMode(), foreach_on_fake_tensors(), not_compiling():
            twins = [nn.Parameter(like.empty()) for like in likes]
            for twin, like in zip(twins, likes, strict=True):
                twin.grad = like.empty()
            optimizer = one_of(factory(twins))
            with Tracker(device_type) as tracker:
                tracker.register([*twins, *(twin.grad for twin in twins if twin.grad is not None)], "parameters")
                there = tracker.current
                optimizer.step()
                state = tracker.current - there
                tracker.reset_peak()
                optimizer.step()
                return _kept(optimizer, device_type, state), max(tracker.peak - there - state, 0)
    except Exception as error:  # whatever one of the user's own does
        raise UsageError(
            f"What optimizer {name!r} keeps cannot be counted ({type(error).__name__}: {first_line(error)}); write "
            "optimizer='none', reserve=<its bytes>."
        ) from error


def _kept(optimizer: torch.optim.Optimizer, device_type: str, total: int) -> tuple[int, ...]:
    """The bytes of each tensor of its state on the device; ``total`` as one, where there are others than by name."""
    named = (each for values in optimizer.state.values() for each in values.values() if isinstance(each, Tensor))
    found = tuple(each.untyped_storage().nbytes() for each in named if each.device.type == device_type)
    return found if sum(map(rounded, found)) == total else (total,)


def _behind(given: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What autograd keeps behind these tensors, and the leaves it ends in."""
    saved: list[Tensor] = []
    leaves: list[Tensor] = []
    for node in nodes_behind(given):
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        saved += saved_by(node)
    return saved, leaves


def _key(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage()._cdata


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {each.untyped_storage() for each in map(local_part, tensors)}
    return sum(rounded(each.nbytes()) for each in storages)


def parts(found: Resident) -> Iterator[tuple[str, int]]:
    """What it is made of, in words, largest first."""
    named = {
        "parameters and buffers": found.model,
        "optimizer state": found.state,
        "inputs": found.inputs,
        "kept by what ran before": found.earlier,
        "gradients": found.gradients,
        "gathered ahead and reduced": found.transit,
        "library workspaces": found.libraries,
    }
    return iter(sorted(((name, size) for name, size in named.items() if size), key=lambda each: -each[1]))
