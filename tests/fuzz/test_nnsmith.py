"""Models made by NNSmith, which knows operators that no strategy here draws; left out where it is not installed."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memrewrite.workload.step import Inputs
from tests.fuzz.check import EXACT, PARTS, Ask, check

graph_gen, materialize, narrow_spec = (
    pytest.importorskip(f"nnsmith.{name}", reason="install nnsmith[torch]==0.1.0 to fuzz with its models")
    for name in ("graph_gen", "materialize", "narrow_spec")
)

SEEDS = 12
SIZE = 8  # nodes of a model
LARGEST = 64 * 2**20  # bytes of parameters; kernels of 16,314 rows are drawn, too, of which a check has many copies
pytestmark = pytest.mark.filterwarnings("ignore")  # NNSmith's own, and of the operators it draws


class Fixed(nn.Module):
    """An NNSmith model without its checks of values, and with a parameter that its inputs pass, so that it trains."""

    def __init__(self, native: Any) -> None:
        super().__init__()
        self.native = native
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        scaled = [t * self.scale if t.is_floating_point() else t for t in tensors]
        values = dict(zip(self.native.ir.input_var(), scaled, strict=True))
        for run, taken, given, _ in self.native.instructions:
            results = run(*(values[name] for name in taken))
            values |= zip(given, results if isinstance(results, list) else [results], strict=True)
        return [values[name] for name in self.native.output_map]


@functools.cache
def torch_operators() -> tuple[Any, Any]:
    """NNSmith's description of PyTorch, and the operators it has found to run there."""
    kind = materialize.Model.init("torch", backend_target="cpu")
    return kind, narrow_spec.auto_opset(kind, None)


def generate(seed: int, size: int = SIZE) -> tuple[nn.Module, Inputs]:
    """The model of ``seed`` with random inputs."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    kind, operators = torch_operators()
    drawn = {"seed": seed, "max_nodes": size, "dtype_choices": ["f32"]}
    made = graph_gen.model_gen(opset=operators, method="symbolic-cinit", **drawn)
    model = kind.from_gir(made.make_concrete())
    shapes = [tuple(shape.shape) for shape in model.input_like.values()]
    return Fixed(model.native_model), Inputs(tuple(torch.rand(s) for s in shapes), {})


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_model_of_nnsmith(seed: int) -> None:
    model, inputs = generate(seed)
    check(model, inputs, Ask("min", EXACT if seed % 2 else None))


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_more_models_of_nnsmith(part: int, request: pytest.FixtureRequest) -> None:
    failed = {}
    for seed in range(SEEDS + part, SEEDS + request.config.getoption("--examples"), PARTS):
        try:
            model, inputs = generate(seed, 2 * SIZE)
            if sum(parameter.nbytes for parameter in model.parameters()) > LARGEST:
                continue
            check(model, inputs, Ask("min", EXACT if seed % 2 else None))
        except Exception as error:  # all seeds are tried before any is reported
            failed[seed] = f"{type(error).__name__}: {error}"
    assert not failed
