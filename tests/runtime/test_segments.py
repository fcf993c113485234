"""A segment computes what the plain graph does, bit for bit, whatever surrounds it; each fact below was measured."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from memrewrite.records.errors import CaptureError
from memrewrite.runtime import segment as runtime
from memrewrite.runtime.promise import FallbackWarning
from tests.support.dropins import ConvNet, Segmented, assert_same_bits, conv_net, image, loss_of, peak, segmented, step

Size = int | tuple[int, ...]
SIZES: tuple[Size, ...] = (1, 3, 5, 100, (6, 3), (100, 7), (100, 8, 3), (100, 12, 5, 2))  # the last four nested


@functools.cache
def of_conv_net(dropout: float, size: Size) -> Segmented:
    """Segments of a net that ``conv_net`` gives, which a step leaves as they are."""
    return segmented(conv_net(dropout), image(), size=size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("special", [None, torch.inf, -torch.inf, torch.nan], ids=["finite", "inf", "-inf", "nan"])
def test_batch_norm_counts_every_batch_once(size: Size, special: float | None) -> None:
    model, x = conv_net(), image()
    if special is not None:
        x[0, 0, 0, 0] = special
    found = of_conv_net(0.0, size)
    ours, theirs = step(found.module, x), step(model, x)
    assert_same_bits(ours, theirs)
    assert ours["norm.num_batches_tracked"] == 1
    assert found.count > 0


def test_batch_norm_without_running_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )
    found = segmented(model, image())
    assert_same_bits(step(found.module, image()), step(model, image()))
    assert "batch_norm" in found.inside()


def test_batch_norm_with_a_cumulative_average_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    with pytest.raises(CaptureError, match="Sequential"):
        segmented(model, image())


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(torch.relu(self.norm(self.conv(x))))))


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_called_twice_updates_its_statistics_twice(size: Size) -> None:
    torch.manual_seed(0)
    model = SharedNorm()
    found = segmented(model, image(), size=size)
    ours = step(found.module, image())
    assert_same_bits(ours, step(model, image()))
    assert ours["norm.num_batches_tracked"] == 2
    if size == 100:  # one segment may hold both calls, or end between them
        assert [name for name in found.inside() if "add_" in name or "batch_norm" in name] == [
            *("add_", "batch_norm", "add__1", "batch_norm_1")
        ]


class Tracked(nn.Module):
    """Keeps averages of what passes, in place, and fills a buffer with random numbers, before it drops some."""

    average: Tensor
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(3, 3, 3, padding=1), nn.Dropout(0.3)
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("noise", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.sigmoid(self.conv(torch.tanh(x)))
            self.average.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        self.noise.normal_()
        return self.dropout(torch.sigmoid(self.dropout(self.conv(torch.tanh(x)))))


@pytest.mark.parametrize("size", SIZES)
def test_averages_are_updated_once_and_what_draws_into_a_buffer_never_runs_again(size: Size) -> None:
    torch.manual_seed(0)
    model = Tracked()
    found = segmented(model, image(), size=size)
    assert_same_bits(step(found.module, image()), step(model, image()))
    assert "normal_" not in found.inside()
    assert "mul_" in found.inside() or size == 1


@pytest.mark.parametrize("size", SIZES)
def test_dropout_masks_and_the_random_state_afterwards_are_the_same(size: Size) -> None:
    model, found = conv_net(0.5), of_conv_net(0.5, size)
    ours = step(found.module, image())
    assert_same_bits(ours, step(model, image()))
    assert "dropout" in found.inside()


def test_only_segments_that_draw_keep_the_random_state() -> None:
    module: Any = segmented(conv_net(dropout=0.5), image(), size=3).module
    source = module._memrewrite.source
    assert source.count("random=True") == 1
    assert source.count("random=False") > 1


@pytest.mark.parametrize("captured", [None, torch.bfloat16], ids=["captured without", "captured with"])
@pytest.mark.parametrize("cache", [True, False], ids=["cached casts", "no cache"])
def test_autocast(captured: torch.dtype | None, cache: bool) -> None:
    model = conv_net(dropout=0.2)

    def call(module: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            return module(x)

    found = segmented(model, image(), amp=captured)
    ours = step(found.module, image(), call)
    assert ours["output"].dtype == torch.bfloat16
    assert_same_bits(ours, step(model, image(), call))
    assert_same_bits(step(found.module, image()), step(model, image()))


@pytest.mark.parametrize("frozen", ["first", "norm", "second", "head"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(frozen: str) -> None:
    model = conv_net()
    model.get_submodule(frozen).requires_grad_(False)
    ours = step(segmented(model, image()).module, image())
    assert ours[f"{frozen}.weight"] is None
    assert_same_bits(ours, step(model, image()))


def test_a_layer_frozen_or_freed_after_capture() -> None:
    model = conv_net()
    model.second.requires_grad_(False)
    found = segmented(model, image())
    model.second.requires_grad_(True)
    model.first.requires_grad_(False)
    with pytest.warns(FallbackWarning, match=r"\.weight was trained, or frozen, after it was planned"):
        ours = step(found.module, image())
    assert_same_bits(ours, step(model, image()))


@pytest.mark.parametrize("frozen", ["first", "norm", "second", "head"])
@pytest.mark.parametrize("size", [1, 3, 100, (100, 5)])
def test_a_layer_frozen_or_freed_between_forward_and_backward(frozen: str, size: Size) -> None:
    model = conv_net()
    model.norm2.requires_grad_(False)
    module = segmented(copy.deepcopy(model), image(), size=size).module

    def call(module: Any, x: Tensor) -> Any:
        output = module(x)
        module.get_submodule(frozen).requires_grad_(False)
        module.norm2.requires_grad_(True)
        return output

    def thawed(module: nn.Module) -> list[bool]:
        return [parameter.requires_grad for parameter in module.parameters()]

    assert_same_bits(step(module, image(), call), step(model, image(), call))
    assert thawed(module) == thawed(model)


@pytest.mark.parametrize("size", [3, 100, (100, 5)])
def test_backward_in_inference_mode(size: Size) -> None:
    model, found = conv_net(0.3), of_conv_net(0.3, size)

    def slopes(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        loss = loss_of(module(image()))
        with torch.inference_mode():
            found = torch.autograd.grad(loss, list(module.parameters()))
        return [slope.clone() for slope in found]

    pairs = zip(slopes(copy.deepcopy(found.module)), slopes(model), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in pairs)


def in_checkpoint(module: nn.Module, x: Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=False)


def in_reentrant_checkpoint(module: nn.Module, x: Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=True)


def between_layers(module: nn.Module, x: Tensor) -> Any:
    return checkpoint(lambda x: module(x * 2) * 3, x, use_reentrant=False)


def with_graph(module: nn.Module, x: Tensor) -> Any:
    output = module(x)
    (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
    return output.sum() + slope.square()


def kept_graph(module: nn.Module, x: Tensor) -> Any:
    output = module(x)
    loss_of(output).backward(retain_graph=True)
    return output


def accumulated(module: nn.Module, x: Tensor) -> Any:
    for factor in (1.0, 0.5):
        loss_of(module(x * factor)).backward()
    return module(x * 0.25)


def both_before_backward(module: nn.Module, x: Tensor) -> Any:
    return module(x) + module(x * 0.5)


def after_no_grad(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        looked = module(x)
    return module(x) + looked


def under_saved_tensor_hooks(module: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        return module(x)


CALLS = [
    with_graph,
    kept_graph,
    accumulated,
    both_before_backward,
    after_no_grad,
    under_saved_tensor_hooks,
]


@pytest.mark.parametrize("size", [3, 100, (100, 5)])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls(call: Callable[[nn.Module, Tensor], Any], size: Size) -> None:
    model, found = conv_net(0.3), of_conv_net(0.3, size)
    assert_same_bits(step(found.module, image(), call), step(model, image(), call))


@pytest.mark.parametrize("size", [3, 100, (100, 5)])
@pytest.mark.parametrize("call", [in_checkpoint, in_reentrant_checkpoint, between_layers], ids=lambda c: c.__name__)
def test_in_a_checkpoint_of_the_users(call: Callable[[nn.Module, Tensor], Any], size: Size) -> None:
    """It updates statistics once more; where it stops early, before the last segment, those in there are not."""
    model, found = conv_net(0.3), of_conv_net(0.3, size)
    ours, theirs = step(found.module, image(), call), step(model, image(), call)
    for name, _ in model.named_buffers():
        count, original = ours.pop(name), theirs.pop(name)
        if name.endswith("num_batches_tracked"):
            assert 1 <= count <= original == 2
    assert_same_bits(ours, theirs)


def test_no_grad_keeps_and_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net()
    found = segmented(model, image())
    monkeypatch.setattr(runtime, "Recomputation", None)
    with torch.no_grad():
        assert found.module(image()).equal(model(image()))
    with torch.inference_mode():
        assert found.module(image()).equal(model(image()))


def test_compiled_as_one_graph_the_statistics_are_updated_once() -> None:
    model = conv_net()
    found = segmented(model, image())
    torch.compiler.reset()
    compiled: Any = torch.compile(found.module, backend="aot_eager", fullgraph=True)
    ours = step(found.module, image(), lambda module, x: compiled(x))
    torch.compiler.reset()
    theirs = step(model, image())
    assert ours["norm.num_batches_tracked"] == 1
    del ours["random"], theirs["random"]
    torch.testing.assert_close(ours, theirs)


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 4, 3), nn.RReLU(), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def test_rrelu_is_never_recomputed() -> None:
    torch.manual_seed(0)
    model = Rectified()
    found = segmented(model, image())
    assert found.inside() == ["conv2d", "conv2d_1"]
    assert_same_bits(step(found.module, image()), step(model, image()))


class Counted(nn.Module):
    """Buffers that forward writes and reads: a step count that scales, and a running maximum used only later."""

    count: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y = torch.tanh(self.conv(x) * self.count)
        self.largest.copy_(torch.maximum(self.largest, y.detach().abs().amax()))
        return torch.sigmoid(y) * self.largest


def normalized() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("build", "x"),
    [(Counted, image()), (normalized, image()[0, 0])],
    ids=["step count", "spectral norm"],
)
def test_buffers_that_something_else_reads_are_written_outside_segments(
    build: Callable[[], nn.Module], x: Tensor
) -> None:
    torch.manual_seed(0)
    model = build()
    found = segmented(model, x, size=100)
    assert_same_bits(step(found.module, x), step(model, x))
    kept = [node.name for i, node in enumerate(found.nodes) if found.barrier[i] == i]
    assert kept
    assert not set(kept) & set(found.inside())


def watched(found: Segmented, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What all segments of one step start from."""
    seen: list[Any] = []

    class Noted(runtime.Recomputation):
        def run(self) -> Any:
            seen.extend(self.live_ins)
            return super().run()

    monkeypatch.setattr(runtime, "Recomputation", Noted)
    step(found.module, image())
    return seen


