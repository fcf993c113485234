"""The drop-in is the user's model in every way but memory, and runs the original, saying why, where it must."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import memrewrite
from memrewrite.artifact.load import load
from memrewrite.artifact.save import save
from memrewrite.records.errors import UsageError
from memrewrite.records.report import Report
from memrewrite.runtime.dropin import fallen_back, programs
from memrewrite.runtime.promise import FallbackWarning
from tests.support.dropins import ConvNet, assert_same_bits, conv_net, image, loss_of, peak, segmented, step


@pytest.fixture
def pair() -> tuple[ConvNet, Any]:
    """A model and its drop-in with segments."""
    model = conv_net()
    return model, segmented(model, image()).module


def optimized(model: nn.Module, *args: Any, **options: Any) -> Any:
    return memrewrite.optimize(model, args, **{"budget": "min", "verify": False, **options})


@contextmanager
def fallback(reason: str) -> Iterator[None]:
    """Exactly one warning inside, a sentence that names ``reason``."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [w.category for w in seen] == [FallbackWarning], [str(w.message) for w in seen]
    text = str(seen[0].message)
    assert "ran its original forward: " in text
    assert reason in text
    assert text.endswith(".")
    assert seen[0].filename != inspect.getsourcefile(FallbackWarning)


def test_it_is_the_same_model(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    assert isinstance(result, ConvNet)
    assert result is not model
    assert type(result) is not ConvNet
    assert type(result).__name__ == ConvNet.__name__  # by which transformers' Trainer picks how labels are smoothed
    assert str(type(result)) == str(ConvNet)  # by which transformers finds what a model records (output_hidden_states)
    for kind in ("named_parameters", "named_buffers", "named_children"):
        ours, theirs = dict(getattr(result, kind)()), dict(getattr(model, kind)())
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs)
    assert list(result.state_dict()) == list(model.state_dict())
    assert inspect.signature(result.forward) == inspect.signature(model.forward)
    assert repr(result) == repr(model)


