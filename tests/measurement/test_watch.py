"""``memrewrite.watch``: silent where the promise holds, and each thing that breaks it is told by its name."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.errors import UsageError
from tests.support import loops
from tests.support.loops import made, step_of

Told = Callable[..., str]
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _aside() -> None:
    """Each step that is watched looks through all objects: what was there before these tests is none of theirs."""
    gc.collect()
    gc.freeze()


def optimized(name: str, loop: str = "drop-output", **options: Any) -> tuple[Any, Tensor, Tensor, loops.Criterion]:
    model, x, y, criterion = made(name)
    given = {"optimizer": torch.optim.AdamW, "loss_fn": step_of("", criterion, y).loss_fn, "loop": loop, **options}
    return memrewrite.optimize(model, x, budget="min", verify=False, **given), x, y, criterion


@pytest.fixture(scope="module", params=["unet", "language model"])
def dropping(request: pytest.FixtureRequest) -> tuple[Any, Tensor, Tensor, loops.Criterion]:
    return optimized(request.param)


def watched(result: Any, run: Callable[[torch.optim.Optimizer], None]) -> str:
    """What is told of a loop; "" where nothing is. What is told once is not told again."""
    optimizer = torch.optim.AdamW(result.parameters())
    with warnings.catch_warnings(record=True) as caught, memrewrite.watch(result) as watch:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", memrewrite.BeyondPlanWarning)  # which the drop-in tells by itself
        run(optimizer)
    assert [str(each.message) for each in caught] == ([watch.told] if watch.told else [])
    assert all(each.category is memrewrite.OverBudgetWarning for each in caught)
    assert not result._forward_pre_hooks and not result._forward_hooks  # noqa: PT018
    result.zero_grad()
    return watch.told


@pytest.mark.parametrize("loop", ["tutorial", "drop-output", "zero-before-backward", "prefetch", "ema"])
def test_it_is_silent_where_the_loop_is_the_one_that_was_promised(loop: str) -> None:
    result, x, y, criterion = optimized("language model", loop)

    def run(optimizer: torch.optim.Optimizer) -> None:
        loops.LOOPS[loop](result, optimizer, criterion, ((x.clone(), y.clone()) for _ in range(STEPS)))

    assert watched(result, run) == ""


def test_an_output_that_is_alive_in_backward(dropping: Any) -> None:
    result, x, y, criterion = dropping
    told = watched(result, lambda optimizer: loops.tutorial(result, optimizer, criterion, iter([(x, y)] * STEPS)))
    assert "the output is alive in backward" in told
    assert "though it was to be dropped" in told
    assert told.startswith("A step took ")
    assert "On the CPU this is known of" in told


def test_gradients_that_are_alive_in_forward() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    x = torch.randn(128, 512)
    result = memrewrite.optimize(model, x, optimizer="sgd", loop="drop-output", verify=False)

    def run(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            loss = result(x).mean()
            optimizer.zero_grad()
            loss.backward()
            del loss

    assert "gradients are alive while forward runs (4.2 MB (4.0 MiB))" in watched(result, run)


def test_another_batch(dropping: Any) -> None:
    result, x, y, criterion = dropping

    def run(optimizer: torch.optim.Optimizer) -> None:
        ahead = [(x.clone(), y.clone()) for _ in range(STEPS)]
        loops.drop_output(result, optimizer, criterion, iter(ahead))

    assert "another batch is on the device" in watched(result, run)


def test_a_forward_that_runs_twice_before_backward(dropping: Any) -> None:
    result, x, y, criterion = dropping

    def run(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            (criterion(result(x), y) + criterion(result(x), y)).backward()
            optimizer.step()

    told = watched(result, run)
    assert (
        "forward ran 2 times before backward, and what each time keeps adds up: optimize a model that has all" in told
    )
    assert "prefetch" not in told


def test_layers_that_are_frozen_meanwhile() -> None:
    result, x, y, criterion = optimized("language model")

    def run(optimizer: torch.optim.Optimizer) -> None:
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * 2))
        warnings.simplefilter("ignore", memrewrite.FallbackWarning)  # which the drop-in tells by itself
        for parameter in [*result.parameters()][::2]:
            parameter.requires_grad_(False)
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * 2))

    assert "parameters were trained, or frozen, after the plan was made: optimize again" in watched(result, run)


def test_other_tensors(dropping: Any) -> None:
    result, x, y, criterion = dropping

    def run(optimizer: torch.optim.Optimizer) -> None:
        average = torch.zeros(123, 4567)
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS))
        assert average.nbytes

    told = watched(result, run)
    assert (
        "other tensors are beside the model (2.2 MB (2.1 MiB)), the largest of them torch.float32 (123, 4567)" in told
    )


def test_tensors_without_storage_are_passed_over(dropping: Any) -> None:
    kept: list[Tensor] = []
    torch.func.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    with pytest.raises(NotImplementedError):
        kept[0].untyped_storage()
    test_other_tensors(dropping)


def test_a_larger_batch(dropping: Any) -> None:
    result, x, y, criterion = dropping
    more = torch.cat([x, x]), torch.cat([y, y])
    told = watched(result, lambda optimizer: loops.drop_output(result, optimizer, criterion, iter([more] * STEPS)))
    assert "the batch is larger: its inputs take" in told


def test_a_peak_that_is_foreseen_meanwhile_is_no_pass_of_the_loop() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 8, 3), nn.Tanh())
    result = memrewrite.optimize(model, torch.randn(4, 3, 8, 8), budget="min", verify=False)
    with memrewrite.watch(result) as watch:
        with pytest.warns(memrewrite.BeyondPlanWarning, match="A step on them takes"):
            result(torch.randn(5, 3, 8, 8))
        assert watch._passes == 1


def test_evaluation_is_no_step(dropping: Any) -> None:
    result, x, y, criterion = dropping

    def run(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS))
            result.eval()
            with torch.no_grad():
                results = [result(torch.cat([x] * 4)) for _ in range(2)]
            result.train()
            del results

    assert watched(result, run) == ""
    watch, told = memrewrite.watch(result), r"^Only calls of \w+ for evaluation were watched"
    with pytest.warns(UserWarning, match=told), watch, torch.no_grad():
        result(x)


def test_a_step_after_evaluation_that_takes_more(dropping: Any) -> None:
    result, x, y, criterion = dropping

    def run(optimizer: torch.optim.Optimizer) -> None:
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS))
        with torch.no_grad():
            result(x)
        average = torch.zeros(123, 4567)
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * 2))
        assert average.nbytes

    assert "other tensors are beside the model (2.2 MB (2.1 MiB))" in watched(result, run)


def test_an_optimizer_with_more_state() -> None:
    result, x, y, criterion = optimized("cnn", optimizer="none")
    told = watched(result, lambda optimizer: loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS)))
    assert "more state than the one that was named" in told


def test_the_original_forward() -> None:
    result, x, y, criterion = optimized("unet")
    result.pool.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(memrewrite.FallbackWarning):
        result(x)
    told = watched(result, lambda optimizer: loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS)))
    assert "the original forward ran, because pool has a hook, which the rewritten forward would not call" in told


class Asking(nn.Module):
    """Asks about autocast, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x.bfloat16() if torch.is_autocast_enabled("cpu") else x)
        return result


