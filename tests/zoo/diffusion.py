"""Small configurations of diffusers models, as a table: class, arguments, and the shapes of what forward is given.

A shape stands for random numbers, an int for a timestep per sample, ``...`` for one of ten classes.
"""

from typing import Any

import torch
from torch import Tensor

from tests.zoo.architectures import Arguments

BATCH = 2
_BLOCKS: Arguments = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_UNET: Arguments = {
    **_BLOCKS,
    "sample_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
_CODER: Arguments = {
    **_BLOCKS,
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "latent_channels": 4,
    "sample_size": 32,
}
_TRANSFORMER: Arguments = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "num_layers": 3,
    "sample_size": 16,
    "patch_size": 2,
}
_IMAGE, _LATENT, _TEXT = (3, 32, 32), (4, 16, 16), (8, 32)

DIFFUSERS: dict[str, tuple[Arguments, dict[str, Any]]] = {
    "UNet2DModel": (
        {
            **_BLOCKS,
            "sample_size": 32,
            "attention_head_dim": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": _IMAGE, "timestep": 1000},
    ),
    "UNet2DConditionModel": (
        {
            **_UNET,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        {"sample": _IMAGE, "timestep": 1000, "encoder_hidden_states": _TEXT},
    ),
    "UNet3DConditionModel": (
        {
            **_UNET,
            "down_block_types": ("DownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "UpBlock3D"),
        },
        {"sample": (3, 4, 16, 16), "timestep": 1000, "encoder_hidden_states": _TEXT},
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "sample_size": 256,
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 32,
            "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
            "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
        },
        {"sample": (2, 256), "timestep": 1000},
    ),
    "AutoencoderKL": (_CODER, {"sample": _IMAGE}),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        {"sample": _IMAGE},
    ),
    "VQModel": ({**_CODER, "num_vq_embeddings": 32}, {"sample": _IMAGE}),
    "DiTTransformer2DModel": (
        {**_TRANSFORMER, "sample_size": 32, "norm_num_groups": 8, "num_embeds_ada_norm": 10},
        {"hidden_states": (4, 32, 32), "timestep": 1000, "class_labels": ...},
    ),
    "PixArtTransformer2DModel": (
        {**_TRANSFORMER, "cross_attention_dim": 64, "caption_channels": 32},
        {"hidden_states": _LATENT, "timestep": 1000, "encoder_hidden_states": _TEXT},
    ),
    "SD3Transformer2DModel": (
        {
            **_TRANSFORMER,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        {"hidden_states": _LATENT, "timestep": 1000, "encoder_hidden_states": _TEXT, "pooled_projections": (32,)},
    ),
}


def given(shapes: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments of forward that these shapes describe."""
    return {name: _tensor(shape) for name, shape in shapes.items()}


def _tensor(shape: Any) -> Tensor:
    if isinstance(shape, tuple):
        return torch.randn(BATCH, *shape)
    return torch.randint(10 if shape is ... else shape, (BATCH,))