def test_state_dict_goes_both_ways(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    other = ConvNet().state_dict()
    assert not any(result.load_state_dict(other))
    assert all(value.equal(other[name]) for name, value in model.state_dict().items())
    assert not any(model.load_state_dict(result.state_dict()))
    result.load_state_dict(ConvNet().state_dict(), assign=True)
    assert_same_bits(step(result, image()), step(copied_plain(result), image()))


def copied_plain(result: nn.Module) -> nn.Module:
    plain = ConvNet()
    plain.load_state_dict(result.state_dict())
    return plain


def test_the_model_behaves_as_before(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    untouched = set(vars(conv_net()))
    assert set(vars(model)) == untouched
    assert type(model) is ConvNet
    assert_same_bits(step(model, image()), step(conv_net(), image()))
    result.extra = nn.Linear(2, 2)
    result.register_buffer("more", torch.zeros(1))
    assert not hasattr(model, "extra")
    assert not hasattr(model, "more")


class WithConstant(ConvNet):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_constants_of_the_graph_stay_out_of_the_state_dict_and_of_the_model() -> None:
    model = WithConstant()
    result = segmented(model, image()).module
    twins = result, copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(copy.deepcopy(result)))
    for twin in twins:
        assert names(twin) == names(model)
        assert_same_bits(step(twin, image()), step(model, image()))
    assert all(runs_rewritten(twin, image()) for twin in twins)
    assert model._non_persistent_buffers_set == set()


def names(module: nn.Module) -> dict[str, list[str]]:
    """Every listing of a module's parts."""
    listings = (module.named_parameters(), module.named_buffers(), module.named_modules(), module.state_dict().items())
    kinds = ("parameters", "buffers", "modules", "state")
    found = {kind: [name for name, _ in listed] for kind, listed in zip(kinds, listings, strict=True)}
    return {**found, "attributes": list(vars(module)), "copied": list(vars(copy.copy(module)))}


def test_eval_runs_the_original_silently_and_train_the_rewritten_again(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    assert result.eval() is result
    assert result(image()).equal(copy.deepcopy(model).eval()(image()))
    assert not model.norm.training  # children are shared
    result.train()
    assert runs_rewritten(result, image())


def runs_rewritten(module: nn.Module, *inputs: Any) -> bool:
    """Whether a call runs the program; a warning would be an error."""
    program: Any = type(module)._memrewrite  # type: ignore[attr-defined]
    calls = []
    run = program.run
    try:
        program.run = lambda *args: calls.append(1) or run(*args)  # type: ignore[func-returns-value]
        module(*inputs)
    finally:
        program.run = run
    return bool(calls)


def freeze_child(result: Any) -> Any:
    result.norm.eval()
    return image()


def widen(result: Any) -> Any:
    result.double()
    return image().double()


def double_input(result: Any) -> Any:
    result.double()
    return image()


def swap_child(result: Any) -> Any:
    result.head = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    return image()


def hook_child(result: Any) -> Any:
    result.second.register_forward_hook(lambda module, args, output: output * 2)
    return image()


def hook_child_backward(result: Any) -> Any:
    result.second.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    return image()


def set_rate(result: Any) -> Any:
    result.dropout.p = 0.5
    return image()


def set_momentum(result: Any) -> Any:
    result.norm.momentum = None
    return image()


FALLBACKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen child": (freeze_child, "norm was captured in train mode"),
    "dtype of everything": (widen, "norm.running_mean is torch.float64 (8,), captured as torch.float32 (8,)"),
    "other image size": (lambda result: torch.randn(2, 3, 9, 8), "an input is torch.float32 (2, 3, 9, 8)"),
    "no batch dimension of two": (lambda result: image(1), "an input is torch.float32 (1, 3, 8, 8)"),
    "other module": (swap_child, "head is another module than at capture"),
    "hook on a child": (hook_child, "second has a hook"),
    "another rate of dropout": (set_rate, "dropout.p is 0.5, captured as 0.0"),
    "another momentum": (set_momentum, "norm.momentum is None, captured as 0.1"),
    "backward hook on a child": (hook_child_backward, "second has a hook"),
}


@pytest.mark.parametrize(("change", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_what_it_was_not_captured_for_runs_the_original_and_says_so_once(
    change: Callable[[Any], Any], reason: str, pair: tuple[ConvNet, Any]
) -> None:
    _, result = pair
    plain = conv_net()
    x, same = change(result), change(plain)
    assert x.equal(same) or x.shape == same.shape
    with fallback(reason):
        ours = step(result, x)
    ours_again = step(result, x)  # silent now
    assert_same_bits(ours, ours_again)
    plain.load_state_dict(result.state_dict())
    assert_same_bits(ours, step(plain, x))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda result: double_input(result), "captured as torch.float32"),
        (lambda result: image()[0], "an input is torch.float32 (3, 8, 8)"),
        (lambda result: [image()], "nested differently"),
        (lambda result: 3.0, "an input is a float"),
        (lambda result: image().to("meta"), "on meta"),
    ],
    ids=["parameters of another dtype", "rank", "structure", "no tensor", "device"],
)
def test_where_the_original_raises_so_does_the_dropin(
    call: Callable[[Any], Any], reason: str, pair: tuple[ConvNet, Any]
) -> None:
    _, result = pair
    x = call(result)
    if isinstance(x, Tensor) and x.dim() == 3:
        result(image())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)):
            result(x)
    texts = [str(w.message) for w in seen]
    assert any(reason in text for text in texts), texts


def test_parameters_of_another_dtype_fall_back() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.fc(x.to(self.fc.weight.dtype)))

    result = segmented(Casting(), torch.randn(4, 8)).module.to(torch.float64)
    with fallback("the parameters are torch.float64, captured as torch.float32"):
        assert result(torch.randn(4, 8)).dtype == torch.float64


@pytest.mark.parametrize("batch", [2, 3, 7])
def test_other_batch_sizes_run_the_rewritten_graph(batch: int, pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    assert runs_rewritten(result, image(batch))
    assert_same_bits(step(result, image(batch)), step(model, image(batch)))


def test_arguments_may_be_given_by_name(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    assert runs_rewritten(result, image())
    assert_same_bits(
        step(result, image(), lambda module, x: module(image=x)), step(model, image(), lambda module, x: module(x))
    )
    with fallback("captured for a call with image"), pytest.raises(TypeError):
        result()


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(torch.sigmoid(x * 2).contiguous().view(len(x), -1)))


def test_inputs_may_lie_otherwise_in_memory_than_the_example() -> None:
    model = Flat()
    result = segmented(model, torch.randn(4, 8, 4)).module
    for x in (torch.randn(4, 4, 8).transpose(1, 2), torch.randn(4, 8, 1).expand(4, 8, 4), torch.randn(4, 8, 4)):
        assert runs_rewritten(result, x)
        assert_same_bits(step(result, x), step(model, x))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.fc(x)) if scale is None else torch.tanh(self.fc(x)) * scale
        return y if shift is None else y + shift


