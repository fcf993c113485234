"""A report with every field filled, for what shows or stores reports, and a net to make a real one of."""

import torch
from torch import Tensor, nn

from memrewrite.records.outcomes import Check, Curve, Measured, ModuleBytes, Peaks, PeaksBySize, Segment, Share
from memrewrite.records.report import Report

PHASES = (("data", 80_000_000), ("forward", 300_000_000), ("loss", 300_000_000), ("backward", 120_000_000))
MEASURED = Measured(310_000_000, 350_000_000, 12.5, PHASES, "NVIDIA H200 (cuda:0)")


def curve(scale: int) -> Curve:
    """Parameters that stay, activations that come and go; the peak, in ``blocks.1``, is ``12 * scale`` bytes."""
    return Curve(
        length=9,
        phases=(("data", 0), ("forward", 1), ("loss", 4), ("backward", 5), ("step", 8)),
        moments=(0, 1, 2, 3, 4, 5, 6, 8),
        bytes={
            "parameters": (2 * scale,) * 8,
            "activations": (0, 2 * scale, 6 * scale, 8 * scale, 8 * scale, 8 * scale, 2 * scale, 0),
            "temporaries": (0, 0, 0, 0, 0, 2 * scale, scale, 0),
        },
        makers=((None, "data ends"), ("blocks.0", "aten.mul.Tensor"), ("blocks.1", "aten.add.Tensor"), ("", "x")),
        made_by=(0, 1, 1, 2, 3, 2, 1, 0),
    )


def full_report() -> Report:
    """Everything there can be to say at once."""
    before = Peaks(
        600_000_000, 590_000_000, PHASES, {"parameters": 100_000_000, "activations": 500_000_000}, 700_000_000
    )
    after = Peaks(
        360_000_000, 350_000_000, PHASES, {"parameters": 100_000_000, "activations": 260_000_000}, 400_000_000
    )
    return Report(
        model="model.py:Net",
        mode="train",
        device="cuda",
        config={"budget": "400 MB", "amp": None, "front_end": "export", "regions": ["a", "b"]},
        budget=400_000_000,
        predicted_before=before,
        predicted_after=after,
        rewrites=(
            ("swish", "a.act (model.py:12)", "x * sigmoid(x) saves x alone"),
            ("swish", "b.act (model.py:12)", "x * sigmoid(x) saves x alone"),
            ("checkpoint_segments", "a (model.py:9)", "7 nodes up to mul, 1 MB not kept"),
        ),
        refusals=(("inplace_activation", "(root)", "Autograd keeps its input."),),
        freed={"swish": 150_000_000},
        segments=(
            Segment("a.conv (model.py:9)", "b.conv", 7, 200_000_000, 1.25),
            Segment("a.act", "b.conv", 2, 50_000_000, 0.25, depth=2),
        ),
        equivalent=True,
        verdict="equivalent: worst gradient a.weight, error 1e-9",
        measured_before=MEASURED,
        measured_after=MEASURED,
        notes=("A hook was found.",),
        versions={"torch": "2.13.0", "python": "3.11.0"},
        shares=(Share("", 10, "a hook"), Share("a", 60), Share("b", 30)),
        predicted_ms_before=10.0,
        predicted_ms_after=12.0,
        checks=(Check("output", 2, 2, True), Check("gradient", 9, 7, True, "a.weight", 1e-9, 8e-10, 2e-9)),
        curve_before=curve(50_000_000),
        curve_after=curve(30_000_000),
        modules=(ModuleBytes("blocks.1", 300_000_000, 100_000_000), ModuleBytes(None, 512, 512)),
        command_line="memrewrite optimize model.py --budget 400MB",
        by_size=PeaksBySize(
            {"input_ids, size 1": (2, 512, 1024, 2048)},
            (None, 240_000_000, 360_000_000, 600_000_000),
            (110_000_000, 160_000_000, 230_000_000, 360_000_000),
        ),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return x + self.outer(hidden * torch.sigmoid(hidden))


def net() -> nn.Module:
    return nn.Sequential(Block(16), Block(16), nn.Linear(16, 4))
