"""A plain training loop on random data that runs a model rewritten beforehand.

    bash examples/quickstart.sh                  # or memrewrite optimize examples/efficientnet.py ... -o out
    python examples/train_with_artifact.py out

The artifact is Python that needs torch alone; the line with ``apply`` is the only one that knows of it.
"""

import argparse
import sys
import time

import torch
from efficientnet import get_model
from torch.nn import functional


def main() -> None:
    parser = argparse.ArgumentParser(description="Train EfficientNet-B0 on random images with an artifact applied.")
    parser.add_argument("artifact", help="the folder that memrewrite optimize wrote")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=96, help="of the images, as the artifact was made for")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    sys.path.insert(0, options.artifact)
    from memrewrite_model import apply

    model = apply(get_model().to(options.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        images = torch.randn(options.batch_size, 3, options.size, options.size, device=options.device)
        labels = torch.randint(model.classifier.out_features, (options.batch_size,), device=options.device)
        started = time.perf_counter()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.2f} s")
    if options.device.startswith("cuda"):
        print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