def test_an_argument_by_its_place_is_not_taken_for_another_that_was_captured_by_name() -> None:
    model, x, other = Optional(), torch.randn(4, 8), torch.randn(4, 8)
    result = segmented(model, x, kwargs={"shift": other}).module
    assert runs_rewritten(result, x, None, other)
    assert result(x, None, other).equal(model(x, None, other))
    with fallback("captured for a call with x, shift"):
        assert result(x, other).equal(model(x, other))


def test_an_argument_that_is_its_default_counts_as_left_out() -> None:
    model, x = Optional(), torch.randn(4, 8)
    result = segmented(model, x).module
    assert runs_rewritten(result, x, None)
    assert_same_bits(
        step(result, x, lambda module, x: module(x, None, shift=None)), step(model, x, lambda module, x: module(x))
    )
    compiled = torch.compile(result, backend="eager", fullgraph=True)
    assert compiled(x, shift=None).equal(model(x))


def deep_copy(result: nn.Module) -> nn.Module:
    return copy.deepcopy(result)


def pickled(result: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(result))
    return twin


def averaged(result: nn.Module) -> nn.Module:
    average = AveragedModel(result)
    average.update_parameters(result)
    inner: nn.Module = average.module
    return inner


def saved(result: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(result, Path(folder) / "model.pt")
        twin: nn.Module = torch.load(Path(folder) / "model.pt", weights_only=False)
    return twin


@pytest.mark.parametrize("duplicate", [deep_copy, pickled, averaged, saved], ids=lambda function: function.__name__)
def test_copies_are_independent_and_keep_the_segments(
    duplicate: Callable[[nn.Module], nn.Module], pair: tuple[ConvNet, Any]
) -> None:
    model, result = pair
    twin: Any = duplicate(result)
    assert list(programs(twin)) == [""]
    assert_same_bits(step(twin, image()), step(model, image()))
    assert peak(twin, image(8)) == peak(result, image(8)) < peak(model, image(8))
    before = twin.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.add_(1)
    assert twin.head.weight.equal(before)
    twin.norm.eval()
    assert runs_rewritten(result, image())
    with fallback("norm was captured in train mode"):
        twin(image())


@pytest.mark.parametrize("duplicate", [deep_copy, pickled, averaged, saved], ids=lambda function: function.__name__)
def test_copies_know_the_settings_they_were_captured_with(
    duplicate: Callable[[nn.Module], nn.Module], pair: tuple[ConvNet, Any]
) -> None:
    _, result = pair
    assert runs_rewritten(duplicate(result), image())
    result.dropout.p = 0.5
    with fallback("dropout.p is 0.5, captured as 0.0"):
        duplicate(result)(image())


class Noting(ConvNet):
    """Asks for all its attributes, as models of diffusers do, and sets one more as its forward runs."""

    def forward(self, image: Tensor) -> Tensor:
        self.scale = 1 if "halved" not in vars(self) else 0.5
        return super().forward(image) * self.scale


@pytest.mark.parametrize("duplicate", [deep_copy, pickled, averaged, saved], ids=lambda function: function.__name__)
def test_copies_know_which_attributes_there_were(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    result: Any = segmented(Noting(), image()).module
    result.eval()(image())
    result.train()
    assert result.scale == 1
    twin: Any = duplicate(result)
    assert runs_rewritten(twin, image())
    assert runs_rewritten(duplicate(twin), image())
    twin.dropout.p = 0.5
    with fallback("dropout.p is 0.5, captured as 0.0"):
        duplicate(twin)(image())


PROCESS = """
import pickle, sys
twin = pickle.load(open(sys.argv[1], "rb"))
from memrewrite.runtime.dropin import programs
from tests.support.dropins import image, peak
print(len(programs(twin)), peak(twin, image(8)), twin.report.model)
"""


def test_a_pickle_keeps_the_optimisation_in_a_fresh_process(tmp_path: Path) -> None:
    result = optimized(conv_net(), image(8))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(result))
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "model.pickle")]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stdout.split() == ["1", str(peak(result, image(8))), "ConvNet"]
    assert peak(result, image(8)) < peak(conv_net(), image(8))


def test_objects_that_refer_to_themselves_copy(pair: tuple[ConvNet, Any]) -> None:
    _, result = pair
    result.head.owner = [result]
    twins: tuple[Any, ...] = (copy.deepcopy(result), pickled(result))
    for twin in twins:
        assert twin.head.owner[0] is twin
        assert runs_rewritten(twin, image())


