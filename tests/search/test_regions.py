"""Where a model cannot be captured whole, its largest submodules are rewritten and Python between them stays."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memrewrite
from memrewrite.api import optimize
from memrewrite.artifact.save import save
from memrewrite.records.errors import CaptureError
from memrewrite.runtime.dropin import programs
from memrewrite.search.regions import find
from memrewrite.workload.step import Inputs, Step
from tests.fuzz.opaque import Chosen
from tests.support.layers import nameless

Sign = nameless("Sign")  # its gradient is lost wherever its forward is traced


class Quantize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sign.apply(x)
        return result


class Stage(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.conv = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth)])
        self.bn = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(depth)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for conv, bn in zip(self.conv, self.bn, strict=True):
            x = x + self.drop(torch.relu(bn(conv(x))))
        return x


class Net(nn.Module):
    """A custom Function between two stages, and a branch that the values decide, for which no graph can hold it all."""

    def __init__(self, branch: bool = True, again: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.first, self.quantize, self.last = Stage(), Quantize(), Stage()
        self.head = nn.Linear(8, 2)
        self.branch, self.again = branch, again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        if self.again:
            x = self.first(x)
        x = self.quantize(x)
        if self.branch and float(x.mean().detach()) > 5:
            x = x * 2
        result: Tensor = self.head(self.last(x).mean((2, 3)))
        return result


def made(**options: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(**options).train(), torch.randn(8, 3, 16, 16)


def step(module: nn.Module, x: Tensor, shared: nn.Module) -> list[Tensor]:
    """Loss, gradients and buffers of one step from the state ``shared`` is in, which is put back."""
    state = {key: value.clone() for key, value in shared.state_dict().items()}
    torch.manual_seed(1)
    module.zero_grad(set_to_none=True)
    loss = module(x).square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
    found += [buffer.clone() for buffer in shared.buffers()]
    shared.load_state_dict(state)
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_rest_stays_and_the_whole_step_fits() -> None:
    model, x = made()
    optimized = optimize(model, x, budget="55%")
    assert list(programs(optimized)) == ["first", "last"]
    assert type(optimized).__name__ == "Net"
    assert optimized.report.equivalent
    assert optimized.report.predicted_after.peak <= (optimized.report.budget or 0)
    assert {segment.first.partition(".")[0] for segment in optimized.report.segments} <= {"first", "last"}
    assert any("values of a tensor" in note for note in optimized.report.notes)
    assert same(step(model, x, model), step(optimized, x, model))
    assert "_memrewrite" not in vars(type(model.first)), "the model itself is as it was"


def test_the_gradient_of_the_custom_function_survives() -> None:
    model, x = made()
    optimized = optimize(model, x, budget="min", verify=False)
    optimized(x).square().mean().backward()
    assert model.stem.weight.grad is not None
    assert model.stem.weight.grad.abs().sum() > 0


def test_a_submodule_called_twice_is_left_alone() -> None:
    model, x = made(again=True)
    optimized = optimize(model, x, budget="90%", verify=False)
    assert list(programs(optimized)) == ["last"]
    assert "first is left alone: it is called 2 times in a step." in optimized.report.notes


class Loop(nn.Module):
    """One block called over and over, on other shapes and in other modes, between blocks that are called once."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.before, self.shared, self.after = Stage(3), Stage(3), Stage(3)
        self.wrapper = nn.ModuleDict({"inner": Stage(3)})
        self.quantize, self.checkpointed = Quantize(), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantize(self.before(x))
        if float(x.detach().sum()) > 1e9:
            x = x + 1
        x = self.shared(x) + self.shared(x[..., 2:-2, 2:-2].contiguous()).mean()
        if self.checkpointed:
            x = checkpoint(self.wrapper["inner"], x, use_reentrant=False)
        else:
            self.shared.eval()
            x = self.wrapper["inner"](self.shared(x))
            self.shared.train()
        result: Tensor = self.after(x)
        return result


