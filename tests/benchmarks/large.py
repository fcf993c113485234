"""Seconds and memory of the host that ``estimate`` takes for a Llama of 70 billion parameters, spread over a mesh.

    python -m tests.benchmarks.large [--mesh fsdp=1024] [--layers 80] [--memory 80GB] [--tiny]
    python -m tests.benchmarks.large --mesh fsdp=64,tp=8

The model, of bfloat16 on the meta device, takes one text of 8,192 tokens in each process, and is planned for CUDA
without using it. With ``--memory`` it is also looked for what would fit. ``digest`` is one of all that the estimate
says: what makes it faster leaves that as it is.
"""

import argparse
import hashlib
import resource
import time

import torch

import memrewrite
from tests.benchmarks.language import decoder, llama

_LENGTH, _VOCABULARY = 8192, 128256
_WIDER = {"intermediate_size": 28672, "num_key_value_heads": 8, "tie_word_embeddings": False}  # than ``decoder`` says


def figures(mesh: str, layers: int, memory: str | None, tiny: bool) -> str:
    """The line of one estimate."""
    sizes = decoder(tiny, 8192, layers, 64, _VOCABULARY) | ({} if tiny else _WIDER)
    with torch.device("meta"):
        model = llama(sizes, _LENGTH).bfloat16()
        tokens = torch.zeros(1, 16 if tiny else _LENGTH, dtype=torch.long)
    wall, process = time.perf_counter(), time.process_time()
    found = memrewrite.estimate(
        model, tokens, example_kwargs={"labels": tokens}, mesh=mesh, device="cuda", device_memory=memory
    )
    wall, process = time.perf_counter() - wall, time.process_time() - process
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
    return (
        f"{parameters:.1f}B on {mesh}: {wall:.1f} s ({process:.1f} s of the process), {host:.2f} GiB of the host, "
        f"peak {found.peak.bytes / 1e9:.2f} GB, digest {digest}"
    )


def main() -> int:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description="Seconds and memory of the host for an estimate of a large model.")
    parser.add_argument("--mesh", default="fsdp=1024", help="as estimate takes it")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--memory", help="of a device, as estimate takes it")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same family")
    asked = parser.parse_args()
    print(figures(asked.mesh, asked.layers, asked.memory, asked.tiny))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
