"""A mesh as text."""

import pytest

from memrewrite.records.errors import UsageError
from memrewrite.records.mesh import FLAGS, Mesh

EVERY = "ddp=8,bucket-cap-mb=0.5,gradient-as-bucket-view,static-graph,find-unused-parameters,no-buffers"
REFUSED = {
    "": "is unknown; write e.g. ddp=8",
    "8": "is unknown; write e.g. ddp=8",
    "ddp": "is unknown; write e.g. ddp=8",
    "ddp=0": "is unknown; write e.g. ddp=8",
    "fsdp=64,tp=8": "'fsdp=64,tp=8' is not supported yet; ddp=8 is",
    "ddp=2,tp=8": "of ddp and 'tp=8' is not supported yet; give ddp alone",
    "ddp=2,buckets": "'buckets' is unknown in a mesh; known are bucket-cap-mb, gradient-as-bucket-view,",
}


@pytest.mark.parametrize("text", ["ddp=1", "ddp=8", "ddp=2,gradient-as-bucket-view", EVERY])
def test_a_mesh_is_written_as_it_is_read(text: str) -> None:
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(Mesh.parse(text)) == Mesh.parse(text)


def test_every_flag_is_known() -> None:
    assert [word.partition("=")[0] for word in EVERY.split(",")[1:]] == [*FLAGS]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[text]):
        Mesh.parse(text)