def test_a_block_called_over_and_over_is_left_alone_and_its_neighbours_are_not() -> None:
    torch.manual_seed(0)
    model, x = Loop().train(), torch.randn(8, 8, 16, 16)
    optimized = optimize(model, x, budget="70%", verify=False)
    assert sorted(programs(optimized)) == ["after", "before", "wrapper.inner"]
    alone = [note for note in optimized.report.notes if "left alone" in note]
    assert alone == ["shared is left alone: it is called 3 times in a step."]
    assert same(step(model, x, model), step(optimized, x, model))


class Asking(nn.Module):
    """Asks for the values of what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x + 1 if float(x.detach().sum()) > 1e9 else x)
        return result


def test_what_is_the_same_of_many_blocks_is_said_once() -> None:
    blocks = [Asking(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))) for _ in range(4)]
    model = Asking(nn.Sequential(*blocks)).train()
    notes = optimize(model, torch.randn(64, 16), budget="min", verify=False).report.notes
    said = [note.partition(" lets ")[0] for note in notes if "not captured whole" in note]
    assert said == ["inner is not captured whole: Sequential", "inner.0 and 3 more are not captured whole: Asking"]


class Packed(nn.Module):
    """Attention of packed texts, each by itself, as the vision towers of transformers' Qwen-VL compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        lengths = ends.diff().tolist()
        parts = zip(*(each.split(lengths) for each in self.qkv(x).chunk(3, -1)), strict=True)
        result: Tensor = self.out(torch.cat([F.scaled_dot_product_attention(*qkv) for qkv in parts]))
        return result


class PackedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Packed(), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        x = x + self.attention(x, ends)
        result: Tensor = x + self.mlp(x)
        return result


class PackedTexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ends = torch.tensor([0, *lengths.cumsum(0).tolist()])
        for block in self.blocks:
            x = block(x, ends)
        return x


def test_what_fails_in_a_block_stays_a_call_in_it_that_runs_again_for_all_sizes() -> None:
    torch.manual_seed(0)
    model, (x, lengths) = PackedTexts().train(), packed(96, 32)
    before = memrewrite.measure(model, (x, lengths), optimizer="none").peak
    optimized = optimize(model, (x, lengths), budget="min", optimizer="none", cache=False, exact=True)
    report = memrewrite.report_of(optimized)
    assert report.equivalent
    assert sorted(programs(optimized)) == [f"blocks.{i}" for i in range(4)]
    (told,) = [note for note in report.notes if "(Packed) stay" in note]
    assert told.startswith("blocks.0 and 3 more: attention (Packed) stays a call that the model makes: Packed lets")
    assert report.predicted_after.peak < 0.5 * before  # with attention kept it would be 0.75
    assert memrewrite.measure(optimized, (x, lengths), optimizer="none").peak <= report.predicted_after.peak
    for given in (packed(96, 32), packed(40, 50), packed(64), packed(20, 30, 40)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=memrewrite.BeyondPlanWarning)
            ours, theirs = (taken(each, *given) for each in (optimized, model))
        assert all(map(torch.equal, ours, theirs))


def packed(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(lengths), 16), torch.tensor(lengths)


def taken(model: nn.Module, *given: Tensor) -> list[Tensor]:
    result = model(*given)
    return [result, *torch.autograd.grad(result.square().sum(), [*model.parameters()])]


def test_what_the_model_checkpoints_itself_is_left_alone() -> None:
    torch.manual_seed(0)
    model, x = Loop(checkpointed=True).train(), torch.randn(8, 8, 16, 16)
    optimized = optimize(model, x, budget="80%", verify=False)
    assert list(programs(optimized)) == ["before", "after"]
    reason = "wrapper.inner is left alone: the model runs it under its own torch.utils.checkpoint."
    assert reason in optimized.report.notes
    assert same(step(model, x, model), step(optimized, x, model))
    with pytest.raises(CaptureError, match=r"^wrapper\.inner cannot be a region: the model runs it under its own"):
        optimize(model, x, regions=["wrapper.inner"])


