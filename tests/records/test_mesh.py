"""A mesh as text."""

import re

import pytest
import torch

import memrewrite
from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import Ddp, Fsdp, Mesh, Tp

EVERY = {
    Ddp: "ddp=8,bucket-cap-mb=0.5,gradient-as-bucket-view,static-graph,find-unused-parameters,no-buffers",
    Fsdp: "fsdp=64,param-dtype=bf16,reduce-dtype=fp32,output-dtype=bf16,no-cast-inputs,no-reshard,reshard=8,"
    "reshard-root,replicas=2,units=model.layers.*,cpu-offload,ignored=head.*",
}
REFUSED = {
    "": "is unknown; write e.g. ddp=8",
    "8": "is unknown; write e.g. ddp=8",
    "ddp": "'ddp' is not supported; ddp=8, fsdp=8 and tp=8 are",
    "ddp=0": "'ddp=0' is not supported; ddp=8, fsdp=8 and tp=8 are",
    "pp=8": "'pp=8' is not supported; ddp=8, fsdp=8 and tp=8 are",
    "tp=8,fsdp=64": "A mesh of tp and 'fsdp=64' is not supported; fsdp=64,tp=8 is, in this order",
    "ddp=2,tp=8": "A mesh of ddp and 'tp=8' is not supported; fsdp=64,tp=8 is, in this order, or give one of them",
    "fsdp=2,tp=2,tp=2": "A mesh of fsdp and 'tp=2' is not supported",
    "tp=2,units=layers.*": "'units=layers.*' is unknown in this mesh; tp=2 has no arguments.",
    "ddp=2,fsdp=8": "A mesh of ddp and 'fsdp=8' is not supported",
    "ddp=2,buckets": "'buckets' is unknown in this mesh; known are bucket-cap-mb=MIB, gradient-as-bucket-view,",
    "fsdp=8,reshard=3": "fsdp=8 cannot reshard to 3 parts; give a divisor of 8",
    "fsdp=8,cpu-offload,ignored=a": "Parameters on the host (cpu-offload, CPUOffloadPolicy) beside others",
    "fsdp=2,static-graph": "'static-graph' is unknown in this mesh; known are param-dtype=bf16,",
}


TEXTS = ["ddp=1", "ddp=8", "ddp=2,gradient-as-bucket-view", "fsdp=2", "fsdp=2,no-reshard", EVERY[Ddp]]
OTHERS = [
    "fsdp=8,reshard=4",
    "tp=8",
    "fsdp=64,tp=8",
    "fsdp=4,tp=2,param-dtype=bf16,replicas=2",
    EVERY[Fsdp].replace("no-reshard,", "").replace("cpu-offload,", ""),
    "fsdp=8,cpu-offload",
    "fsdp=8,ignored=a.*,ignored=b",
]


@pytest.mark.parametrize("text", TEXTS + OTHERS)
def test_a_mesh_is_written_as_it_is_read(text: str) -> None:
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(Mesh.parse(text)) == Mesh.parse(text)


@pytest.mark.parametrize("kind", EVERY)
def test_every_argument_is_told(kind: type[Ddp | Fsdp]) -> None:
    names = [word.partition("=")[0] for word in EVERY[kind].split(",")[1:]]
    assert names == [word.partition("=")[0] for word in kind.words]


def test_what_is_tensor_parallel_stays_so_in_inference() -> None:
    meshes = {text: Mesh.parse(text) for text in ("ddp=2", "fsdp=2", "tp=2", "fsdp=4,tp=2")}
    assert {text: mesh.in_inference for text, mesh in meshes.items()} == {
        "ddp=2": None,
        "fsdp=2": None,
        "tp=2": Tp(2),
        "fsdp=4,tp=2": Tp(2),
    }
    assert {text: mesh.processes for text, mesh in meshes.items()} == {
        "ddp=2": 2,
        "fsdp=2": 2,
        "tp=2": 2,
        "fsdp=4,tp=2": 8,
    }


@pytest.mark.parametrize("text", ["fsdp=2", "fsdp=4,tp=2"])
def test_no_forward_with_gathered_parameters_is_told_as_one_without(text: str) -> None:
    mesh = Mesh.parse(text)
    assert mesh.of_mode("train") is mesh
    for call in (memrewrite.estimate, memrewrite.optimize):
        with pytest.raises(UsageError, match=r"^fsdp=\d is planned in training alone; for inference leave it out"):
            call(torch.nn.Linear(4, 4).eval(), torch.ones(2, 4), mesh=mesh)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[text])):
        Mesh.parse(text)