class Locked(ConvNet):
    """Leaves its lock out of pickles and makes a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = threading.Lock()


def test_the_class_may_say_how_it_is_pickled() -> None:
    result = segmented(Locked(), image()).module
    twins: tuple[Any, ...] = (copy.deepcopy(result), pickled(result))
    for twin in twins:
        assert isinstance(twin.lock, type(threading.Lock()))
        assert runs_rewritten(twin, image())


class Rich(ConvNet):
    """Methods, properties, class attributes and attributes of a user's class."""

    scale = 2

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.names = ["a", "b"]
        self.table = {"k": 1}

    @property
    def width(self) -> int:
        return self.head.in_features

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def twin(self) -> "Rich":
        return type(self)(self.width)

    @classmethod
    def make(cls) -> "Rich":
        return cls()

    def __len__(self) -> int:
        return 2


def test_methods_and_attributes_of_the_class() -> None:
    model = Rich()
    result: Any = segmented(model, image()).module
    assert (result.scale, result.width, result.names, result.table, len(result)) == (2, 8, ["a", "b"], {"k": 1}, 2)
    assert result.features(image()).equal(model.features(image()))
    result.names.append("c")
    assert model.names == ["a", "b", "c"]  # attributes are the model's own objects


@pytest.mark.parametrize("make", [lambda r: r.twin(), lambda r: r.make()], ids=["method", "classmethod"])
def test_an_object_the_class_makes_itself_runs_the_original(make: Callable[[Any], Any]) -> None:
    result: Any = segmented(Rich(), image()).module
    twin = make(result)
    twin.load_state_dict(result.state_dict())
    with fallback("this object was not made by memrewrite.optimize"):
        assert twin(image()).equal(result(image()))
    assert fallen_back(result) == []  # and it has its own warning still to give
    with fallback("is torch.float64"):
        result.double()(image().double())
    assert fallen_back(result) == [""]