@pytest.mark.parametrize("hooked", [False, True])
def test_a_forward_that_is_wrapped_in_autocast(hooked: bool) -> None:
    """As accelerate wraps it: the call begins outside of autocast."""
    x = torch.randn(16, 32)
    result = memrewrite.optimize(Asking(), x, budget="min", amp="bf16", loop="drop-output", verify=False)
    vars(result)["forward"] = torch.autocast("cpu", torch.bfloat16)(result.forward)
    more = torch.cat([x, x])
    if hooked:
        result.get_submodule("layers.0").register_forward_hook(lambda module, args, output: None)

    def run(optimizer: torch.optim.Optimizer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", memrewrite.FallbackWarning)
            loops.drop_output(result, optimizer, lambda output, _: output.float().mean(), iter([(more, more)] * STEPS))

    told = watched(result, run)
    assert "the batch is larger" in told
    assert ("the original forward ran, because layers.0 has a hook" in told) == hooked
    assert "autocast" not in told


def test_the_original_forward_of_a_part() -> None:
    model, x, y, criterion = made("unet")
    options: dict[str, Any] = {"loss_fn": step_of("", criterion, y).loss_fn, "loop": "drop-output", "verify": False}
    result = memrewrite.optimize(model, x, budget="min", regions=["inc", "up.0", "up.1"], **options)
    result.get_submodule("up.1.conv.0").register_forward_hook(lambda module, args, output: None)

    optimizer = torch.optim.AdamW(result.parameters())
    with warnings.catch_warnings(record=True) as caught, memrewrite.watch(result) as watch:
        warnings.simplefilter("always")
        loops.drop_output(result, optimizer, criterion, iter([(x, y)] * STEPS))
    assert [each.category for each in caught] == [memrewrite.FallbackWarning, memrewrite.OverBudgetWarning]
    assert "the original forward of up.1 ran, of which a warning has said why" in watch.told


def test_what_nobody_knows_is_said_so(dropping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, x, y, criterion = dropping
    watch = memrewrite.watch(result)
    monkeypatch.setattr(watch, "_limit", 1000)
    with pytest.warns(memrewrite.OverBudgetWarning, match="explains it, as a loss does that was not given"), watch:
        loops.drop_output(result, torch.optim.AdamW(result.parameters()), criterion, iter([(x, y)] * STEPS))


def test_an_error_of_the_loop_is_the_loops_own(dropping: Any) -> None:
    result = dropping[0]
    with pytest.raises(ZeroDivisionError), memrewrite.watch(result):
        raise ZeroDivisionError
    assert not result._forward_hooks


def test_an_optimizer_that_refused_its_arguments_is_passed_over(dropping: Any) -> None:
    result, x = dropping[:2]
    with pytest.raises(ValueError, match="learning rate") as refused:
        torch.optim.SGD(result.parameters(), lr=-1)
    with memrewrite.watch(result) as watch:
        result(x)
    assert watch.told == ""
    assert refused.tb is not None  # which holds the optimizer


def test_a_loop_that_calls_forward_itself_is_told() -> None:
    result = memrewrite.optimize(nn.Linear(2, 2), torch.ones(2, 2))
    watch = memrewrite.watch(result)
    with pytest.warns(UserWarning, match=r"^No call of Linear was watched: .* its forward itself"), watch:
        result.forward(torch.ones(2, 2))
    assert watch.told


def test_another_module_is_refused() -> None:
    with pytest.raises(UsageError, match="has no report"):
        memrewrite.watch(nn.Linear(2, 2))
