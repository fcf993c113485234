"""Language models with random weights as the benchmarks train them; ``tiny`` as in ``models``.

Sizes are those of the models that are named, from their published configurations; nothing is downloaded.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memrewrite.workload.step import Inputs
from tests.benchmarks.workload import Workload

_TINY_VOCABULARY, _TINY_LENGTH = 97, 16
_CHUNKS = 8  # of a loss, as in torchtune


def _sized(name: str, tiny: bool, small: dict[str, Any], large: dict[str, Any]) -> nn.Module:
    """The model of transformers' ``<name>`` with the options of its size."""
    import transformers

    kind = getattr(transformers, name)
    return cast(nn.Module, kind(kind.config_class(**(small if tiny else large))))


def _gpt2(tiny: bool) -> nn.Module:
    small = {"vocab_size": _TINY_VOCABULARY, "n_positions": _TINY_LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 2}
    large = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    return _sized("GPT2LMHeadModel", tiny, small | {"use_cache": False}, large | {"use_cache": False})


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


def _qwen3(tiny: bool) -> nn.Module:
    """The sizes of Qwen3 0.6B."""
    small = decoder(tiny, 1024, 28, 16, 151936)
    large = small | {"intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128}
    return _sized("Qwen3ForCausalLM", tiny, small | {"head_dim": 8}, large)


def _gemma3(tiny: bool) -> nn.Module:
    """The sizes of Gemma 3 1B: a window in five of six layers, and a quarter of a million words."""
    small = decoder(tiny, 1152, 26, 4, 262144) | {"pad_token_id": 0}
    return _sized("Gemma3ForCausalLM", tiny, small | {"head_dim": 8}, small | {"intermediate_size": 6912})


def _phi3(tiny: bool) -> nn.Module:
    """A Phi-3 of 1.7 billion parameters: gates and values of its MLPs come of one product."""
    small = decoder(tiny, 2048, 24, 32, 32064) | {"tie_word_embeddings": False, "pad_token_id": 0}
    return _sized("Phi3ForCausalLM", tiny, small, small | {"num_key_value_heads": 32})


def _modernbert(tiny: bool) -> nn.Module:
    """ModernBERT-base, whose head predicts every word."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return _sized("ModernBertForMaskedLM", tiny, {"vocab_size": _TINY_VOCABULARY} | sizes | tokens, {})


def _t5(tiny: bool) -> nn.Module:
    """T5 v1.1 large: 0.78 billion parameters, gated MLPs, another matrix for the head."""
    small = {"vocab_size": _TINY_VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    large = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16}
    more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "use_cache": False}
    more |= {"decoder_start_token_id": 0}
    return _sized("T5ForConditionalGeneration", tiny, small | more, large | more)


def _whisper(tiny: bool) -> nn.Module:
    """Whisper small: 0.24 billion parameters, 30 s of sound."""
    size, layers, heads = (32, 2, 2) if tiny else (768, 12, 12)
    each = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * size}
    sizes = {f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in each.items()}
    sizes |= {"d_model": size, "use_cache": False}
    small = {"vocab_size": _TINY_VOCABULARY, "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 0}
    small |= {"eos_token_id": 0, "decoder_start_token_id": 0, "max_target_positions": _TINY_LENGTH}
    return _sized("WhisperForConditionalGeneration", tiny, small | sizes, sizes)


def _in_bf16(build: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
    return lambda tiny: build(tiny).bfloat16()


def _words(batch: int, tiny: bool, length: int, vocabulary: int) -> Tensor:
    return torch.randint(_TINY_VOCABULARY if tiny else vocabulary, (batch, _TINY_LENGTH if tiny else length))


def tokens(length: int, vocabulary: int) -> Callable[[int, bool], Inputs]:
    """Makes texts of ``length`` tokens that are to be continued, filled in, or answered by a text like them."""

    def inputs(batch: int, tiny: bool) -> Inputs:
        words = _words(batch, tiny, length, vocabulary)
        return Inputs((), {"input_ids": words, "labels": words})

    return inputs


def _sound(batch: int, tiny: bool) -> Inputs:
    features = torch.randn(batch, 80, 32 if tiny else 3000, dtype=torch.bfloat16)
    return Inputs((), {"input_features": features, "labels": _words(batch, tiny, 448, 51865)})


def _by_transformers(model: nn.Module) -> None:
    cast(Any, model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def base_of(model: nn.Module) -> Any:
    """The model of transformers' itself, without the adapters around it."""
    return cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model


def loss_apart(inputs: Inputs) -> tuple[Inputs, Callable[[Any], Tensor]]:
    """The inputs without the labels, and the loss of the next tokens as a loop computes it of the model's output."""
    given = dict(inputs.kwargs)
    targets = given.pop("labels")[:, 1:].flatten()

    def loss_fn(output: Any) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), targets)

    return Inputs(inputs.args, given), loss_fn