class CheckpointsInside(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(checkpoint(self.conv[0], x, use_reentrant=False))


def test_a_region_whose_own_checkpoints_are_replaced_says_so() -> None:
    model, x = made()
    model.last = CheckpointsInside()
    optimized = optimize(model, x, budget="80%", verify=False)
    assert list(programs(optimized)) == ["first", "last"]
    told = "last: The model's own torch.utils.checkpoint calls are replaced by the plan."
    assert told in optimized.report.notes
    assert same(step(model, x, model), step(optimized, x, model))


class Shelf:
    """Something Python hands around, which no graph can hold."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Shelved(Stage):
    """A stage that takes what it was given along, on a shelf or in a list."""

    def forward(self, x: Tensor, shelf: Any = None) -> Tensor:
        x = super().forward(x)
        (shelf.items if isinstance(shelf, Shelf) else shelf).append(x * 2)
        return x


class WithShelf(nn.Module):
    def __init__(self, shelf: Callable[[], Any]) -> None:
        super().__init__()
        self.shelf = shelf
        self.first, self.second, self.third = Stage(), Shelved(), Stage()

    def forward(self, x: Tensor) -> Tensor:
        shelf = self.shelf()
        x = self.second(self.first(x), shelf)
        if float(x.sum()) > 1e9:
            x = x + 1
        return self.third(x) + sum(shelf.items if isinstance(shelf, Shelf) else shelf)


@pytest.mark.parametrize("shelf", [list, Shelf])
def test_a_submodule_that_hands_on_through_what_it_is_given_is_left_alone(shelf: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = WithShelf(shelf), torch.randn(2, 8, 16, 16)
    optimized = optimize(model, x, budget="min")
    assert optimized.report.config["regions"] == ["first", "third"]
    assert optimized.report.equivalent
    assert same(step(optimized, x, model), step(model, x, model))


def test_a_list_that_forward_fills_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="Shelved changes a list or dictionary that it is given"):
        optimize(Shelved(), (torch.randn(2, 8, 16, 16), []))


def saved_bytes(model: Net, x: Tensor) -> dict[str, int]:
    """What each stage of the net keeps for backward, counted by autograd's own hooks, and all of the net."""
    given = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    made: dict[str, dict[int, int]] = {"first": {}, "last": {}, "": {}}
    running = [""]
    handles = []
    for path in ("first", "last"):
        stage = model.get_submodule(path)
        handles.append(stage.register_forward_pre_hook(lambda *args, path=path: running.append(path)))
        handles.append(stage.register_forward_hook(lambda *args: running.__delitem__(-1)))
    storages = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        storages.append(storage)
        seen = any(storage.data_ptr() in found for found in made.values())
        if storage.data_ptr() not in given and not seen:
            made[running[-1]][storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
        return saved.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(x)
    for handle in handles:
        handle.remove()
    return {path: sum(found.values()) for path, found in made.items()}


def test_the_report_says_what_share_of_the_activations_lies_in_regions() -> None:
    model, x = made()
    report = optimize(model, x, budget="70%", verify=False).report
    shares = {share.path: share for share in report.shares}
    assert [path for path, share in shares.items() if not share.untouched] == ["first", "last"]
    assert next(iter(shares)) == ""
    assert "custom autograd.Function Sign" in shares["quantize"].untouched
    assert shares[""].untouched
    counted = saved_bytes(model, x)
    total = sum(share.kept_bytes for share in report.shares)
    assert 0.9 * total <= sum(counted.values()) <= 1.1 * total
    assert report.captured_share == pytest.approx((counted["first"] + counted["last"]) / sum(counted.values()), abs=0.1)
    assert report.to_json()["captured_share"] == report.captured_share < 1
    whole = optimize(nn.Sequential(Stage(), Stage()), torch.randn(8, 8, 16, 16), budget="70%", verify=False).report
    assert (whole.shares, whole.captured_share) == ((), 1.0)


def test_regions_by_name_keep_their_hooks_firing() -> None:
    model, x = made()
    fired: list[str] = []
    model.last.register_forward_hook(lambda module, args, output: fired.append("last"))
    optimized = optimize(model, x, budget="90%", regions=["la*"], verify=False)
    assert list(programs(optimized)) == ["last"]
    fired.clear()
    optimized(x)
    assert fired == ["last"]


def test_a_pattern_of_everything_names_the_largest_parts() -> None:
    model = nn.Sequential(Stage(), Stage())
    optimized = optimize(model, torch.randn(8, 8, 16, 16), budget="min", regions=["*"])
    assert list(programs(optimized)) == ["0", "1"]  # and neither the model itself nor what they have inside


def test_a_frozen_part_in_eval_mode_trains_as_a_region() -> None:
    model, x = made()
    model.first.eval()
    optimized = optimize(model, x, budget="min", regions=["first", "last"], verify=False)
    assert any(segment.first.startswith("first") for segment in optimized.report.segments)
    assert same(step(optimized, x, model), step(model, x, model))  # without a warning


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["nothing*"], "has no submodule that nothing* names"),
        (["first"], "first is called 2 times in a step; a region is called once"),
        (["quantize"], "uses the custom autograd.Function Sign"),
    ],
    ids=["no such submodule", "called twice", "cannot be captured"],
)
def test_regions_that_cannot_be(names: list[str], sentence: str) -> None:
    model, x = made(again=True)
    with pytest.raises(CaptureError, match=sentence.replace("*", r"\*")):
        optimize(model, x, budget="90%", regions=names)


