"""The lowest peak of language models with and without the logits that they return beside their loss.

    python -m tests.benchmarks.heads [gpt2 llama gemma2]

Two layers of 256, vocabularies as they are, 4 x 256 tokens, AdamW, float32, simulated and verified on the CPU.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memrewrite
from memrewrite.records.options import short_bytes
from tests.zoo.models import declare_operators

ROWS, LENGTH = 4, 256
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2(transformers: Any) -> nn.Module:
    """GPT-2: its head's weight is that of the words."""
    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama(transformers: Any) -> nn.Module:
    """Llama 3's vocabulary."""
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, vocab_size=128256, use_cache=False)
    )
    return model


def gemma2(transformers: Any) -> nn.Module:
    """Gemma 2, which caps its logits."""
    options = {"num_key_value_heads": 2, "head_dim": 64, "use_cache": False}
    model: nn.Module = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **options))
    return model


MODELS: tuple[Callable[[Any], nn.Module], ...] = (gpt2, llama, gemma2)


def main() -> int:
    """Print a line for each."""
    declare_operators()
    import transformers

    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    asked = sys.argv[1:] or [build.__name__ for build in MODELS]
    for build in (each for each in MODELS if each.__name__ in asked):
        torch.manual_seed(0)
        model = build(transformers).train()
        tokens = torch.randint(50257, (ROWS, LENGTH))
        given: dict[str, Any] = {
            "example_kwargs": {"input_ids": tokens, "labels": tokens},
            "budget": "min",
            "cache": False,
        }
        found = [memrewrite.optimize(model, (), **given, returns=each).report for each in ("all", "loss")]
        peaks = [found[0].predicted_before.peak, *(report.predicted_after.peak for report in found)]
        original, everything, loss = map(short_bytes, peaks)
        print(f"{build.__name__}: original {original}, lowest {everything}, with returns='loss' {loss}", flush=True)
        print(f"  {found[1].verdict}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
