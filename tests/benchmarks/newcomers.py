"""Models as a newcomer would try them first, each at 60 % of its peak, verified and measured, in a process of its own.

Where no plan reaches that, or the models are tiny, they go to their lowest peak instead.

    python -m tests.benchmarks.newcomers newcomers.jsonl            # on CUDA, sizes of a few GB
    python -m tests.benchmarks.newcomers newcomers.jsonl --tiny     # the same models on the CPU, minutes
    python -m tests.benchmarks.newcomers newcomers.jsonl --models T5 Whisper

A row says what became of each: budget, predicted and measured peak and the verdict, or the sentence of the refusal.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.options import short_bytes
from tests.benchmarks.attempts import each_in_a_process
from tests.benchmarks.rows import machine
from tests.zoo.models import declare_operators

BUDGET = "60%"
Made = tuple[nn.Module, dict[str, Any], dict[str, Any]]  # the model, forward's arguments, what optimize takes besides


def _latents(batch: int, *size: int) -> Tensor:
    return torch.randn(batch, *size)


def _unet(tiny: bool) -> Made:
    from diffusers import UNet2DConditionModel

    small = {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 32, "sample_size": 16}
    model = UNet2DConditionModel(**small) if tiny else UNet2DConditionModel()
    batch, side, text = (2, 16, (8, 32)) if tiny else (16, 64, (77, 1280))
    given = {"sample": _latents(batch, 4, side, side), "timestep": torch.randint(1000, (batch,))}
    return model, {**given, "encoder_hidden_states": torch.randn(batch, *text)}, {}


def _autoencoder(tiny: bool) -> Made:
    from diffusers import AutoencoderKL

    widths = (32, 64) if tiny else (128, 256, 512, 512)
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1 if tiny else 2,
    )
    return model, {"sample": torch.randn(2, 3, *((32, 32) if tiny else (256, 256)))}, {}


def _sd3(tiny: bool) -> Made:
    from diffusers import SD3Transformer2DModel

    heads, layers, side, text, width = (2, 2, 16, 8, 32) if tiny else (12, 12, 64, 154, 4096)
    model = SD3Transformer2DModel(
        sample_size=side,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=64,
        joint_attention_dim=width,
        caption_projection_dim=heads * 64,
        pooled_projection_dim=width // 2,
        pos_embed_max_size=side,
    )
    batch = 2 if tiny else 12
    given = {"hidden_states": _latents(batch, 16, side, side), "timestep": torch.randint(1000, (batch,))}
    texts = {"encoder_hidden_states": torch.randn(batch, text, width)}
    return model, {**given, **texts, "pooled_projections": torch.randn(batch, width // 2)}, {}


def _flux(tiny: bool) -> Made:
    from diffusers import FluxTransformer2DModel

    heads, layers, image, text, width = (2, 1, 16, 8, 32) if tiny else (12, 4, 1024, 256, 4096)
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=layers,
        num_single_layers=2 * layers,
        attention_head_dim=128,
        num_attention_heads=heads,
        joint_attention_dim=width,
        pooled_projection_dim=768,
    )
    batch = 2 if tiny else 16
    given = {"hidden_states": torch.randn(batch, image, 64), "encoder_hidden_states": torch.randn(batch, text, width)}
    given |= {"pooled_projections": torch.randn(batch, 768), "timestep": torch.rand(batch)}
    places = {"img_ids": torch.randn(image, 3), "txt_ids": torch.zeros(text, 3)}
    return model, {**given, **places}, {}


def _dit(tiny: bool) -> Made:
    from diffusers import DiTTransformer2DModel

    heads, layers, side = (2, 2, 16) if tiny else (16, 12, 32)
    model = DiTTransformer2DModel(num_attention_heads=heads, num_layers=layers, sample_size=side, in_channels=4)
    batch = 2 if tiny else 48
    classes, times = torch.randint(1000, (batch,)), torch.randint(1000, (batch,))
    return model, {"hidden_states": _latents(batch, 4, side, side), "timestep": times, "class_labels": classes}, {}


def _tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _t5(tiny: bool) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, vocabulary = (64, 2, 128) if tiny else (768, 12, 32128)
    size = {"d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_heads": width // 64}
    config = T5Config(**size, vocab_size=vocabulary, use_cache=False, decoder_start_token_id=0)
    ids = _tokens(vocabulary, *((2, 16) if tiny else (16, 512)))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, {"amp": "bf16"}


def _modernbert(tiny: bool) -> Made:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = ModernBertConfig(**({**small, "vocab_size": 128, "pad_token_id": 0} if tiny else {}))
    config.cls_token_id = config.bos_token_id = config.sep_token_id = config.eos_token_id = 1
    ids = _tokens(config.vocab_size, *((2, 16) if tiny else (32, 512)))
    return ModernBertForMaskedLM(config), {"input_ids": ids, "labels": ids}, {"amp": "bf16"}


def _whisper(tiny: bool) -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers = (64, 2) if tiny else (768, 12)
    frames, words, batch = (32, 8, 2) if tiny else (1500, 448, 8)
    config = WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames,
        use_cache=False,
    )
    given = {"input_features": torch.randn(batch, config.num_mel_bins, 2 * frames)}
    labels = _tokens(config.vocab_size, batch, words)
    return WhisperForConditionalGeneration(config), {**given, "labels": labels}, {"amp": "bf16"}


def _timm(name: str, batch: int) -> Callable[[bool], Made]:
    def make(tiny: bool) -> Made:
        import timm

        size = (2, 3, 64, 64) if tiny else (batch, 3, 224, 224)
        return timm.create_model(name), {"x": torch.randn(size)}, {}

    return make


MODELS: dict[str, Callable[[bool], Made]] = {
    "UNet2DConditionModel": _unet,
    "AutoencoderKL": _autoencoder,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "DiTTransformer2DModel": _dit,
    "T5": _t5,
    "ModernBERT": _modernbert,
    "Whisper": _whisper,
    "regnety_160": _timm("regnety_160", 64),
    "mobilenetv3_large_100": _timm("mobilenetv3_large_100", 512),
}


def attempt(name: str, tiny: bool) -> dict[str, Any]:
    """What became of one model in this process: figures in bytes and seconds, or the sentence it was refused with."""
    torch.manual_seed(0)
    if tiny:
        declare_operators()  # for a torchvision that was installed beside a PyTorch without CUDA
    device = torch.device("cpu" if tiny else "cuda")
    model, given, options = MODELS[name](tiny)
    options |= {"optimizer": "none"} if tiny else {}  # whose step would take more than all else
    model = model.to(device).train()
    given = {key: value.to(device) for key, value in given.items()}
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "tiny": tiny, "ok": False, **machine(device)}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        plan = planned(model, given, "min" if tiny else BUDGET, options)  # small models are mostly parameters
        row["seconds"] = time.perf_counter() - start
        measured = memrewrite.measure(plan, (), example_kwargs=given, **options)
        before = memrewrite.measure(model, (), example_kwargs=given, **options)
    except memrewrite.MemrewriteError as error:
        seconds = time.perf_counter() - start
        return {**row, "seconds": seconds, "note": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    report = memrewrite.report_of(plan)
    return {
        **row,
        "ok": True,
        "budget": report.budget or report.predicted_after.peak,
        "predicted": report.predicted_after.peak,
        "peak": measured.peak,
        "original": before.peak,
        "ms": measured.step_ms,
        "original_ms": before.step_ms,
        "verdict": report.verdict,
        "note": " ".join(report.notes),
    }


def planned(model: nn.Module, given: dict[str, Any], budget: str, options: dict[str, Any]) -> Any:
    """The model within a budget, or little above its lowest peak."""
    options = {"verify": True, "cache": False, **options}
    try:
        return memrewrite.optimize(model, (), example_kwargs=given, budget=budget, **options)
    except memrewrite.BudgetInfeasibleError as error:
        lowest = int(1.02 * error.lowest)
        return memrewrite.optimize(model, (), example_kwargs=given, budget=lowest, **options)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    figures = "  ".join(f"{key} {short_bytes(row[key]):>9s}" for key in ("original", "budget", "predicted", "peak"))
    within = "within" if row["peak"] <= row["budget"] else "OVER"
    return f"{row['model']:24s} {row['seconds']:6.0f} s  {figures}  {within}, {row['verdict']}"


if __name__ == "__main__":
    each_in_a_process(__spec__.name, __doc__, MODELS, attempt, line)
