"""The tables and pictures of how-the-peak-comes-about.md, all computed; only its words are written by hand.

    python examples/plot_peak.py    # fills the page's tables and draws pictures/*.png; needs matplotlib

The net has 136 million parameters and its steps take gigabytes, but they run on fake tensors and allocate nothing.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from seed_mlp import FEATURES, MIB, WIDTH, FunctionSwish, get_inputs, get_model, optimizer
from torch import nn

import memrewrite
from memrewrite.simulate import Timeline, simulate
from memrewrite.targets.cuda_from_cpu import CUDA_FROM_CPU
from memrewrite.workload.step import Inputs, Step
from memrewrite.workload.stepspec import optimizer_factory

HERE = Path(__file__).parent
PAGE = HERE / "how-the-peak-comes-about.md"
PICTURES = HERE / "pictures"

PLAIN, FUNCTION, REWRITTEN, LOWEST = "x * sigmoid(x)", "the article's Function", "memrewrite", "memrewrite, budget min"
BATCH = 512
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
# Memory in use as each phase ends, MiB at batch 128: what the article printed.
ARTICLE = (524, 1552, 1552, 1044, 1044, 1044, 2072, 2072, 1044, 1044)
# The peak of step 2 in MiB, measured on one H200: tests/benchmarks/RESULTS.md.
MEASURED = {128: {PLAIN: 2336, FUNCTION: 2324, REWRITTEN: 2080}, 512: {PLAIN: 6177, FUNCTION: 6165, REWRITTEN: 5153}}

Timelines = dict[str, Timeline]


def models() -> dict[str, nn.Module]:
    """The variants, all over the same parameters."""
    plain = get_model()
    function = nn.Sequential(*(FunctionSwish() if number == 1 else part for number, part in enumerate(plain)))
    example = get_inputs(BATCH)
    # Only memory is looked at here; the tests verify these rewrites.
    rewritten = memrewrite.optimize(plain, example, optimizer=optimizer, verify=False)
    lowest = memrewrite.optimize(plain, example, optimizer=optimizer, budget="min", verify=False)
    return {PLAIN: plain, FUNCTION: function, REWRITTEN: rewritten, LOWEST: lowest}


def timelines(variants: dict[str, nn.Module], batch: int) -> Timelines:
    """Two steps of each variant, simulated."""
    inputs, step = Inputs(get_inputs(batch), {}), Step(optimizer=optimizer)
    return {name: simulate(model, inputs, step, attribute=True) for name, model in variants.items()}


def textbook(batch: int) -> float:
    """The rule in bytes: 3 x parameters, 2 x activations and the inputs of every sample, 4 bytes each."""
    parameters = WIDTH * FEATURES + WIDTH + 2 * WIDTH + WIDTH + 1
    outputs = 3 * WIDTH + 1  # of the first layer, Swish, the norm, the last layer
    return 4.0 * (3 * parameters + batch * (2 * outputs + FEATURES))


def figures(variants: dict[str, nn.Module], by_batch: dict[int, Timelines]) -> dict[str, str]:
    """The page's tables by name, in Markdown."""
    return {
        "optimizers": _optimizers(variants[PLAIN]),
        "phases": _phases(by_batch[128]),
        "moments": _moments(by_batch[BATCH]),
        "peaks": _peaks(by_batch[BATCH]),
        "batches": _batches(by_batch),
    }


def _phases(seen: Timelines) -> str:
    rows = [["the article", *ARTICLE]] + [
        [name, *(mib(used) for _, used in line.phases)] for name, line in seen.items()
    ]
    body = [[row[0], number, *row[1 + 5 * number - 5 : 1 + 5 * number]] for row in rows for number in (1, 2)]
    return table(["variant", "step", "data", "forward", "loss", "backward", "step ends"], body)


def _moments(seen: Timelines) -> str:
    """The highest moment of each phase of step 2 and the operator it comes with."""
    body = []
    for phase in ("forward", "backward", "step"):
        row = [phase]
        for line in seen.values():
            moments = [moment for moment in line.events if moment[1].startswith(f"step 2 {phase}")]
            size, label = max(moments, key=lambda moment: moment[0])
            operator = label.rpartition("aten.")[2].partition(".")[0] if "aten." in label else "as it ends"
            row.append(f"{mib(size)}, {operator}")
        body.append(row)
    return table(["step 2", *seen], body)


def _peaks(seen: Timelines) -> str:
    plain = seen[PLAIN]
    body = []
    for name, line in seen.items():
        after = forward_end(line)
        body.append(
            [
                name,
                f"{mib(after)} ({after / forward_end(plain) - 1:+.1%})",
                f"{mib(line.peak)} ({line.peak / plain.peak - 1:+.1%})",
                MEASURED[BATCH].get(name, "-"),
            ]
        )
    return table(["variant", "after forward, simulated", "true peak, simulated", "true peak, H200"], body)


def _batches(by_batch: dict[int, Timelines]) -> str:
    body = []
    for batch, seen in by_batch.items():
        exact = [f"{mib(line.peak)}" for line in seen.values()]
        body.append([batch, *exact, f"{mib(textbook(batch))} ({textbook(batch) / seen[PLAIN].peak - 1:+.0%})"])
    return table(["batch", *next(iter(by_batch.values())), "textbook rule"], body)


def _optimizers(model: nn.Module) -> str:
    """What an optimizer adds: its state, and what it takes while it works, as on CUDA."""
    inputs = Inputs(get_inputs(16), {})
    body = []
    for name in ("sgd", "sgd-momentum", "adamw"):
        line = simulate(model, inputs, Step(optimizer=optimizer_factory(name), target=CUDA_FROM_CPU))
        parts = (line.as_ends("data", 2), line.peak_of_optimizer, line.peak)
        body.append([name, *(mib(size) for size in parts)])
    return table(["optimizer", "between steps", "peak of its own phase", "peak of step 2"], body)


