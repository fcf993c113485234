"""Models that only ``predict.py`` looks at: torchvision's and more of transformers', with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from memrewrite.workload.step import Inputs
from tests.benchmarks.models import WORKLOADS

_BOXES, _TINY_SIDE, _TINY_LENGTH = 8, 64, 16


@dataclass(frozen=True)
class Model:
    """``build(tiny)`` makes the model on the current default device, ``inputs(batch, tiny)`` its inputs likewise."""

    build: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool], Inputs]


def _torchvision(name: str, side: int, **arguments: Any) -> Model:
    def build(tiny: bool) -> nn.Module:
        return _made(name, **arguments)

    def inputs(batch: int, tiny: bool) -> Inputs:
        size = _TINY_SIDE if tiny else side
        return Inputs((torch.randn(batch, 3, size, size),), {})

    return Model(build, inputs)


def _detection(name: str, side: int, *resized: str) -> Model:
    """Random images, each with as many boxes at random places; ``resized`` names arguments that are the side."""

    def build(tiny: bool) -> nn.Module:
        return _made(name, weights_backbone=None, **dict.fromkeys(resized, _TINY_SIDE if tiny else side))

    def inputs(batch: int, tiny: bool) -> Inputs:
        size = _TINY_SIDE if tiny else side
        return Inputs(([torch.randn(3, size, size) for _ in range(batch)], [_target(size) for _ in range(batch)]), {})

    return Model(build, inputs)


def _made(name: str, **arguments: Any) -> nn.Module:
    from torchvision.models import get_model

    return cast(nn.Module, get_model(name, weights=None, **arguments))


def _target(side: int) -> dict[str, Tensor]:
    corners = torch.rand(_BOXES, 2) * side / 2
    sizes = side / 8 + torch.rand(_BOXES, 2) * side / 4
    return {"boxes": torch.cat([corners, corners + sizes], 1), "labels": torch.randint(1, 20, (_BOXES,))}


def _transformers(kind: str, head: str, length: int, tiny_sizes: dict[str, int], **sizes: int) -> Model:
    """``head`` is what the model class's name ends with, ``sizes`` are fields of the config."""

    def build(tiny: bool) -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **(tiny_sizes if tiny else sizes))
        return cast(nn.Module, getattr(transformers, f"AutoModelFor{head}").from_config(config))

    def inputs(batch: int, tiny: bool) -> Inputs:
        tokens = torch.randint(2, 90, (batch, _TINY_LENGTH if tiny else length))
        return Inputs((), {"input_ids": tokens, "labels": tokens})

    return Model(build, inputs)


_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_DECODER = {"decoder_start_token_id": 0, "pad_token_id": 0}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 97, **_DECODER}
_OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "vocab_size": 97}

MODELS: dict[str, Model] = {
    **{name: Model(w.build, w.inputs) for name, w in WORKLOADS.items() if not name.endswith("-small")},
    "mobilenet_v3": _torchvision("mobilenet_v3_large", 224),
    "vgg16": _torchvision("vgg16_bn", 224),
    "deeplabv3": _torchvision("deeplabv3_resnet50", 512, weights_backbone=None),
    "fcn": _torchvision("fcn_resnet50", 512, weights_backbone=None),
    "retinanet": _detection("retinanet_resnet50_fpn", 640, "min_size", "max_size"),
    "ssdlite": _detection("ssdlite320_mobilenet_v3_large", 320),
    "bert_base": _transformers("bert", "MaskedLM", 512, _BERT),
    "t5_base": _transformers(
        "t5", "Seq2SeqLM", 512, _T5, d_model=768, d_ff=3072, num_layers=12, num_heads=12, **_DECODER
    ),
    "opt_125m": _transformers("opt", "CausalLM", 1024, _OPT, hidden_size=768, ffn_dim=3072),
}
