"""What nodes read, write, save and cost, observed on graphs of both front ends."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812  (its customary name)

from memrewrite.capture import capture
from memrewrite.capture.normal import leaf_tensors
from memrewrite.observe.effects import Effects, observe
from memrewrite.observe.node_effects import NodeEffects
from memrewrite.observe.recorder import Part
from memrewrite.passes.spelling import operation
from memrewrite.targets.allocator import GRANULE
from memrewrite.targets.compiled import CompiledTarget
from memrewrite.targets.eager import EAGER
from memrewrite.torch_internals.fake_tensors import FakeTensor
from memrewrite.torch_internals.pytrees import tree_leaves
from memrewrite.workload.step import Inputs
from tests.support.layers import WIDTH, images, model, x
from tests.support.models import MODELS, make

front_ends = pytest.mark.parametrize("front_end", ["export", "dynamo"])


def seen(module: nn.Module, inputs: Inputs, front_end: str, **options: Any) -> Effects:
    return observe(capture(module, inputs, front_end).graph_module, leaf_tensors(module, inputs), **options)


def effects_of(function: Callable[..., Any], *tensors: Tensor, front_end: str = "export", **options: Any) -> Effects:
    return seen(model(function), Inputs(tensors, {}), front_end, **options)


def find(effects: Effects, name: str) -> NodeEffects:
    """The facts of the last node of that operation."""
    return [effects.of[node] for node in effects.order if operation(node) == name][-1]


def labels(effects: Effects, keys: frozenset[int]) -> set[str]:
    """Storages by what made them: "x", an attribute's path, the operation of a node, or "private" to a node."""
    names: dict[int, str] = {}
    for node in effects.order:
        own = {"placeholder": "x", "get_attr": str(node.target)}.get(node.op, operation(node))
        for key in effects.of[node].outputs:
            names.setdefault(key, own)
    return {names.get(key, "private") for key in keys}


def conv(self: Any, x: Tensor) -> Tensor:
    return self.conv(x)


def norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(self.conv(x))


