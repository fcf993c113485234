"""What works piece by piece is observed once for arguments that are alike, and all that is observed stays the same."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its customary name)
from torch import Tensor, fx, nn

from memrewrite.observe import effects, recorder, watermarks
from memrewrite.runtime.attention import attention_in_pieces
from memrewrite.runtime.cross_entropy import chunked_cross_entropy
from memrewrite.runtime.linear_cross_entropy import linear_cross_entropy
from memrewrite.runtime.tiles import in_tiles
from memrewrite.simulate.memory import repeats
from memrewrite.workload.step import Step
from memrewrite.workload.stepspec import StepSpec

WIDTH, LAYERS = 32, 3
RAN: list[Any] = []  # parts of a model, as often as they ran


def chain_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    RAN.append(chain_mlp)
    return F.linear(F.silu(F.linear(x, up)), down)


def chain_drawing(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.dropout(chain_mlp(x, up, down), 0.5, training=True)


def chain_writing(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return chain_mlp(x.mul_(2.0), up, down)


def mlp_without_a_name(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return chain_mlp(x, up, down)


def attended(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)
    return attention_in_pieces(q, q, q, None, 2, is_causal=True).transpose(1, 2).flatten(2)


def loss(x: Tensor, head: Tensor, target: Tensor, early: bool) -> Tensor:
    return linear_cross_entropy(x.flatten(0, 1), head, None, target, None, (), 1, -100, 0.0, 7, early)


def loss_of_logits(x: Tensor, head: Tensor, target: Tensor, early: bool) -> Tensor:
    return chunked_cross_entropy(F.linear(x.flatten(0, 1), head), target, torch.float32, 1, -100, 8)


def graph_of(part: Callable[..., Tensor], early: bool | None = True) -> tuple[fx.GraphModule, list[Tensor]]:
    """Layers with attention in pieces and an MLP in tiles, and a loss with its head, or without; the inputs."""
    root, graph = nn.Module(), fx.Graph()
    x, target = graph.placeholder("x"), graph.placeholder("target")

    def tiled(x: Tensor, up: Tensor, down: Tensor) -> Any:
        return in_tiles(part, (0,), (1, 2), 5, x, up, down)

    def weight(name: str, *sizes: int) -> fx.Node:
        root.register_parameter(name, nn.Parameter(torch.randn(*sizes)))
        return graph.get_attr(name)

    x = graph.call_function(torch.mul, (x, weight("scale", WIDTH)))  # all layers are given what has a gradient
    for i in range(LAYERS):
        x = graph.call_function(torch.add, (x, graph.call_function(attended, (x,))))
        weights = weight(f"up{i}", 2 * WIDTH, WIDTH), weight(f"down{i}", WIDTH, 2 * WIDTH)
        x = graph.call_function(torch.add, (x, graph.call_function(tiled, (x, *weights))))
    of = loss_of_logits if early is None else loss
    graph.output((graph.call_function(of, (x, weight("head", 50, WIDTH), target, early)),))
    return fx.GraphModule(root, graph), [torch.randn(2, 12, WIDTH), torch.randint(50, (24,))]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in ((recorder, "_SEEN"), (repeats, "_KNOWN")):
        monkeypatch.setattr(module, name, {})
    yield
    RAN.clear()


def each_time(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> tuple[Any, int]:
    """What ``run`` gives where pieces run each time, and how often parts do."""
    RAN.clear()
    with monkeypatch.context() as patch:
        patch.setattr(effects, "in_place_of_pieces", lambda instead: nullcontext())
        patch.setattr(watermarks, "repeated", lambda trackers: nullcontext())
        found = run()
    return found, len(RAN)


def observed(graph: fx.GraphModule, example: list[Tensor], **options: Any) -> tuple[Any, ...]:
    """All that is observed of a graph, and what its values look like."""
    found = effects.observe(graph, example, **options)
    values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta["val"], Tensor)]
    like = [(v.shape, v.dtype, v.device, v.requires_grad, v.untyped_storage().nbytes()) for v in values]
    return found.of, found.storages, like


@pytest.mark.parametrize("early", [True, False, None])
@pytest.mark.parametrize("options", [{}, {"grad": False}, {"amp": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("part", [chain_mlp, chain_drawing])
def test_what_is_observed_once_is_what_all_operators_do(
    part: Any, options: dict[str, Any], early: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, example = graph_of(part, early)
    expected, ran = each_time(monkeypatch, lambda: observed(graph, example, **options))
    RAN.clear()
    assert observed(graph, example, **options) == expected
    assert len(RAN) == ran // LAYERS
    assert observed(graph, example, **options) == expected
    assert len(RAN) == ran // LAYERS
    assert None not in recorder._SEEN.values()


@pytest.mark.parametrize("part", [mlp_without_a_name, chain_writing])
def test_what_may_differ_is_observed_each_time(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, example = graph_of(part)
    expected, ran = each_time(monkeypatch, lambda: observed(graph, example))
    RAN.clear()
    assert observed(graph, example) == expected
    assert len(RAN) == ran


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("early", [True, False])
def test_watermarks_of_what_is_counted_again_are_those_of_all_operators(
    early: bool, amp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, example = graph_of(chain_mlp, early)
    step: Step = StepSpec(amp=amp).build()

    def levels() -> list[Any]:
        return list(watermarks.watermarks(graph, example, step).values())

    expected, ran = each_time(monkeypatch, levels)
    RAN.clear()
    assert levels() == expected
    assert len(RAN) == ran // LAYERS