def forward_end(line: Timeline) -> int:
    """Bytes in use as the forward of step 2 ends: what the article compared."""
    return line.phases[6][1]


def mib(size: float) -> int:
    """Whole MiB."""
    return round(size / MIB)


def table(head: Iterable[Any], body: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fill(page: str, blocks: dict[str, str]) -> str:
    """``page`` with each block between its marks, ``<!-- name -->`` and ``<!-- end -->``."""
    for name, text in blocks.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        page, count = mark.subn(lambda found, text=text: found[1] + text + found[2], page)
        if count != 1:
            raise SystemExit(f"The page has {count} places for {name}; it needs one.")
    return page


COLOURS = {
    "parameters": "#4e79a7",
    "buffers": "#9c755f",
    "inputs": "#bab0ac",
    "gradients": "#76b7b2",
    "activations": "#f28e2b",
    "temporaries": "#e15759",
}


def draw_timeline(seen: Timelines, path: Path) -> None:
    """A panel per variant: what is in use after each operator of both steps, by kind."""
    names = [PLAIN, FUNCTION, REWRITTEN]

    def panels(figure: Any) -> None:
        for axes, name in zip(figure.subplots(len(names), 1, sharey=True), names, strict=True):
            line = seen[name]
            split = {kind: line.split()[kind] for kind in COLOURS}
            moments = range(len(line.events))
            stacks = [[size / MIB for size in sizes] for sizes in split.values()]
            axes.stackplot(moments, stacks, labels=split, colors=COLOURS.values(), step="post")
            axes.axhline(line.peak / MIB, color="black", linewidth=0.8, linestyle="--")
            axes.annotate(f"{mib(line.peak)} MiB", (0, line.peak / MIB), xytext=(2, 3), textcoords="offset points")
            axes.set_title(name, loc="left", fontsize=10)
            ends = [i for i, (_, label) in enumerate(line.events) if label.endswith(("forward ends", "backward ends"))]
            for end in ends:
                axes.axvline(end, color="grey", linewidth=0.8)
            words = ("forward 1", "backward 1", "forward 2", "backward 2")
            for start, end, word in zip([0, *ends], ends, words, strict=False):
                axes.text((start + end) / 2, 250, word, ha="center", fontsize=8, color="white")
            axes.set_xlim(0, len(line.events) - 1)
            axes.set_xticks([])
            axes.set_ylabel("MiB")
            axes.set_ylim(0, 7200)
        axes.set_xlabel("operators in the order they run")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)

    draw(path, (8.0, 8.5), panels)


def draw_at_the_peak(seen: Timelines, path: Path) -> None:
    """A bar per variant: what the peak of step 2 is made of."""

    def bars(figure: Any) -> None:
        axes = figure.subplots()
        left = [0.0] * len(seen)
        for kind, colour in COLOURS.items():
            sizes = [line.categories.get(kind, 0) / MIB for line in seen.values()]
            axes.barh(list(seen), sizes, left=left, color=colour, label=kind)
            for name, size, start in zip(seen, sizes, left, strict=True):
                if size > 400:
                    axes.text(start + size / 2, name, f"{size:.0f}", ha="center", va="center", fontsize=9)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel(f"MiB in use at the peak of step 2, batch {BATCH} (simulated)")
        figure.legend(loc="outside upper center", ncols=6, fontsize=8)

    draw(path, (8.0, 2.8), bars)


def draw_batches(by_batch: dict[int, Timelines], path: Path) -> None:
    """The peak against the batch size, and what the article looked at."""

    def curves(figure: Any) -> None:
        axes = figure.subplots()
        for name, colour in zip(by_batch[BATCH], ("tab:red", "tab:orange", "tab:blue", "tab:green"), strict=True):
            peaks = [seen[name].peak / MIB for seen in by_batch.values()]
            axes.plot(list(by_batch), peaks, color=colour, linewidth=3 if name == PLAIN else 1.5, label=name)
            if name in (PLAIN, FUNCTION):
                ends = [forward_end(seen[name]) / MIB for seen in by_batch.values()]
                axes.plot(
                    list(by_batch),
                    ends,
                    color=colour,
                    linestyle=":",
                    linewidth=2,
                    zorder=4,
                    label=f"{name}, after forward",
                )
            for batch in MEASURED if name in MEASURED[BATCH] else ():
                axes.scatter(batch, MEASURED[batch][name], color=colour, marker="x", s=50, zorder=3)
        rule = [textbook(batch) / MIB for batch in by_batch]
        axes.plot(list(by_batch), rule, color="grey", linestyle="--", label="textbook rule")
        axes.scatter((), (), color="black", marker="x", label="measured on an H200")
        axes.set_xlabel("batch size")
        axes.set_ylabel("peak of step 2, MiB (lines: simulated)")
        axes.set_xlim(0, max(by_batch))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)

    draw(path, (8.0, 5.0), curves)


def draw(path: Path, size: tuple[float, float], content: Callable[[Any], None]) -> None:
    """Write one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=size, layout="constrained")
    content(figure)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    torch.manual_seed(0)
    variants = models()
    by_batch = {batch: timelines(variants, batch) for batch in BATCHES}
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), figures(variants, by_batch)), encoding="utf-8")
    draw_timeline(by_batch[BATCH], PICTURES / "timeline.png")
    draw_at_the_peak(by_batch[BATCH], PICTURES / "at-the-peak.png")
    draw_batches(by_batch, PICTURES / "batch-sizes.png")


if __name__ == "__main__":
    main()