class Delegating(nn.Module):
    """Asks the model inside for what it does not have, or answers None to everything."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.inside, self.asks = conv_net(), answer is None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name) if vars(self).get("asks") else None

    def forward(self, image: Tensor) -> Tensor:
        return self.inside(image) * 2


@pytest.mark.parametrize("answer", [None, "nothing"], ids=["asks the inner model", "answers None"])
def test_a_class_that_answers_for_any_attribute(answer: Any) -> None:
    model = Delegating(answer)
    result = optimized(model, image(8))
    assert result.head is (model.inside.head if answer is None else None)
    assert isinstance(result.report, Report)
    twins = (result, copy.deepcopy(result))
    for twin in twins:
        assert_same_bits(step(twin, image()), step(model, image()))
    assert all(runs_rewritten(twin, image()) for twin in twins)


class ReportProperty(ConvNet):
    @property
    def report(self) -> str:
        return "mine"


class ReportMethod(ConvNet):
    def report(self) -> str:
        return "mine"


class ReportAttribute(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.report = "mine"


class ReportChild(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.report = nn.Identity()


@pytest.mark.parametrize(
    ("kind", "budget"),
    [(ReportProperty, "min"), (ReportMethod, "1GB"), (ReportAttribute, "min"), (ReportChild, "1GB")],
)
def test_a_report_of_the_models_own_stays(kind: type[nn.Module], budget: str) -> None:
    model: Any = kind()
    mine = model.report
    result: Any = optimized(model, image(8), budget=budget, passes=["checkpoint_segments"])
    assert type(result.report) is type(mine)
    assert isinstance(memrewrite.report_of(result), Report)
    assert memrewrite.report_of(copy.deepcopy(result)).model == kind.__name__
    with pytest.raises(UsageError, match="has no report"):
        memrewrite.report_of(ConvNet())


def note(seen: list[str], what: str) -> bool:
    seen.append(what)
    return False


HOOKS: dict[str, Callable[[Any, list[str]], Any]] = {
    "forward": lambda m, seen: m.register_forward_hook(lambda module, args, out: note(seen, "f") or out * 2),
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda module, args: note(seen, "p") or (args[0] * 2,)),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda module, into, out: seen.append("b")),
}


@pytest.mark.parametrize(("kind", "when"), [("forward", "before"), ("pre", "before"), ("backward", "after")])
def test_hooks_on_the_model_fire_once_per_call_and_not_while_optimizing(kind: str, when: str) -> None:
    register = HOOKS[kind]
    model, plain = conv_net(), conv_net()
    ours: list[str] = []
    theirs: list[str] = []
    register(plain, theirs)
    handle = register(model, ours) if when == "before" else None
    result = memrewrite.optimize(model, image(), budget="min")
    assert ours == []
    handle = handle or register(result, ours)
    assert_same_bits(step(result, image()), step(plain, image()))
    assert ours == theirs != []
    handle.remove()
    assert_same_bits(step(result, image()), step(conv_net(), image()))
    assert ours == theirs


def test_functional_call_gets_the_right_gradients_from_the_original(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    given = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
    slopes = []
    for module in (result, model):
        expected = fallback("its parameters are replaced for this call")
        with expected if module is result else nullcontext():
            output = torch.func.functional_call(module, given, (image(),))
        slopes.append(dict(zip(given, torch.autograd.grad(loss_of(output), list(given.values())), strict=True)))
    assert_same_bits(*slopes)
    own = torch.func.functional_call(result, dict(model.named_parameters()), (image(),))
    assert own.equal(model(image()))


def test_grad_scaler_autocast_and_accumulation() -> None:
    records = []
    for build in (lambda m: segmented(m, image()).module, lambda m: m):
        module = build(conv_net(dropout=0.2))
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            for part in image(6).split(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(module(part))
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        records.append({**module.state_dict(), "scale": scaler.get_scale(), "random": torch.get_rng_state()})
    assert_same_bits(*[{k: torch.as_tensor(v) for k, v in record.items()} for record in records])


def parallel_step(model: nn.Module) -> dict[str, Any]:
    """The second step under DDP; what it needs is gone afterwards."""
    parallel = DistributedDataParallel(segmented(model, image()).module)
    step(parallel, image())
    return {name.removeprefix("module."): value for name, value in step(parallel, image()).items()}


def test_distributed_data_parallel(tmp_path: Path) -> None:
    model = conv_net()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ours = parallel_step(model)
    finally:
        gc.collect()  # DDP goes first: it would wait for the group's threads while holding the interpreter's lock
        torch.distributed.destroy_process_group()
    assert_same_bits(ours, step(model, image()))


def test_data_moved_between_dtypes_and_back(pair: tuple[ConvNet, Any]) -> None:
    _, result = pair
    result.to(torch.float64).to(torch.float32)
    assert runs_rewritten(result, image())


def test_a_parametrized_model_keeps_its_parametrizations() -> None:
    torch.manual_seed(0)
    model = conv_net()
    parametrizations.weight_norm(model.second)
    result: Any = segmented(model, image()).module
    assert_same_bits(step(result, image()), step(model, image()))
    assert runs_rewritten(copy.deepcopy(result), image())


def test_a_copy_of_a_parametrized_layer_is_a_drop_in_of_its_own() -> None:
    x = torch.randn(4, 8)
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    result: Any = segmented(layer, x).module
    twin: Any = copy.deepcopy(result)
    assert type(twin) is not type(result)
    assert runs_rewritten(twin, x)
    assert runs_rewritten(copy.deepcopy(twin), x)
    before = layer(x)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2)
    assert twin(x).equal(before)
    assert not result(x).equal(before)
    twin.in_features = 9  # which is the copy's alone
    assert runs_rewritten(result, x)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules is only supported"):
        pickle.dumps(result)


def test_a_layer_parametrized_afterwards(pair: tuple[ConvNet, Any]) -> None:
    model, result = pair
    parametrizations.weight_norm(model.head)
    assert parametrize.is_parametrized(result.head)
    with fallback("head is a ParametrizedLinear, captured as a Linear"):
        ours = step(result, image())
    assert_same_bits(ours, step(model, image()))


def test_a_compiled_model_gives_an_uncompiled_result() -> None:
    model = conv_net()
    model.compile(backend="eager")
    result = memrewrite.optimize(model, image(8), budget="min", verify=False)
    assert runs_rewritten(result, image(8))
    assert "_compiled_call_impl" not in vars(result)
    assert result.report.notes[-1].startswith("The model was compiled in place, and the result is not")


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "optimized already": (
        lambda: optimized(conv_net(), image(8)),
        UsageError,
        "already optimized; optimize the original",
    ),
    "forward put on the object": (lambda: with_forward(conv_net()), UsageError, "forward was replaced on the object"),
}


def with_forward(model: nn.Module) -> nn.Module:
    inner = model.forward
    model.forward = lambda image: inner(image) * 2
    return model


@pytest.mark.parametrize(("build", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(build: Callable[[], nn.Module], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        optimized(build(), image(8))


def patched(self: ConvNet, image: Tensor, scale: float = 2.0) -> Tensor:
    found: Tensor = ConvNet.forward(self, image) * scale
    return found


def test_a_method_that_was_put_on_the_object_is_its_forward(tmp_path: Path) -> None:
    """As libraries patch models that exist already."""
    model = conv_net()
    model.forward = MethodType(patched, model)  # type: ignore[method-assign]
    result = optimized(model, image(8))
    save(result, tmp_path / "saved")
    assert "forward" not in vars(result)
    again = copy.deepcopy(conv_net())
    again.forward = MethodType(patched, again)  # type: ignore[method-assign]
    twins = (result, copy.deepcopy(result), pickle.loads(pickle.dumps(result)), load(tmp_path / "saved", again))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(torch.equal(twin(image(8)), model(image(8))) for twin in twins)
    for twin in twins:
        with pytest.warns(Warning, match="was captured for a call with image"):  # an artifact has its own class
            assert torch.equal(twin(image(8), scale=3.0), model(image(8), scale=3.0))


class Inspecting(nn.Module):
    """Asks for its own forward, as decorators of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv_net()

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.inner(image)
        return found * len(inspect.signature(self.forward).parameters)


