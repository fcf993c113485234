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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import StepSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_IMAGE, _TINY_IMAGE, _CLASSES = 224, 64, 10


@dataclass(frozen=True)
class Workload:
    """A training step to measure.

    ``build(tiny)`` makes the model on the current default device, ``inputs(batch, tiny)`` its inputs likewise.
    ``blocks`` matches the paths of modules that run one after another, each fed by the one before; "" where the model
    is no such chain. ``checkpoint_blocks`` turns on the model's own block checkpointing. ``samples`` is what one unit
    of the batch counts for in a throughput: 1 image or the tokens of a sequence. ``returns`` is "loss" where nobody
    reads what the model returns beside it, as nobody can under Liger's kernels; memrewrite then has all passes.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool], Inputs]
    batch: int
    blocks: str
    checkpoint_blocks: Callable[[nn.Module], None]
    amp: str = "off"
    optimizer: str = "adamw"
    samples: int = 1
    returns: Literal["all", "loss"] = "all"

    def step(self) -> Step:
        """The step that every contender takes."""
        return StepSpec(optimizer=self.optimizer, amp=self.amp).build()


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


def tokens(length: int, vocabulary: int) -> Callable[[int, bool], Inputs]:
    """Makes texts of ``length`` tokens that are to be continued."""

    def inputs(batch: int, tiny: bool) -> Inputs:
        tokens = torch.randint(_TINY_VOCABULARY if tiny else vocabulary, (batch, 16 if tiny else length))
        return Inputs((), {"input_ids": tokens, "labels": tokens})

    return inputs


_TINY_VOCABULARY = 97


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = (
        {"vocab_size": _TINY_VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 2}
        if tiny
        else {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    )
    return cast(nn.Module, GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)))


def _llama(tiny: bool, length: int = 2048) -> nn.Module:
    """The sizes of Llama 3.2 1B: 1.24 billion parameters, embeddings tied."""
    return llama(decoder(tiny, 2048, 16, 32, 128256), length)


def llama(sizes: dict[str, Any], length: int = 2048) -> nn.Module:
    """A Llama for texts of ``length`` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return cast(nn.Module, LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)))


def decoder(tiny: bool, width: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """The options of a language model with four heads of queries for one of keys, and one matrix for words and head."""
    if tiny:
        width, layers, heads, vocabulary = 32, 4, 4, _TINY_VOCABULARY
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "tie_word_embeddings": True,
        "use_cache": False,
    }


def _lora(tiny: bool) -> nn.Module:
    """A Qwen3 of 0.9 billion parameters in bf16 with LoRA adapters of rank 16 on all products of its blocks."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**decoder(tiny, 1536, 20, 16, 151936), head_dim=8 if tiny else 128)
    model = Qwen3ForCausalLM(config).bfloat16()
    return cast(nn.Module, get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)))


def _in_bf16(length: int) -> Callable[[bool], nn.Module]:
    return lambda tiny: _llama(tiny, length).bfloat16()


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


def _by_transformers(model: nn.Module) -> None:
    cast(Any, model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


_RESNET = Workload(
    _timm("resnet50", tiny={"in_chans": 3}, tiny_name="resnet26"),
    _images(),
    batch=192,
    blocks=r"layer\d\.\d+",
    checkpoint_blocks=_by_timm,
)
_GPT2 = Workload(
    _gpt2,
    tokens(1024, 50257),
    batch=8,
    blocks=r"transformer\.h\.\d+",
    checkpoint_blocks=_by_transformers,
    amp="bf16",
    samples=1024,
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
    "gpt2_medium": _GPT2,
    "llama_1b": Workload(
        _llama,
        tokens(2048, 128256),
        batch=4,
        blocks=r"model\.layers\.\d+",
        checkpoint_blocks=_by_transformers,
        amp="bf16",
        samples=2048,
    ),
    **{
        f"llama_1b-{length}": Workload(
            _in_bf16(length),
            tokens(length, 128256),
            batch=batch,
            blocks=r"model\.layers\.\d+",
            checkpoint_blocks=_by_transformers,
            optimizer="adamw-fused",
            samples=length,
            returns="loss",
        )
        for length, batch in ((2048, 2), (4096, 2), (16384, 1))
    },
    "qwen3_lora": Workload(
        _lora,
        tokens(4096, 151936),
        batch=2,
        blocks=r"base_model\.model\.model\.layers\.\d+",
        checkpoint_blocks=_by_transformers,
        optimizer="adamw-fused",
        samples=4096,
        returns="loss",
    ),
    "resnet50-small": Workload(_RESNET.build, _RESNET.inputs, 8, _RESNET.blocks, _RESNET.checkpoint_blocks),
    "gpt2_medium-small": Workload(
        _GPT2.build, _GPT2.inputs, 1, _GPT2.blocks, _GPT2.checkpoint_blocks, _GPT2.amp, samples=_GPT2.samples
    ),
}
