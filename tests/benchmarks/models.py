"""The workloads of the benchmarks: models with random weights, batch sizes, precision, and what their peers need.

timm's and transformers' models come from those libraries, the U-Net from ``examples/``. Batch sizes put the eager peak
between 15 and 60 GB, except in the two rows ``...-small``. ``tiny`` makes a model of the same family that trains on a
CPU within a second or two.
"""

import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs
from tests.benchmarks.language import GPT2, LANGUAGE
from tests.benchmarks.workload import Workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_IMAGE, _TINY_IMAGE, _CLASSES = 224, 64, 10


class PlainSwish(nn.Module):
    """SiLU as x * sigmoid(x), of which autograd keeps both factors."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class Segment(nn.Module):
    """Blocks that are checkpointed together; extra arguments go to each of them."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, checkpoint(self._run, x, *args, use_reentrant=False, **kwargs))

    def _run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


class Skip(nn.Module):
    """What stands for a block that runs in the segment before it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def sqrt_segments(model: nn.Module, pattern: str) -> int:
    """Checkpoint the blocks in about sqrt(n) segments of equal length, in place; returns how many there are."""
    paths = [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)] if pattern else []
    if not paths:
        raise ValueError("the model is no chain of blocks")
    length = math.ceil(len(paths) / round(math.sqrt(len(paths))))
    starts = range(0, len(paths), length)
    for start in starts:
        group = paths[start : start + length]
        model.set_submodule(group[0], Segment([model.get_submodule(path) for path in group]))
        for path in group[1:]:
            model.set_submodule(path, Skip())
    return len(starts)


def _timm(name: str, *, tiny: dict[str, Any], tiny_name: str = "") -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        import timm

        if small:
            return cast(nn.Module, timm.create_model(tiny_name or name, num_classes=_CLASSES, **tiny))
        return cast(nn.Module, timm.create_model(name, pretrained=False))

    return build


def _plain_swish(build: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
    def built(tiny: bool) -> nn.Module:
        model = build(tiny)
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.SiLU):
                model.set_submodule(path, PlainSwish())
        return model

    return built


def _images(size: int = _IMAGE) -> Callable[[int, bool], Inputs]:
    def inputs(batch: int, tiny: bool) -> Inputs:
        side = _TINY_IMAGE if tiny else size
        return Inputs((torch.randn(batch, 3, side, side),), {})

    return inputs


def example(name: str) -> Any:
    """The module ``examples/<name>.py``."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def _unet(tiny: bool) -> nn.Module:
    unet = example("unet")
    return cast(nn.Module, unet.get_small_model() if tiny else unet.get_model())


class Checkpointed(nn.Module):
    """A module under a checkpoint of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.module, *args, use_reentrant=False))


def _by_hand(model: nn.Module) -> None:
    """A checkpoint per level of the U-Net, down and up."""
    for path, _ in list(model.named_modules()):
        if re.fullmatch(r"inc|down\.\d+|up\.\d+", path):
            model.set_submodule(path, Checkpointed(model.get_submodule(path)))


def _by_timm(model: nn.Module) -> None:
    cast(Any, model).set_grad_checkpointing()


_RESNET = Workload(
    _timm("resnet50", tiny={"in_chans": 3}, tiny_name="resnet26"),
    _images(),
    batch=192,
    blocks=r"layer\d\.\d+",
    checkpoint_blocks=_by_timm,
)
WORKLOADS: dict[str, Workload] = {
    "resnet50": _RESNET,
    "efficientnet_b4": Workload(
        _plain_swish(_timm("efficientnet_b4", tiny={}, tiny_name="efficientnet_b0")),
        _images(380),
        batch=32,
        blocks=r"blocks\.\d+\.\d+",
        checkpoint_blocks=_by_timm,
    ),
    "densenet121": Workload(
        _timm("densenet121", tiny={"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
        _images(),
        batch=128,
        blocks=r"features\.(denseblock|transition)\d+",
        checkpoint_blocks=_by_timm,
    ),
    "convnext_tiny": Workload(
        _timm("convnext_tiny", tiny={"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)}),
        _images(),
        batch=256,
        blocks=r"stages\.\d+\.(downsample|blocks\.\d+)",
        checkpoint_blocks=_by_timm,
        amp="bf16",
    ),
    "vit_base": Workload(
        _timm(
            "vit_base_patch16_224",
            tiny={"img_size": _TINY_IMAGE, "embed_dim": 32, "depth": 4, "num_heads": 2},
        ),
        _images(),
        batch=256,
        blocks=r"blocks\.\d+",
        checkpoint_blocks=_by_timm,
        amp="bf16",
    ),
    "swin_tiny": Workload(
        _timm(
            "swin_tiny_patch4_window7_224",
            tiny={"img_size": _TINY_IMAGE, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4},
        ),
        _images(),
        batch=256,
        blocks=r"layers\.\d+\.(downsample|blocks\.\d+)",
        checkpoint_blocks=_by_timm,
        amp="bf16",
    ),
    "unet": Workload(_unet, _images(512), batch=16, blocks="", checkpoint_blocks=_by_hand),
    **LANGUAGE,
    "resnet50-small": Workload(_RESNET.build, _RESNET.inputs, 8, _RESNET.blocks, _RESNET.checkpoint_blocks),
    "gpt2_medium-small": Workload(
        GPT2.build, GPT2.inputs, 1, GPT2.blocks, GPT2.checkpoint_blocks, GPT2.amp, samples=GPT2.samples
    ),
}