def test_a_wrapper_put_around_its_forward_afterwards_runs_it() -> None:
    """As accelerate converts outputs under mixed precision."""
    model = Inspecting()
    result = optimized(model, image(8))
    inner = result.forward
    result.forward = lambda image: inner(image).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(result(image(8)), model(image(8)).double())


class Gate(nn.Module):
    """``relu`` may write over ``h`` unless something keeps ``h`` for a gradient, which depends on the call."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(8, 8), other
        self.norm, self.after = nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x if self.other == "linear" else self.fc(x))  # in float32, of which autocast keeps a copy
        kept = self.after(h) if self.other == "linear" else h * (x if self.other == "input" else self.scale)
        return torch.relu(h) + kept


@pytest.mark.parametrize(
    ("other", "options", "change"),
    [
        ("frozen", {}, lambda model, x: model.scale.requires_grad_()),
        ("input", {}, lambda model, x: x.requires_grad_()),
        ("linear", {"amp": "bf16"}, lambda model, x: None),
    ],
    ids=["a parameter freed later", "an input with a gradient", "captured under autocast, run without"],
)
def test_marks_in_place_are_legal_whatever_requires_a_gradient(
    other: str, options: dict[str, Any], change: Callable[[Gate, Tensor], None]
) -> None:
    torch.manual_seed(0)
    model, x = Gate(other), torch.randn(4, 8)
    result = optimized(model, x, passes=["inplace_activation"], verify=True, **options)
    assert not model.scale.requires_grad
    change(model, x)
    for module in (result, model):
        module(x).sum().backward()
    assert x.grad is None or x.grad.isfinite().all()


def test_an_inference_dropin_called_with_gradients_runs_the_original() -> None:
    torch.manual_seed(0)
    model, x = Gate("linear").eval(), torch.randn(4, 8)
    result = optimized(model, x)
    assert result.report.rewrites
    with torch.no_grad():
        assert runs_rewritten(result, x)
    with fallback("captured in eval mode, for calls under torch.no_grad()"):
        result(x).sum().backward()
    assert model.after.weight.grad is not None
    result.requires_grad_(False)
    assert runs_rewritten(result, x)


def test_a_dropin_inside_another_model_is_optimized_with_it() -> None:
    inner = optimized(conv_net(), image(8))
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    result = memrewrite.optimize(outer, image(8), budget="min")
    assert result.report.equivalent
    assert_same_bits(step(result, image()), step(outer, image()))


def test_inputs_that_are_neither_tensors_nor_numbers_must_be_the_same() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, how: str, scale: float = 1.0, flag: bool | None = None) -> Tensor:
            return getattr(self.fc(x), how)() * (scale if flag is None else -scale)

    model, x = Scaled(), torch.randn(4, 8)
    result = segmented(model, x, "sin", 2.0).module
    for scale in (2.0, 3.0):
        assert result(x, "sin", scale).equal(model(x, "sin", scale))
    for other, reason in {"cos": "how is 'cos', captured as 'sin'", "sin": "scale is 2, captured for another"}.items():
        with fallback(reason):
            assert copy.deepcopy(result)(x, other, 2).equal(model(x, other, 2))
    with fallback("it was captured for a call with x, how, scale"):
        assert result(x, "sin", 2.0, True).equal(model(x, "sin", 2.0, True))