@pytest.mark.parametrize("build", [ConvNet, Counted], ids=["statistics", "step count"])
def test_no_segment_starts_from_a_buffer(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    arguments = watched(segmented(model, image()), monkeypatch)
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert arguments
    assert not [a for a in arguments if isinstance(a, Tensor) and a.untyped_storage().data_ptr() in owned]


def test_memory_really_falls() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()) for _ in range(8)])
    x = torch.randn(256, 16)
    found = segmented(model, x, size=6)
    assert peak(found.module, x) < 0.6 * peak(model, x)


def replace_weight(module: Any) -> None:
    module.first.weight = nn.Parameter(torch.zeros_like(module.first.weight))


def load(module: Any) -> None:
    module.load_state_dict(ConvNet().state_dict())


def clip_bias(module: Any) -> None:
    with torch.no_grad():
        module.first.bias.clamp_(max=0.01)  # autograd keeps no bias, so the original goes on, but with the old values


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace_weight, r"^first\.weight was replaced between the forward and the backward pass"),
        (load, r"^\w+\.\w+ was written in place between the forward and the backward pass.*at version 2; expected"),
        (clip_bias, r"^first\.bias was written in place between the forward and the backward pass"),
    ],
    ids=["replaced", "loaded", "clipped"],
)
def test_a_parameter_changed_between_forward_and_backward_is_no_silent_matter(
    change: Callable[[Any], None], sentence: str
) -> None:
    module = segmented(conv_net(), image()).module
    output = module(image())
    change(module)
    with pytest.raises(RuntimeError, match=sentence):
        loss_of(output).backward()
    loss_of(module(image())).backward()


