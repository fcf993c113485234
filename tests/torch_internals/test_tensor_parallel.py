"""Tensor parallelism on fake tensors takes what it takes in two processes over gloo, which train as one does."""

from pathlib import Path

import pytest
import torch

import memrewrite
from tests.support import tensor_parallel
from tests.support.processes import together
from tests.support.tensor_parallel import MESHES, TOKENS, Llama, Trained


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Trained]]:
    """The trainings in each of two processes, in float32."""
    return together(tensor_parallel.trainings, tmp_path_factory.mktemp("tp"), torch.float32)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_estimated_is_what_two_processes_take(found: list[dict[str, Trained]], mesh: str, rank: int) -> None:
    estimated = memrewrite.estimate(Llama(), TOKENS, mesh=mesh)
    assert found[rank][mesh].peak == estimated.peak.bytes
    assert estimated.peak.categories["communication buffers"] > 0
    assert estimated.mesh == mesh


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_that_is_parallelized_says_its_mesh(found: list[dict[str, Trained]], rank: int) -> None:
    assert found[rank]["tp=2"].estimated == found[rank]["tp=2"].peak


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    alone = tensor_parallel.train(Llama().double())
    for rank in together(tensor_parallel.trainings, tmp_path, torch.float64):
        for trained in rank.values():
            assert trained.losses == pytest.approx(alone.losses, rel=1e-10)
            assert trained.gradients.keys() == alone.gradients.keys()
            for name, gradient in alone.gradients.items():
                torch.testing.assert_close(trained.gradients[name], gradient, rtol=1e-9, atol=1e-12)
