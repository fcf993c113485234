"""Language models that train on batches of random sizes and lengths, within one plan.

Plain, with a mask of padding, with Liger's kernels, with peft's LoRA adapters, with both, with DoRA, with adapters over
4-bit weights of bitsandbytes (QLoRA), with a hook on every activation.

    python -m tests.benchmarks.texts rows.jsonl            # on CUDA
    python -m tests.benchmarks.texts rows.jsonl --tiny     # small ones on the CPU, without Liger

A row says whether any step was above the budget or ran the original forward, and whether loss and gradients have every
bit of the original's at four sizes; what the original does not repeat itself is told apart.
"""

import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import memrewrite
from memrewrite.records.options import short_bytes
from memrewrite.runtime.promise import FallbackWarning
from tests.benchmarks.attempts import each_in_a_process
from tests.benchmarks.newcomers import planned
from tests.benchmarks.rows import machine
from tests.zoo.models import declare_operators

BUDGET, STEPS = "60%", 200
MODELS = {
    "Llama": (),
    "Llama, padded": ("padded",),
    "Llama, Liger": ("liger",),
    "Llama, LoRA": ("lora",),
    "Llama, LoRA, Liger": ("lora", "liger"),
    "Llama, DoRA": ("lora", "dora"),
    "Llama, QLoRA": ("lora", "4bit"),
    "Llama, hooks": ("hooks",),
}


def build(traits: tuple[str, ...], tiny: bool) -> nn.Module:
    """A Llama with fewer heads of keys than of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if "liger" in traits:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    width, layers, words = (64, 3, 128) if tiny else (1024, 12, 32000)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if tiny else width // 64,
        num_key_value_heads=2 if tiny else 4,
        vocab_size=words,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if "4bit" in traits:
        _four_bits(model)
    if "hooks" in traits:
        for layer in model.get_submodule("model.layers").children():
            layer.get_submodule("mlp.act_fn").register_forward_hook(lambda module, args, output: None)
    if "lora" in traits:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, use_dora="dora" in traits)
        model = get_peft_model(model, adapters)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, whose gradients alone would not be
                nn.init.normal_(parameter, std=0.02)
    return model


def _four_bits(model: nn.Module) -> None:
    """Let the layers' products have weights of 4 bits, as transformers' ``load_in_4bit`` does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layers = model.get_submodule("model.layers")
    for path, linear in [(p, m) for p, m in layers.named_modules() if isinstance(m, nn.Linear)]:
        packed = Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        packed.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")  # packed as it is moved
        layers.set_submodule(path, packed)


def batch(words: int, padded: bool, device: torch.device, rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens; if ``padded``, texts of several lengths with a mask, and no loss where nothing is."""
    ids = torch.randint(words, (rows, length), device=device)
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.randint(1, length + 1, (rows, 1), device=device)
    mask = (torch.arange(length, device=device) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def attempt(name: str, tiny: bool) -> dict[str, Any]:
    """What became of one model in this process: figures in bytes and seconds."""
    if tiny:
        declare_operators()  # for a torchvision that was installed beside a PyTorch without CUDA
    torch.manual_seed(0)
    device, traits = torch.device("cpu" if tiny else "cuda"), MODELS[name]
    amp = None if tiny else "bf16"
    rows, length, words = (4, 48, 128) if tiny else (16, 512, 32000)
    model = build(traits, tiny).to(device).train()
    given = partial(batch, words, "padded" in traits, device)
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "tiny": tiny, "ok": False, **machine(device)}
    try:
        plan = planned(model, given(rows, length), BUDGET, {"amp": amp})
    except memrewrite.MemrewriteError as error:
        note = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return {**row, "seconds": time.perf_counter() - start, "note": note}
    row["seconds"], report = time.perf_counter() - start, plan.report
    row |= {"ok": True, "budget": report.budget, "original": report.predicted_before.peak, "verdict": report.verdict}
    row |= {"predicted": report.predicted_after.peak, "note": " ".join(report.notes)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FallbackWarning)
        row["repeats"], row["same"] = [], []
        for size in ((rows, length), (rows, length // 3), (rows // 2, length - 7), (2, 17)):
            tokens = given(*size)
            expected = taken(model, tokens, amp)
            row["repeats"].append(_same(expected, taken(model, tokens, amp)))
            row["same"].append(_same(expected, taken(plan, tokens, amp)))
            del expected
        model.zero_grad(set_to_none=True)
        row["peak"], row["requested"] = trained(plan, (given(*size) for size in _sizes(rows, length)), amp)
    row["fallbacks"] = [str(each.message) for each in told if issubclass(each.category, FallbackWarning)]
    return row


def _sizes(rows: int, length: int) -> list[tuple[int, ...]]:
    """The largest first, then others at random."""
    draw = torch.Generator().manual_seed(1)
    found: list[tuple[int, ...]] = [(rows, length)] * 2
    while len(found) < STEPS:
        found.append(tuple(int(torch.randint(2, most + 1, (), generator=draw)) for most in (rows, length)))
    return found


def taken(model: nn.Module, given: dict[str, Tensor], amp: str | None) -> list[Tensor]:
    """The loss and all gradients of a step."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(given["input_ids"].device.type, torch.bfloat16, enabled=amp is not None):
        loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def trained(model: nn.Module, batches: Iterable[dict[str, Tensor]], amp: str | None) -> tuple[int, int]:
    """The highest peak of steps on these batches, in the loop of PyTorch's tutorials; 0 where none is measured.

    Then the same without what blocks are larger than the tensors in them.
    """
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for given in batches:
        optimizer.zero_grad()
        with torch.autocast(given["input_ids"].device.type, torch.bfloat16, enabled=amp is not None):
            output = model(**given)
        output.loss.backward()
        optimizer.step()
    stats = torch.cuda.memory_stats() if cuda else {}
    return stats.get("allocated_bytes.all.peak", 0), stats.get("requested_bytes.all.peak", 0)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    figures = "  ".join(
        f"{key} {short_bytes(row[key]):>9s}" for key in ("original", "budget", "predicted", "peak", "requested")
    )
    within = "within" if row["peak"] <= row["budget"] else "OVER"
    same = f"bit-equal {sum(row['same'])} of {len(row['same'])} (itself {sum(row['repeats'])})"
    return (
        f"{row['model']:24s} {row['seconds']:6.0f} s  {figures}  {within} in {STEPS} steps, "
        f"{len(row['fallbacks'])} fallbacks, {same}; {row['verdict']}"
    )


if __name__ == "__main__":
    each_in_a_process(__spec__.name, __doc__, MODELS, attempt, line)