def chunk_loss(model: nn.Module) -> None:
    """Let a causal language model take its loss in chunks of rows, in place.

    Each chunk's logits are made in its own checkpoint, so that only one chunk's exist at a time: the way of
    torchtune's ``LinearCrossEntropyLoss`` and TRL's chunked loss, without a kernel.
    """
    inner = base_of(model)
    head, inner.lm_head = inner.lm_head, nn.Identity()
    inner.loss_function = _ChunkedLoss(head)


class _ChunkedLoss:
    """What transformers' models call with their logits, here with what the head would have been given."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head

    def __call__(self, logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        parts = sum(self._parts(logits.flatten(0, 1), targets))
        return parts / (targets != -100).sum()

    def _parts(self, rows: Tensor, targets: Tensor) -> Iterator[Tensor]:
        for pair in zip(rows.chunk(_CHUNKS), targets.chunk(_CHUNKS), strict=True):
            yield cast(Tensor, checkpoint(self._part, *pair, use_reentrant=False))

    def _part(self, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(rows).float(), targets, reduction="sum")


_LAYERS = r"model\.layers\.\d+"
_BF16: dict[str, Any] = {"checkpoint_blocks": _by_transformers, "optimizer": "adamw-fused", "returns": "loss"}


def _causal(
    build: Callable[[bool], nn.Module], batch: int, length: int, vocabulary: int, blocks: str = _LAYERS
) -> Workload:
    return Workload(build, tokens(length, vocabulary), batch, blocks, samples=length, chunk_loss=chunk_loss, **_BF16)


GPT2 = Workload(
    _gpt2,
    tokens(1024, 50257),
    batch=8,
    blocks=r"transformer\.h\.\d+",
    checkpoint_blocks=_by_transformers,
    amp="bf16",
    samples=1024,
)

LANGUAGE: dict[str, Workload] = {
    "gpt2_medium": GPT2,
    "llama_1b": Workload(
        _llama,
        tokens(2048, 128256),
        batch=4,
        blocks=_LAYERS,
        checkpoint_blocks=_by_transformers,
        amp="bf16",
        samples=2048,
    ),
    **{
        f"llama_1b-{length}": _causal(
            _in_bf16(lambda tiny, length=length: _llama(tiny, length)),  # type: ignore[misc]
            batch,
            length,
            128256,
        )
        for length, batch in ((2048, 2), (4096, 2), (16384, 1), (65536, 1))
    },
    "qwen3_lora": _causal(_lora, 2, 4096, 151936, r"base_model\.model\.model\.layers\.\d+"),
    "qwen3_600m": _causal(_in_bf16(_qwen3), 2, 4096, 151936),
    "gemma3_1b": _causal(_in_bf16(_gemma3), 2, 2048, 262144),
    "phi3_1b": _causal(_in_bf16(_phi3), 2, 4096, 32064),
    "gpt2_medium-bf16": _causal(_in_bf16(_gpt2), 8, 1024, 50257, GPT2.blocks),
    "modernbert": Workload(_in_bf16(_modernbert), tokens(1024, 50368), 16, "", samples=1024, **_BF16),
    "t5_large": Workload(_in_bf16(_t5), tokens(512, 32128), 8, "", samples=512, **_BF16),
    "whisper_small": Workload(_in_bf16(_whisper), _sound, 16, "", samples=448, **_BF16),
}