def by_pickle(optimized: nn.Module, model: nn.Module, folder: Path) -> nn.Module:
    result: nn.Module = pickle.loads(pickle.dumps(optimized))
    return result


def by_artifact(optimized: nn.Module, model: nn.Module, folder: Path) -> nn.Module:
    save(optimized, folder / "out")
    return memrewrite.load(folder / "out", model)


@pytest.mark.parametrize("way", [by_pickle, by_artifact])
def test_regions_travel(way: Callable[[nn.Module, nn.Module, Path], nn.Module], tmp_path: Path) -> None:
    model, x = made()
    optimized = optimize(model, x, budget="60%", verify=False)
    expected = step(optimized, x, model)
    arrived = way(optimized, model, tmp_path)
    assert list(programs(arrived)) == ["first", "last"]
    assert same(step(arrived, x, arrived), expected)


def test_a_hook_that_the_model_registers_as_it_runs_is_called() -> None:
    class Tapped(Net):
        """Collects what the convolutions give, by hooks that it registers when it is called first."""

        def __init__(self) -> None:
            super().__init__()
            self.wrapper = nn.Sequential(Stage(), Stage())
            self.seen: list[int] = []
            self.tapped = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.tapped:
                self.tapped = True
                self.wrapper[0].register_forward_hook(lambda module, args, output: self.seen.append(output.numel()))
            return super().forward(self.wrapper(self.stem(x))[:, :3])

    torch.manual_seed(0)
    model, x = Tapped().train(), torch.randn(8, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = memrewrite.optimize(model, x, budget="min", verify=False)
        result(x)
    assert result.report.config["regions"] == ["wrapper.0", "wrapper.1", "first", "last"]
    assert model.seen[-1] == 8 * 8 * 14 * 14
    assert any("wrapper is left alone: the model has a hook on its 0" in note for note in result.report.notes)


class WrittenAfterCheckpoint(nn.Module):
    """Its checkpoint keeps what comes before the softmax, so the result may be written; the softmax would keep that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(torch.softmax, self.first(x), -1, use_reentrant=False)
        y.mul_(2)
        return self.second(y)


def test_what_only_its_own_checkpoint_allows_is_refused_by_name() -> None:
    model, inputs = WrittenAfterCheckpoint(), Inputs((torch.randn(4, 8),), {})
    with pytest.raises(CaptureError, match="what autograd would keep without the model's own checkpoint"):
        find(model, inputs, Step())


def test_a_checkpoint_of_the_models_own_that_fails_on_fakes_sees_no_real_step() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first, chosen, last = self
            result: Tensor = last(torch.tanh(checkpoint(chosen, torch.sigmoid(first(x)) - 0.5, use_reentrant=False)))
            return result

    torch.manual_seed(0)
    model = Checkpointed(nn.Linear(8, 8), Chosen(), nn.Linear(8, 8))
    report = memrewrite.report_of(memrewrite.optimize(model, torch.randn(16, 8)))
    assert "bit-equal" in report.verdict
