"""The models of the zoo as tables: the smallest of every timm and torchvision family, small transformers, diffusers.

Random weights, small inputs, nothing is downloaded. The four libraries are no dependency of memrewrite:

    pip install -e ".[zoo]"                 # timm, transformers and diffusers
    pip install --no-deps torchvision       # its binary operators need not load

timm's families are its model modules, torchvision's the modules that define builders; each is stood for by its member
with the fewest parameters, byobnet, nfnet, vgg and two of the vision transformers by a larger one, where one operator
of the smallest alone takes most of the memory. Members of more than a few tens
of millions are narrowed by the arguments in the table, so that activations, which are what is planned, outweigh the
gradients.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from memrewrite.workload.step import Inputs
from tests.zoo.architectures import TRANSFORMERS, VOCABULARY, Arguments
from tests.zoo.diffusion import DIFFUSERS, given


@dataclass(frozen=True)
class Entry:
    """One model: which library and family, its name there, what it is built with and what it is fed.

    ``inputs`` is a name in ``_INPUTS`` or a shape of random numbers. ``optimizer`` is ``"sgd"`` where the parameters
    outweigh the activations and cannot be narrowed: the temporaries of AdamW's step would be the peak then, which no
    plan can lower.
    """

    library: str
    family: str
    name: str
    inputs: str | tuple[int, ...] = ()
    arguments: Arguments = field(default_factory=dict)
    optimizer: str = "adamw"

    @property
    def key(self) -> str:
        """``library/family``, which no other entry has."""
        return f"{self.library}/{self.family}"


def build(entry: Entry) -> tuple[nn.Module, Inputs]:
    """The model with random weights, in training mode, and its inputs."""
    declare_operators()
    model = _BUILDERS[entry.library](entry)
    if entry.library == "diffusers":
        return model.train(), Inputs((), given(DIFFUSERS[entry.name][1]))
    if isinstance(entry.inputs, str):
        return model.train(), Inputs((), _INPUTS[entry.inputs]())
    inputs = Inputs((torch.randn(entry.inputs or (2, *_timm_size(model))),), {})
    if entry.key in _CALLED_BEFORE:
        model(*inputs.args)
    return model.train(), inputs


def declare_operators() -> None:
    """Declare, once, operators that no model calls but torchvision expects of its binary, which needs CUDA to load."""
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        _LIBRARIES.append(library)
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _timm(entry: Entry) -> nn.Module:
    import timm

    return cast(nn.Module, timm.create_model(entry.name, pretrained=False, **entry.arguments))


def _timm_size(model: nn.Module) -> tuple[int, ...]:
    from timm.data import resolve_model_data_config

    return cast(tuple[int, ...], resolve_model_data_config(model)["input_size"])


def _torchvision(entry: Entry) -> nn.Module:
    from torchvision.models import get_model

    return cast(nn.Module, get_model(entry.name, weights=None, **entry.arguments))


def _transformers(entry: Entry) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(entry.family, **entry.arguments)
    return cast(nn.Module, getattr(transformers, f"AutoModelFor{entry.name}").from_config(config))


def _diffusers(entry: Entry) -> nn.Module:
    import diffusers

    return cast(nn.Module, getattr(diffusers, entry.name)(**entry.arguments))


# It sets itself up when it is called first, and is refused until then with that advice.
_CALLED_BEFORE = ("timm/convit",)
_LIBRARIES: list[torch.library.Library] = []  # a library's operators go with it
_BUILDERS = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers, "diffusers": _diffusers}

_BATCH, _LENGTH = 4, 32


def _tokens() -> Tensor:
    return torch.randint(5, VOCABULARY, (_BATCH, _LENGTH))


# The arguments of forward by what the model reads.
_INPUTS = {
    "text": lambda: {"input_ids": _tokens(), "labels": _tokens()},
    "masked text": lambda: {"input_ids": _tokens(), "attention_mask": _mask(), "labels": _tokens()},
    "pair": lambda: {"input_ids": _tokens(), "labels": _tokens()},
    "image": lambda: {"pixel_values": torch.randn(_BATCH, 3, 64, 64)},
    "large image": lambda: {"pixel_values": torch.randn(_BATCH, 3, 224, 224)},
    "patches": lambda: {
        "pixel_values": torch.randn(_BATCH, 64, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(_BATCH, 64, dtype=torch.long),
        "spatial_shapes": torch.full((_BATCH, 2), 8),
    },
    "video": lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)},
    "large video": lambda: {"pixel_values": torch.randn(_BATCH, 4, 3, 64, 64)},
    "wave": lambda: {"input_values": torch.randn(_BATCH, 4000)},
    "spectrogram": lambda: {"input_values": torch.randn(_BATCH, 64, 32)},
    "features": lambda: {"input_features": torch.randn(_BATCH, 64, 160)},
    "speech": lambda: {"input_features": torch.randn(_BATCH, 16, 128), "labels": _tokens()},
}


def _mask() -> Tensor:
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.long)
    mask[0, _LENGTH // 2 :] = 0
    return mask


_TIMM: dict[str, tuple[str, Arguments]] = {
    "beit": ("beit_base_patch16_224", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "byoanet": ("halonet_h1", {}),
    "byobnet": ("mobileone_s1", {}),  # test_byobnet is four blocks: one alone is most of its activations
    "cait": ("cait_xxs24_224", {}),
    "coat": ("coat_tiny", {}),
    "convit": ("convit_tiny", {}),
    "convmixer": ("convmixer_768_32", {}),
    "convnext": ("test_convnext", {}),
    "cpubone": ("cpubone_nano", {}),
    "crossvit": ("crossvit_tiny_240", {}),
    "csatv2": ("csatv2", {}),
    "cspnet": ("cs3darknet_focus_s", {}),
    "cspnext": ("cspnext_tiny", {}),
    "davit": ("davit_tiny", {"depths": (1, 1, 2, 1), "embed_dims": (48, 96, 192, 384)}),
    "deepseek_vit": ("deepseek_vit_412m", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "deit": ("deit_tiny_patch16_224", {}),
    "densenet": ("densenet121", {}),
    "dla": ("dla46x_c", {}),
    "dpn": ("dpn48b", {}),
    "edgenext": ("edgenext_xx_small", {}),
    "efficientformer": ("efficientformer_l1", {}),
    "efficientformer_v2": ("efficientformerv2_s0", {}),
    "efficientnet": ("test_efficientnet", {}),
    "efficientvim": ("efficientvim_m1", {}),
    "efficientvit_mit": ("efficientvit_b0", {}),
    "efficientvit_msra": ("efficientvit_m0", {}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", {}),
    "fasternet": ("fasternet_t0", {}),
    "fastvit": ("fastvit_t8", {}),
    "focalnet": ("focalnet_tiny_srf", {}),
    "gcvit": ("gcvit_xxtiny", {}),
    "gemma4_vit": ("gemma4_vit_167m", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "ghostnet": ("ghostnet_050", {}),
    "hardcorenas": ("hardcorenas_b", {}),
    "hgnet": ("hgnetv2_b0", {}),
    "hiera": ("hiera_tiny_224", {"stages": (1, 1, 2, 1), "embed_dim": 48}),
    "hieradet_sam2": ("sam2_hiera_tiny", {"stages": (1, 1, 2, 1), "embed_dim": 48, "global_att_blocks": (3,)}),
    "hrnet": ("hrnet_w18_small", {}),
    "iformer": ("iformer_t", {}),
    "inception_next": ("inception_next_atto", {}),
    "inception_resnet_v2": ("inception_resnet_v2", {}),
    "inception_v3": ("inception_v3", {}),
    "inception_v4": ("inception_v4", {}),
    "lcnetv2": ("lcnetv2_small", {}),
    "levit": ("levit_128s", {}),
    "lowformer": ("lowformer_b0", {}),
    "mambaout": ("test_mambaout", {}),
    "maxxvit": ("test_coatnet", {}),
    "metaformer": ("poolformerv2_s12", {}),
    "mlp_mixer": ("gmlp_ti16_224", {}),
    "mobilenetv3": ("mobilenetv3_small_050", {}),
    "mobilenetv5": ("mobilenetv5_base", {}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mvitv2": ("mvitv2_tiny", {}),
    "naflexvit": ("naflexvit_base_patch16_parfac_gap", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "nasnet": ("nasnetalarge", {}),
    "nest": ("nest_tiny", {}),
    "nextvit": ("nextvit_small", {}),
    "nfnet": ("nf_regnet_b0", {}),
    "pit": ("pit_ti_224", {}),
    "pnasnet": ("pnasnet5large", {}),
    "pvt_v2": ("pvt_v2_b0", {}),
    "qwen3_vit": ("qwen3_vit_88m", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "rdnet": ("rdnet_tiny", {}),
    "regnet": ("regnetx_002", {}),
    "repghost": ("repghostnet_050", {}),
    "repvit": ("repvit_m1", {}),
    "res2net": ("res2next50", {}),
    "resnest": ("resnest14d", {}),
    "resnet": ("test_resnet", {}),
    "resnetv2": ("resnetv2_18", {}),
    "rexnet": ("rexnet_100", {}),
    "selecsls": ("selecsls42", {"num_classes": 10}),
    "senet": ("legacy_seresnet18", {}),
    "sequencer": ("sequencer2d_s", {}),
    "shvit": ("shvit_s1", {}),
    "sknet": ("skresnet18", {}),
    "starnet": ("starnet_s050", {}),
    "swiftformer": ("swiftformer_xs", {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 2, 1), "embed_dim": 48}),
    "swin_transformer_v2": ("swinv2_tiny_window16_256", {"depths": (1, 1, 2, 1), "embed_dim": 48}),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", {"depths": (1, 1, 2, 1), "embed_dim": 48}),
    "tiny_vit": ("tiny_vit_5m_224", {}),
    "tnt": ("tnt_s_legacy_patch16_224", {"depth": 4}),
    "tresnet": ("tresnet_m", {}),
    "twins": ("twins_svt_small", {}),
    "vgg": ("vgg16", {"num_classes": 10, "mlp_ratio": 0.02}),
    "visformer": ("visformer_tiny", {}),
    "vision_transformer": ("test_vit", {}),
    "vision_transformer_hybrid": ("vit_small_r26_s32_224", {}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", {"depth": 4, "embed_dim": 192, "num_heads": 3}),
    "vision_transformer_sam": ("samvit_base_patch16_224", {"depth": 3, "embed_dim": 192, "num_heads": 3}),
    "vitamin": ("vitamin_small_224", {"depth": 2}),
    "volo": ("volo_d1_224", {}),
    "vovnet": ("ese_vovnet19b_slim_dw", {}),
    "xception": ("legacy_xception", {}),
    "xception_aligned": ("xception41p", {}),
    "xcit": ("xcit_nano_12_p8_224", {}),
}
# Instead of two images of the model's own size: enough activations to plan, and no more computing than that takes.
_TIMM_SHAPES = {
    "byobnet": (4, 3, 160, 160),
    "convmixer": (2, 3, 112, 112),
    "convnext": (2, 3, 160, 160),
    "cpubone": (8, 3, 160, 160),
    "csatv2": (2, 3, 256, 256),
    "densenet": (2, 3, 128, 128),
    "dla": (2, 3, 128, 128),
    "efficientvim": (8, 3, 224, 224),
    "efficientvit_msra": (8, 3, 224, 224),
    "inception_resnet_v2": (8, 3, 192, 192),
    "inception_v4": (4, 3, 224, 224),
    "levit": (8, 3, 224, 224),
    "lowformer": (8, 3, 224, 224),
    "mobilenetv5": (2, 3, 256, 256),
    "nfnet": (4, 3, 192, 192),
    "nasnet": (4, 3, 192, 192),
    "pnasnet": (2, 3, 192, 192),
    "repvit": (2, 3, 160, 160),
    "selecsls": (8, 3, 224, 224),
    "shvit": (8, 3, 224, 224),
    "tresnet": (4, 3, 224, 224),
    "vgg": (8, 3, 112, 112),
    "vision_transformer_hybrid": (8, 3, 224, 224),
    "xception": (2, 3, 160, 160),
    "xception_aligned": (2, 3, 160, 160),
}

_TORCHVISION: dict[str, tuple[str, tuple[int, ...], Arguments]] = {
    "alexnet": ("alexnet", (32, 3, 128, 128), {"num_classes": 10}),
    "convnext": ("convnext_tiny", (8, 3, 128, 128), {}),
    "densenet": ("densenet121", (4, 3, 96, 96), {}),
    "efficientnet": ("efficientnet_b0", (4, 3, 96, 96), {}),
    "googlenet": ("googlenet", (4, 3, 128, 128), {"init_weights": False}),
    "inception": ("inception_v3", (4, 3, 299, 299), {"init_weights": False}),
    "maxvit": ("maxvit_t", (4, 3, 224, 224), {}),
    "mnasnet": ("mnasnet0_5", (8, 3, 128, 128), {"num_classes": 10}),
    "mobilenetv2": ("mobilenet_v2", (4, 3, 96, 96), {}),
    "mobilenetv3": ("mobilenet_v3_small", (4, 3, 128, 128), {}),
    "regnet": ("regnet_y_400mf", (4, 3, 96, 96), {}),
    "resnet": ("resnet18", (8, 3, 128, 128), {}),
    "shufflenetv2": ("shufflenet_v2_x0_5", (8, 3, 160, 160), {"num_classes": 10}),
    "squeezenet": ("squeezenet1_1", (4, 3, 96, 96), {}),
    "swin_transformer": ("swin_t", (4, 3, 224, 224), {}),
    "vgg": ("vgg16", (8, 3, 112, 112), {"num_classes": 10}),
    "vision_transformer": ("vit_b_16", (4, 3, 224, 224), {}),
    "segmentation.deeplabv3": ("deeplabv3_mobilenet_v3_large", (2, 3, 160, 160), {"weights_backbone": None}),
    "segmentation.fcn": ("fcn_resnet50", (4, 3, 160, 160), {"weights_backbone": None}),
    "segmentation.lraspp": ("lraspp_mobilenet_v3_large", (4, 3, 160, 160), {"weights_backbone": None}),
    "video.mvit": ("mvit_v2_s", (2, 3, 16, 224, 224), {}),
    "video.resnet": ("mc3_18", (2, 3, 8, 64, 64), {}),
    "video.s3d": ("s3d", (1, 3, 16, 224, 224), {}),
    "video.swin_transformer": ("swin3d_t", (2, 3, 8, 112, 112), {}),
}


_OPTIMIZERS = {"alexnet": "sgd", "vgg16": "sgd"}  # their linear layers hold nearly everything, whatever they are fed


def _without(arguments: Arguments) -> Arguments:
    """Less those that a model type takes no value for, which the table gives as ``...``."""
    return {name: value for name, value in arguments.items() if value is not ...}


ZOO = (
    *[Entry("timm", family, name, _TIMM_SHAPES.get(family, ()), args) for family, (name, args) in _TIMM.items()],
    *[
        Entry("torchvision", family, name, shape, args, _OPTIMIZERS.get(name, "adamw"))
        for family, (name, shape, args) in _TORCHVISION.items()
    ],
    *[
        Entry("transformers", family, head, inputs, _without({**shared, **arguments}))
        for head, inputs, shared, families in TRANSFORMERS
        for family, arguments in families.items()
    ],
    *[Entry("diffusers", name, name, (), arguments) for name, (arguments, _) in DIFFUSERS.items()],
)