def stepped_in_backward(module: nn.Module, x: Tensor) -> Any:
    """The optimizer steps for each parameter as soon as its gradient is there, while backward still runs."""
    handles = []
    for parameter in module.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)
        handles.append(parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step()))
    loss_of(module(x)).backward()
    for handle in handles:
        handle.remove()
    return module(x)


@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_may_step_inside_backward(size: Size) -> None:
    model = conv_net()
    module = segmented(copy.deepcopy(model), image(), size=size).module
    assert_same_bits(step(module, image(), stepped_in_backward), step(model, image(), stepped_in_backward))


def test_two_copies_in_one_backward_pass() -> None:
    model = conv_net()
    found = segmented(model, image())
    twin = copy.deepcopy(found.module)
    ours = found.module(image()), twin(image())
    (loss_of(ours[0]) + loss_of(ours[1])).backward()
    grads = [p.grad for p in found.module.parameters()]
    assert_same_bits(dict(enumerate(grads)), dict(enumerate(p.grad for p in twin.parameters())))  # type: ignore[arg-type]


def test_run_segment_alone() -> None:
    module, runs = nn.Linear(2, 2), []

    def body(module: nn.Module, recomputing: Any, x: Tensor) -> Any:
        runs.append(bool(recomputing))
        return (torch.tanh(module(x)),)

    (y,) = runtime.run_segment(body, module, torch.ones(1, 2, requires_grad=True), random=False)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert runs == [False, True, True]


def test_once_gives_the_buffer_or_scratch_memory() -> None:
    buffer = torch.ones(3)
    assert runtime.once(buffer, False) is buffer
    scratch = runtime.once(buffer, True)
    assert scratch.data_ptr() != buffer.data_ptr()
    assert (scratch.shape, scratch.dtype) == (buffer.shape, buffer.dtype)


def test_a_segment_that_saves_less_when_it_runs_again_is_no_silent_matter() -> None:
    def body(module: Any, recomputing: Any, x: Tensor) -> Any:
        return (x.exp() if recomputing else x.exp().exp(),)

    (y,) = runtime.run_segment(body, nn.Linear(1, 1), torch.ones(2, requires_grad=True), random=False)
    with pytest.raises(RuntimeError, match="A segment saved 2 tensors in the forward pass and 1 when backward ran it"):
        y.sum().backward()