def around(operator: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The operator applied to what a linear layer gives."""
    return lambda self, x: operator(self, self.linear(x))


STATISTICS = {"norm.running_mean", "norm.running_var"}
# operation: the model, its input, then what the node reads, writes and saves
TABLE: dict[str, tuple[Callable[..., Any], Tensor, set[str], set[str], set[str]]] = {
    "conv2d": (conv, images(), {"x", "conv.weight"}, set(), {"x", "conv.weight"}),
    "batch_norm": (
        norm,
        images(),
        {"conv2d", "norm.weight", "norm.bias", *STATISTICS},
        STATISTICS,
        {"conv2d", "norm.weight", "private", *STATISTICS},
    ),
    "linear": (around(lambda m, h: h), x(), {"x", "linear.weight", "linear.bias"}, set(), {"x"}),
    "relu": (around(lambda m, h: torch.relu(h)), x(), {"linear"}, set(), {"relu"}),
    "relu_": (around(lambda m, h: torch.relu_(h)), x(), {"linear"}, {"linear"}, {"linear"}),
    "silu": (around(lambda m, h: F.silu(h)), x(), {"linear"}, set(), {"linear"}),
    "sigmoid": (around(lambda m, h: h.sigmoid()), x(), {"linear"}, set(), {"sigmoid"}),
    "mul": (around(lambda m, h: h * h.sigmoid()), x(), {"linear", "sigmoid"}, set(), {"linear", "sigmoid"}),
    "view": (around(lambda m, h: h.view(-1)), x(), {"linear"}, set(), set()),
    "dropout": (around(lambda m, h: m.dropout(h)), x(), {"linear"}, set(), {"private"}),
    "rrelu": (around(lambda m, h: F.rrelu(h, training=True)), x(), {"linear"}, set(), {"linear", "private"}),
    "add_": (around(lambda m, h: h + m.counter.add_(1)), x(), {"counter"}, {"counter"}, set()),
}


@front_ends
@pytest.mark.parametrize("name", TABLE)
def test_reads_writes_and_saves(name: str, front_end: str) -> None:
    function, tensor, reads, writes, saved = TABLE[name]
    effects = effects_of(function, tensor, front_end=front_end)
    facts = find(effects, name)
    assert (labels(effects, facts.reads), labels(effects, facts.writes)) == (reads, writes)
    assert labels(effects, facts.saved) == saved
    assert facts.saves_output == bool(saved & {name, "private"} or saved & writes)
    assert labels(effects, facts.statistics) == (STATISTICS if name == "batch_norm" else set())
    assert facts.random == (name in ("dropout", "rrelu"))
    assert facts.stale_save == (name == "rrelu")


def test_gates_that_a_cell_writes_side_by_side_are_as_they_were_saved() -> None:
    facts = find(seen(nn.GRU(4, 4), Inputs((torch.randn(3, 2, 4),), {}), "export"), "gru")
    assert facts.saves_output
    assert not facts.stale_save


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "left": lambda t: t[:, :3],
    "middle": lambda t: t[:, 2:4],
    "right": lambda t: t[:, 4:],
    "first rows": lambda t: t[:2],
    "last rows": lambda t: t[2:],
    "a column": lambda t: t[:, 5],
    "transposed": lambda t: t.t()[:2],
    "every other": lambda t: t[:, ::2],
    "one": lambda t: t[3, 5],
    "expanded": lambda t: t[0, :1].expand(4),
}


@pytest.mark.parametrize("one", VIEWS)
@pytest.mark.parametrize("other", VIEWS)
def test_parts_of_a_storage_that_are_told_apart_have_nothing_in_common(one: str, other: str) -> None:
    storage = torch.arange(24).view(4, 6)
    a, b = VIEWS[one](storage), VIEWS[other](storage)
    common = set(a.flatten().tolist()) & set(b.flatten().tolist())
    told = Part.of(a).apart(Part.of(b))
    assert told == Part.of(b).apart(Part.of(a))
    assert not (told and common)
    assert told or common or "every other" in (one, other) or {"expanded", "one", "transposed"} & {one, other}


@front_ends
def test_an_evaluated_batch_norm_writes_nothing(front_end: str) -> None:
    effects = seen(model(norm).eval(), Inputs((images(),), {}), front_end)
    facts = find(effects, "batch_norm")
    assert not facts.writes | facts.statistics
    assert labels(effects, facts.saved) >= STATISTICS


@front_ends
def test_a_view_is_its_base_and_an_expansion_costs_its_storage_once(front_end: str) -> None:
    effects = effects_of(lambda self, x: self.linear(x)[:, :1].expand(-1, 64) * self.scale, x(), front_end=front_end)
    mul, expand, base = (find(effects, name) for name in ("mul", "expand", "linear"))
    assert expand.outputs == base.outputs <= mul.saved
    assert expand.moved == 0
    (key,) = base.outputs
    assert effects.storages[key].bytes == GRANULE
    assert mul.moved > 64 * 4 * 4


@front_ends
def test_a_write_through_a_view_is_a_write_to_the_base(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.linear(x) * 1
        hidden.view(-1)[0:2].fill_(3.0)
        return hidden

    effects = effects_of(forward, x(), front_end=front_end)
    (writer,) = (facts for facts in effects.of.values() if facts.writes)
    assert writer.writes == find(effects, "mul").outputs
    assert writer.reads >= writer.writes


@front_ends
def test_tied_weights_and_views_of_one_buffer_are_one_storage(front_end: str) -> None:
    def prepare(m: Any) -> None:
        m.other.weight = m.linear.weight
        table = torch.ones(2, WIDTH)
        m.register_buffer("first", table[0])
        m.register_buffer("second", table[1])

    module = model(lambda self, x: self.other(self.linear(x + self.first)) * self.second, prepare)
    effects = seen(module, Inputs((x(),), {}), front_end)
    linears = [effects.of[node] for node in effects.order if operation(node) == "linear"]
    assert len(linears[0].reads & linears[1].reads) == 1
    assert len(find(effects, "add").reads & find(effects, "mul").reads) == 1


@front_ends
def test_autocast_keeps_its_cast_weights_where_they_were_made(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return self.other(hidden) + self.other(hidden.tanh())

    effects = effects_of(forward, x(), front_end=front_end, amp=torch.bfloat16)
    _, first, second = (effects.of[node] for node in effects.order if operation(node) == "linear")
    cast = (first.saved & second.saved) - first.reads
    assert labels(effects, cast) == {"private"}
    index = [effects.of[node] is first for node in effects.order].index(True)
    assert {effects.storages[key].producer for key in cast} == {index}
    assert first.saves_output
    assert not second.saves_output
    assert cast <= second.reads


@front_ends
def test_compiled_a_cast_to_a_wider_type_counts_as_what_it_is_made_of(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x).bfloat16().float().exp()

    for target, ratio in ((CompiledTarget(), 1), (EAGER, 2)):
        effects = effects_of(forward, torch.zeros(256, WIDTH), front_end=front_end, target=target)
        (exp,) = (node for node in effects.order if operation(node) == "exp")
        (wide,) = exp.all_input_nodes
        (narrow,) = wide.all_input_nodes
        before, after = (effects.storages[key].bytes for node in (narrow, wide) for key in effects.of[node].outputs)
        assert after == before * ratio


RERUN: dict[str, tuple[Callable[..., Any], Tensor, str, bool]] = {
    "conv": (conv, images(), "conv2d", False),
    "linear": (around(lambda m, h: h), x(), "linear", False),
    "silu": (around(lambda m, h: F.silu(h)), x(), "silu", False),
    "relu": (around(lambda m, h: torch.relu(h)), x(), "relu", True),
    "norm": (norm, images(), "batch_norm", True),
    "softmax": (around(lambda m, h: h.softmax(1)), x(), "softmax", True),
}


@front_ends
@pytest.mark.parametrize("name", RERUN)
def test_what_saves_only_its_inputs_need_not_run_again(name: str, front_end: str) -> None:
    function, tensor, operator, whole = RERUN[name]
    facts = find(effects_of(function, tensor, front_end=front_end), operator)
    assert facts.moved > 0
    assert facts.rerun == ((facts.flops, facts.moved) if whole else (0, 0))


def test_floating_point_operations_are_counted() -> None:
    facts = find(effects_of(conv, images()), "conv2d")
    assert facts.flops == 2 * (2 * 6 * 6 * 6) * 3 * 9
    assert facts.moved == 4 * (2 * 3 * 8 * 8 + 6 * 3 * 9 + 2 * 6 * 6 * 6)


@front_ends
@pytest.mark.parametrize("name", MODELS)
def test_inference_saves_nothing(name: str, front_end: str) -> None:
    module, inputs = make(name)
    effects = seen(module.eval(), inputs, front_end, grad=False)
    assert not any(facts.saved or facts.saves_output for facts in effects.of.values())
    assert torch.is_grad_enabled()


@front_ends
def test_regions_without_gradients_save_nothing(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.linear(x).sigmoid()
        return self.other(x) * gate

    effects = effects_of(forward, x(), front_end=front_end)
    kept = frozenset().union(*(facts.saved for facts in effects.of.values()))
    assert len(kept) == 2  # the input for the weight's gradient, and the gate
    assert torch.is_grad_enabled()


def saved_bytes(effects: Effects) -> Counter[tuple[str, int]]:
    kept = frozenset().union(*(facts.saved for facts in effects.of.values()))
    return Counter((effects.storages[key].origin, effects.storages[key].bytes) for key in kept)


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_both_front_ends_see_the_same_storages_saved(name: str, amp: torch.dtype | None) -> None:
    export, dynamo = (seen(*make(name), front_end, amp=amp) for front_end in ("export", "dynamo"))
    assert saved_bytes(export) == saved_bytes(dynamo)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "checkpointed"])
def test_what_is_observed_is_what_autograd_keeps(name: str) -> None:
    module, inputs = make(name)
    observed = saved_bytes(seen(module, inputs, "export"))
    known = {t.untyped_storage().data_ptr(): "parameter" for t in module.parameters()}
    attributes = [value for value in vars(module).values() if isinstance(value, Tensor)]
    known |= {t.untyped_storage().data_ptr(): "buffer" for t in (*module.buffers(), *attributes)}
    known |= {t.untyped_storage().data_ptr(): "input" for t in inputs.tensors()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs.args)
    sizes = {key: -(-t.untyped_storage().nbytes() // GRANULE) * GRANULE for key, t in kept.items()}
    real = Counter((known.get(key, "node"), size) for key, size in sizes.items())
    assert output is not None
    assert real == observed


@front_ends
def test_every_node_is_told_of_and_holds_its_fake_value(front_end: str) -> None:
    module, inputs = make("residual")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    captured = capture(module, inputs, front_end)
    effects = observe(captured.graph_module, leaf_tensors(module, inputs))
    assert effects.order == tuple(captured.graph_module.graph.nodes)
    assert effects.of.keys() == set(effects.order)
    for node in effects.order:
        assert all(isinstance(leaf, FakeTensor) for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor))
    for key, storage in effects.storages.items():
        assert storage.bytes % GRANULE == 0
        made = storage.producer >= 0
        assert made == (storage.origin == "node")
        assert not made or key not in effects.of[effects.order[storage.producer]].reads
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_observing_again_gives_the_same() -> None:
    module, inputs = make("transformer")
    graph_module = capture(module, inputs).graph_module
    first, second = (observe(graph_module, leaf_tensors(module, inputs)) for _ in range(2))
    assert first == second


def test_the_device_of_autocast_is_that_of_the_model() -> None:
    """A first input that is no float, or none at all, does not decide it."""
    effects = seen(model(lambda self: self.linear(self.other.weight)), Inputs((), {}), "export", amp=torch.bfloat16)
    assert next(n for n in effects.order if operation(n) == "linear").meta["val"].dtype == torch.bfloat16


@front_ends
def test_an_input_that_requires_a_gradient_may_be_written(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x)

    given = x().requires_grad_().mul(1)
    effects = effects_of(forward, given, front_end=front_end)
    facts = find(effects, "mul_")
    assert {effects.storages[key].origin for key in facts.writes} == {"input"}


def test_a_graph_made_by_hand_is_observed() -> None:
    graph = fx.Graph()
    value = graph.placeholder("value")
    graph.output((graph.call_method("relu", (value,)),))
    effects = observe(fx.GraphModule(nn.Module(), graph), [torch.ones(3, requires_grad=True)])
    assert find(effects, "relu").saves_output
