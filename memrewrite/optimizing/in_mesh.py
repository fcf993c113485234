"""The proof in the mesh: every process trains the result as it is wrapped there, beside the model without rewriting.

The first process has proved the whole model before, alone; what its plan is where parameters are gathered, gradients
are reduced and other inputs come shows here. Where arithmetic changed, which that proof judged against float64, the
same programs without segments stand for the original.
"""

import gc
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.equivalence.in_mesh import verify_in_mesh
from memrewrite.equivalence.sizes import halved
from memrewrite.records.errors import MeasurementError, NotEquivalentError
from memrewrite.records.mesh import Ddp, Fsdp
from memrewrite.runtime.assembled import assembled
from memrewrite.runtime.dropin import Program, own, programs, rewrite
from memrewrite.torch_internals.fsdp_states import is_sharded
from memrewrite.torch_internals.module_trees import copied
from memrewrite.torch_internals.peers import among_peers
from memrewrite.torch_internals.spread import local_part
from memrewrite.workload.hooks import without_hooks
from memrewrite.workload.step import device_of
from memrewrite.workload.workload import Workload

Written = dict[str, tuple[Program, dict[str, Tensor]]]
Wrap = Callable[[nn.Module], nn.Module]


def written_in(result: nn.Module) -> Written:
    """The programs of a result and their constants, by the path of what runs them."""
    parts = {path: (program, own(result.get_submodule(path))) for path, program in programs(result).items()}
    return {path: (program, {} if part is None else part.constants) for path, (program, part) in parts.items()}


@dataclass(frozen=True)
class Pair:
    """A result, and what it is compared with: the model, running the programs of ``plain`` where there are any.

    ``given`` is the model as the user gave it; ``work`` has what was planned of it.
    """

    work: Workload
    given: nn.Module
    result: nn.Module
    plain: Written = field(default_factory=dict)

    def twin(self, rewritten: bool, wrap: Wrap) -> nn.Module:
        """A copy of either, wrapped; it has parameters and buffers of its own, and shares what else there is."""
        written = written_in(self.result) if rewritten else self.plain
        if is_sharded(self.given):
            return self._sharded(written, wrap)
        ddp = isinstance(self.work.step.mesh, Ddp)  # which trains the parameters themselves, and no parts of them
        made = self._copy(lambda parameter: parameter.detach().clone() if ddp else parameter.detach())
        return wrap(assembled(made, written) if written else made)

    def _sharded(self, written: Written, wrap: Wrap) -> nn.Module:
        """One that was sharded first, without room for the whole parameters, with those that the model has."""
        place = device_of(self.given, self.work.inputs)
        found = wrap(self._copy(lambda parameter: torch.empty_like(parameter, device="meta")))
        found._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
        theirs = dict(self.given.named_parameters())
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                local_part(parameter).copy_(local_part(theirs[name]))
        for path, (program, constants) in written.items():
            rewrite(found.get_submodule(path), program, constants)
        return found

    def _copy(self, change: Callable[[Tensor], Tensor]) -> nn.Module:
        model = without_hooks(self.work.model)
        made = copied(model, change, _with_own_tables)
        buffers = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        for module in model.modules():
            twin, forward = made[id(module)], vars(module).get("forward")
            twin._buffers.update({k: buffers[id(each)] for k, each in twin._buffers.items() if each is not None})
            if isinstance(forward, types.MethodType):  # one that was put on the object
                vars(twin)["forward"] = types.MethodType(forward.__func__, twin)
        return made[id(model)]


def _with_own_tables(module: nn.Module) -> tuple[type, dict[str, Any]]:
    """The class and the attributes of a copy, whose hooks are not those of the module."""
    tables = {k: type(each)(each) for k, each in vars(module).items() if "_hooks" in k and isinstance(each, dict)}
    return type(module), vars(module) | tables


@dataclass(frozen=True)
class _Found:
    """What came of one process: what ``differs``, or how it ``failed``, maybe as another one did; or all is well."""

    differs: str = ""
    failed: str = ""
    by_peers: bool = False
    no_memory: bool = False


class _PeerFailedError(Exception):
    """Another process gave up."""


def prove_in_mesh(pair: Pair, seed: int, group: Any) -> None:
    """Verify in all processes of the mesh at once, on as much of their batches as there is memory for.

    ``group`` is theirs, for what they tell each other. Raises ``NotEquivalentError`` in all of them where the model
    does not train in one as it would, and ``MeasurementError`` where one fails.
    """
    mesh, halvings, found = pair.work.step.mesh, 0, [_Found(no_memory=True)]
    while any(each.no_memory for each in found):
        found = _of_all(_attempt(pair, halvings, seed, group), group)
        halvings += 1
        for rank, each in enumerate(found):
            if each.differs:
                raise NotEquivalentError(
                    f"The rewritten model is not equivalent in the mesh {mesh}, by process {rank}: {each.differs}."
                )
        failed = [(each.by_peers, rank) for rank, each in enumerate(found) if each.failed]
        if failed:  # of which the first cause is told
            _, rank = min(failed)
            raise MeasurementError(
                f"Process {rank} failed while the rewritten model was verified in the mesh {mesh}: {found[rank].failed}"
            )


def _attempt(pair: Pair, halvings: int, seed: int, group: Any) -> _Found:
    try:
        return _compared(pair, halvings, seed, group)
    except torch.OutOfMemoryError:
        return _Found(no_memory=True)
    except Exception as error:  # whatever it is, the others are to know
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        by_peers = isinstance(error, dist.DistError | _PeerFailedError) or "gloo" in reason
        return _Found(failed=f"{type(error).__name__}: {reason}.", by_peers=by_peers)
    finally:
        gc.collect()  # what failed is held by its traceback till now, and closes its connections as it goes


def _compared(pair: Pair, halvings: int, seed: int, group: Any) -> _Found:
    mesh, inputs = pair.work.step.mesh, pair.work.inputs
    if not isinstance(mesh, Ddp | Fsdp):
        return _Found()
    for _ in range(halvings):
        inputs = halved(pair.result, inputs)
    with among_peers(mesh, device_of(pair.given, inputs).type) as wrap:
        verdict = verify_in_mesh(
            lambda rewritten: pair.twin(rewritten, wrap),
            inputs,
            pair.work.step,
            lambda yes: _any_of(yes, group),
            seed=seed,
        )
    return _Found() if verdict.equivalent else _Found(differs=verdict.summary)


def _any_of(yes: bool, group: Any) -> bool:
    answers = _gathered(yes, group)
    if any(isinstance(answer, _Found) for answer in answers):
        raise _PeerFailedError
    return any(answers)


def _of_all(found: _Found, group: Any) -> list[_Found]:
    """What came of each process, once all are done: one that is not may still ask for something else."""
    answers = _gathered(found, group)
    return answers if all(isinstance(answer, _Found) for answer in answers) else _of_all(found, group)


def _gathered(value: Any, group: Any) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value, group)
    return answers
