"""Parts of larger tensors: all of what they lie in stays as long as they do, unless they are copied elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memrewrite

ROWS, WIDTH = 64, 32
DATA = torch.randn(20 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
BATCHES: dict[str, Callable[[], Tensor]] = {
    "the start": lambda: DATA[:ROWS],
    "from within": lambda: DATA[3 * ROWS : 4 * ROWS],
    "detached": lambda: DATA[:ROWS].detach(),
    "columns": lambda: torch.randn(ROWS, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
    "on its own": lambda: DATA[:ROWS].clone(),
}


class Net(nn.Module):
    """Two layers; ``flat`` makes their weights parts of one tensor."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = torch.randn(5 * WIDTH, WIDTH) / WIDTH
        parts = [whole[:WIDTH], whole[2 * WIDTH : 3 * WIDTH]]
        self.first, self.second = (nn.Parameter(part if flat else part.clone()) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = functional.silu(functional.linear(x, self.first))
        return functional.linear(x, self.second)


def given(x: Tensor) -> int:
    """The bytes that count as inputs, of the plan, where what is predicted is what a step takes."""
    model = Net()
    result = memrewrite.optimize(model, x, budget="95%", optimizer="sgd")
    report = memrewrite.report_of(result)
    for module, predicted in ((model, report.predicted_before), (result, report.predicted_after)):
        assert memrewrite.measure(module, x, optimizer="sgd").peak == predicted.peak
    told = [note for note in report.notes if "is a part of a tensor of" in note]
    assert len(told) == (x.untyped_storage().nbytes() > 2 * x.nbytes)
    return report.predicted_after.categories["inputs"]


@pytest.mark.parametrize("kind", BATCHES)
def test_an_input_counts_with_what_it_lies_in(kind: str) -> None:
    x = BATCHES[kind]()
    assert given(x) == x.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", BATCHES)
def test_on_another_device_it_counts_alone(kind: str) -> None:
    x = BATCHES[kind]()
    spanned = 4 * (1 + (ROWS - 1) * x.stride(0) + WIDTH - 1)  # rows stay as far apart as they are
    found = memrewrite.estimate(Net(flat=True), x, device="cuda", optimizer="sgd").peak
    assert found.categories["inputs"] == -(-spanned // 512) * 512
    assert found.categories["parameters"] == 2 * WIDTH * WIDTH * 4
    result = memrewrite.optimize(Net(), x, device="cuda", budget="min", optimizer="sgd", verify=False)
    assert not any("is a part of" in note for note in memrewrite.report_of(result).notes)


def test_a_budget_that_is_too_low_for_that_says_so() -> None:
    with pytest.raises(memrewrite.BudgetInfeasibleError, match="of 8192 B is a part of a tensor of 163840 B, which"):
        memrewrite.optimize(Net(), DATA[:ROWS], budget=160_000, optimizer="sgd")


@pytest.mark.parametrize("kind", BATCHES)
def test_so_does_what_the_loss_holds(kind: str) -> None:
    model, x, y = Net(), BATCHES["on its own"](), BATCHES[kind]()

    def loss(output: Tensor) -> Tensor:
        return functional.mse_loss(output, y)

    found = memrewrite.estimate(model, x, optimizer="sgd", loss_fn=loss).peak
    assert found.bytes == memrewrite.measure(model, x, optimizer="sgd", loss_fn=loss).peak
    assert found.categories["inputs"] == x.nbytes + y.untyped_storage().nbytes()
    moved = memrewrite.estimate(model, x, optimizer="sgd", loss_fn=loss, device="cuda").peak
    assert moved.categories["inputs"] <= 4 * x.nbytes


def test_two_parts_of_one_tensor_count_once() -> None:
    text = torch.randint(100, (8, 33))
    embedding = nn.Embedding(100, 16)

    def loss(output: Tensor) -> Tensor:
        return functional.cross_entropy(output @ embedding.weight.T, text[:, 1:].flatten())

    found = memrewrite.estimate(nn.Sequential(embedding, nn.Flatten(0, 1)), text[:, :-1], optimizer="sgd", loss_fn=loss)
    assert found.peak.categories["inputs"] == -(-text.nbytes // 512) * 512


def test_parameters_that_are_parts_of_one_tensor_count_as_that() -> None:
    model, x = Net(flat=True), BATCHES["on its own"]()
    found = memrewrite.estimate(model, x, optimizer="sgd").peak
    assert found.categories["parameters"] == 5 * WIDTH * WIDTH * 4
    assert found.bytes == memrewrite.measure(model, x, optimizer="sgd").peak
