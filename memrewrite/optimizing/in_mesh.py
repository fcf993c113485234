"""The proof in the mesh: every process trains the result as it is wrapped there, beside the model without rewriting.

The first process has proved the whole model before, alone; what its plan is where parameters are gathered, gradients
are reduced and other inputs come shows here. Where arithmetic changed, which that proof judged against float64, the
same programs without segments stand for the original.
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memrewrite.equivalence.in_mesh import verify_in_mesh
from memrewrite.equivalence.sizes import at_less, halved
from memrewrite.optimizing.alone import copy_of
from memrewrite.records.errors import MeasurementError, NotEquivalentError, first_line
from memrewrite.records.mesh import Ddp, Fsdp, Mesh, Tp
from memrewrite.runtime.assembled import assembled
from memrewrite.runtime.dropin import Program, own, programs, rewrite
from memrewrite.torch_internals.fsdp import ignored
from memrewrite.torch_internals.fsdp_states import is_sharded
from memrewrite.torch_internals.mesh_groups import lines_of
from memrewrite.torch_internals.peers import among_peers
from memrewrite.torch_internals.spread import local_part
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

    ``given`` is the model as the user gave it; ``work`` has what was planned of it, in the ``mesh``.
    """

    work: Workload
    mesh: Ddp | Fsdp | Tp
    given: nn.Module
    result: nn.Module
    plain: Written = field(default_factory=dict)

    def twin(self, rewritten: bool, wrap: Wrap) -> nn.Module:
        """A copy of either, wrapped; it has parameters and buffers of its own, and shares what else there is."""
        written = written_in(self.result) if rewritten else self.plain
        if is_sharded(self.given):
            return self._sharded(written, wrap)
        model, mesh = self.work.model, self.mesh
        # FSDP2 trains parts of the parameters, and not them themselves but for those that it ignores.
        these = {id(each) for each in (ignored(model, mesh) if isinstance(mesh, Fsdp) else model.parameters())}
        made = copy_of(model, lambda each: each.detach().clone() if id(each) in these else each.detach())
        return wrap(assembled(made, written) if written else made)

    def _sharded(self, written: Written, wrap: Wrap) -> nn.Module:
        """One that was sharded first, without room for the whole parameters, with those that the model has."""
        place = next(self.given.parameters()).device  # the host, it may be
        found = wrap(copy_of(self.work.model, lambda parameter: torch.empty_like(parameter, device="meta")))
        found._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)
        theirs = dict(self.given.named_parameters())
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                local_part(parameter).copy_(local_part(theirs[name]))
        for path, (program, constants) in written.items():
            rewrite(found.get_submodule(path), program, constants)
        return found


@dataclass(frozen=True)
class _Found:
    """What came of one process: the ``summary`` of its verdict, or how it ``failed``, maybe as another one did."""

    summary: str = ""
    differs: bool = False
    failed: str = ""
    by_peers: bool = False
    no_memory: bool = False


class _PeerFailedError(Exception):
    """Another process gave up."""


@contextlib.contextmanager
def _collecting_quickly() -> Iterator[None]:
    """Let the garbage collector look at what is made meanwhile, and at nothing that was there."""
    if gc.get_freeze_count():  # the user's way
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_collecting_quickly()
def prove_in_mesh(pair: Pair, seed: int, group: Any) -> str:
    """Verify in all processes of the mesh at once, on as much of their batches as there is memory for, and say so.

    ``group`` is theirs, for what they tell each other. Raises ``NotEquivalentError`` in all of them where the model
    does not train in one as it would, and ``MeasurementError`` where one fails.
    """
    for halvings in itertools.count():
        found = _of_all(_attempt(pair, halvings, seed, group), group)
        _raise_for(found, pair.mesh)
        if not any(each.no_memory for each in found):
            break
    return f"Verified in each process of the mesh {pair.mesh}; this one: {found[dist.get_rank()].summary}."


def _raise_for(found: list[_Found], mesh: Mesh) -> None:
    """Raise what is wrong in any process; less of the batch is no matter, nor are others that it cut off."""
    for rank, each in enumerate(found):
        if each.differs:
            raise NotEquivalentError(
                f"The rewritten model is not equivalent in the mesh {mesh}, by process {rank}: {each.summary}."
            )
    failed = [(each.by_peers, rank) for rank, each in enumerate(found) if each.failed]
    by_peers, rank = min(failed, default=(True, 0))  # the first cause is told
    if failed and not (by_peers and any(each.no_memory for each in found)):
        raise MeasurementError(
            f"Process {rank} failed while the rewritten model was verified in the mesh {mesh}: {found[rank].failed}"
        )


def _attempt(pair: Pair, halvings: int, seed: int, group: Any) -> _Found:
    try:
        return _compared(pair, halvings, seed, group)
    except torch.OutOfMemoryError:
        found = _Found(no_memory=True)
    except Exception as error:  # whatever it is, the others are to know
        reason = first_line(error)
        by_peers = isinstance(error, dist.DistError | _PeerFailedError) or "gloo" in reason
        found = _Found(failed=f"{type(error).__name__}: {reason}.", by_peers=by_peers)
    gc.collect()  # what the error held until now, whose connections end by that
    return found


def _compared(pair: Pair, halvings: int, seed: int, group: Any) -> _Found:
    work, inputs = pair.work, pair.work.inputs
    for _ in range(halvings):
        inputs = halved(pair.result, inputs)
    place = device_of(pair.given, inputs)
    outputs = all(program.returns != "loss" for program in programs(pair.result).values())
    lines = lines_of(pair.mesh.devices if isinstance(pair.mesh, Fsdp) else None)
    every = sorted({line for each in _told(lines, group) for line in each})
    with among_peers(pair.mesh, place.type, every) as wrap:
        verdict = verify_in_mesh(
            lambda rewritten: pair.twin(rewritten, wrap),
            inputs,
            work.step,
            lambda yes: _any_of(yes, group),
            place=place,
            seed=seed,
            outputs=outputs,
        )
    return _Found(verdict.summary + at_less(inputs, work.inputs), differs=not verdict.equivalent)


def _any_of(yes: bool, group: Any) -> bool:
    return any(_told(yes, group))


def _told(value: Any, group: Any) -> list[Any]:
    """What all processes say, where none has given up."""
    answers = _gathered(value, group)
    if any(isinstance(answer, _Found) for answer in answers):
        raise _PeerFailedError
    return answers


def _of_all(found: _Found, group: Any) -> list[_Found]:
    """What came of each process, once all are done: one that is not may still ask for something else."""
    answers = _gathered(found, group)
    return answers if all(isinstance(answer, _Found) for answer in answers) else _of_all(found, group)


def _gathered(value: Any, group: Any) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(answers, value, group)
    except RuntimeError as error:  # as gloo says it, in the class that the version has for it
        raise MeasurementError("A process ended while the rewritten model was verified in the mesh.") from error
    return answers
