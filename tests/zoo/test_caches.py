"""``pytest -m zoo tests/zoo/test_caches.py``: caches of keys and values that a model is given, of every kind.

The caller's cache stays as it is while memrewrite runs the model, and what a result is given it writes as the original.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memrewrite

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
SIZES: dict[str, dict[str, int]] = {
    "GPT2": {"n_layer": 2, "n_head": 2, "n_embd": 32},
    "Llama": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
    "T5": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_kv": 16, "d_ff": 64, "decoder_start_token_id": 0},
}
NEW: dict[str, Callable[[Any, Any], Any]] = {
    "dynamic": lambda library, config: library.DynamicCache(config=config),
    "filled": lambda library, config: filled(library.DynamicCache(config=config)),
    "static": lambda library, config: library.StaticCache(config=config, max_cache_len=24),
    "filled static": lambda library, config: filled(library.StaticCache(config=config, max_cache_len=24)),
    "of both": lambda library, config: library.EncoderDecoderCache(*(library.DynamicCache() for _ in range(2))),
}
CASES = [
    *((name, kind) for name in ("GPT2", "Llama") for kind in ("dynamic", "filled", "static", "filled static")),
    ("T5", "of both"),
]


def filled(cache: Any) -> Any:
    draw = torch.Generator().manual_seed(3)
    for number in range(2):
        cache.update(*(torch.randn(2, 2, 5, 16, generator=draw) for _ in range(2)), number)
    return cache


def built(name: str) -> tuple[Any, nn.Module]:
    from tests.zoo import libraries

    library: Any = libraries.transformers
    library.logging.set_verbosity_error()
    kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM" if name == "Llama" else "LMHeadModel"
    config = getattr(library, f"{name}Config")(vocab_size=60, **SIZES[name])
    return library, getattr(library, f"{name}{kind}")(config)


def contents(value: Any) -> Any:
    """All that a cache holds."""
    if isinstance(value, Tensor):
        return type(value), value.tolist()
    if isinstance(value, list | tuple):
        return [contents(each) for each in value]
    if type(value).__module__ == "transformers.cache_utils":
        return {name: contents(each) for name, each in vars(value).items()}
    return repr(value)


@pytest.mark.parametrize("train", [True, False], ids=["train", "inference"])
@pytest.mark.parametrize(("name", "kind"), CASES, ids=" ".join)
def test_a_cache_is_written_by_the_caller_s_calls_alone(name: str, kind: str, train: bool) -> None:
    torch.manual_seed(0)
    library, model = built(name)
    model.train(train)
    ids = torch.randint(60, (2, 12))
    cache, expected = (NEW[kind](library, model.config) for _ in range(2))
    options: dict[str, Any] = {"example_kwargs": {"labels": ids, "past_key_values": cache, "use_cache": True}}
    result = memrewrite.optimize(model, ids, budget="min", exact=True, **options)
    assert memrewrite.measure(result, ids, **options).peak == result.report.predicted_after.peak
    assert memrewrite.estimate(model, ids, **options).peak.bytes == memrewrite.measure(model, ids, **options).peak
    assert memrewrite.verify(model, result, ids, exact=True, **options).equivalent
    assert contents(cache) == contents(expected)
    given = [taken(each, ids, NEW[kind](library, model.config)) for each in (model, result)]
    assert contents(given[0][1]) == contents(given[1][1]) != contents(expected)
    assert all(map(torch.equal, given[0][0], given[1][0]))


def taken(model: nn.Module, ids: Tensor, cache: Any) -> tuple[list[Tensor], Any]:
    """Loss, logits and gradients of a step with a cache, and that cache."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(model.training):
        output = model(ids, labels=ids, past_key_values=cache, use_cache=True)
    if model.training:
        output.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.loss.detach(), output.logits.detach(), *gradients], cache
