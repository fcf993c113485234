"""What a forward leads to besides its classes is part of what a model looks like: functions and values."""

import builtins
import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memrewrite
from memrewrite.runtime.likeness import Likeness, WrongModelError, describe, refuse_other

NET = """
import functools
from types import SimpleNamespace
import torch
from torch import nn
import named_layers
from named_layers import gate

SCALE = 2.0
START = 0.5
CALLS = 0
LOCAL_RANK = 0
SEEN = []
CONFIG = {"net": {"gain": 1.5, "rate": 0.1}, "count": 0}
SETTINGS = SimpleNamespace(power=2, rate=0.1)
ACT = torch.relu

class Tuned:
    rate = 0.1
    slope = 4.0

class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Tuned.slope

def scaled(x):
    CONFIG["count"] += 1
    return inner(x) * SCALE

def inner(x):
    global CALLS
    CALLS += len(SEEN)
    return (x.tanh() * CONFIG["net"]["gain"]) ** SETTINGS.power

def plain(x):
    return x + 1

def unused(x):
    return x

halved = functools.partial(gate, by=0.5)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        nn.init.constant_(self.fc.bias, START)
        self.act = plain

    def forward(self, x):
        from named_later import late
        if LOCAL_RANK == 0:
            print(x.shape)
        return self.mixed(ACT(halved(self.act(x))))

    def mixed(self, x):
        return named_layers.shifted(scaled(Straight.apply(self.fc(x))))
"""
LAYERS = """
SHIFT = 3

def shifted(x):
    return x + SHIFT

def gate(x, by):
    return x * by
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Module]]:
    """The model of files with some text replaced."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(old: str = "", new: str = "") -> nn.Module:
        for name, text in (("named_layers", LAYERS), ("named_net", NET)):
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        model: nn.Module = importlib.import_module("named_net").Block()
        return model

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield make
    for name in ("named_layers", "named_net"):
        sys.modules.pop(name, None)


OTHER = {
    "value": ("SCALE = 2.0", "SCALE = 3.0", "global SCALE is 3.0, not 2.0"),
    "value of another file": ("SHIFT = 3", "SHIFT = 4", "global SHIFT is 4, not 3"),
    "value in a dictionary": ('"gain": 1.5', '"gain": 2.5', "global CONFIG.net.gain is 2.5, not 1.5"),
    "value of an object": ("power=2", "power=3", "global SETTINGS.power is 3, not 2"),
    "value of a class": ("slope = 4.0", "slope = 5.0", "global Tuned.slope is 5.0, not 4.0"),
    "backward of a function": ("gradient * Tuned", "gradient / Tuned", "function Straight.backward is another"),
    "function of PyTorch's": ("ACT = torch.relu", "ACT = torch.sigmoid", "global ACT is .*sigmoid, not .*relu"),
    "bound value": ("by=0.5", "by=0.25", r"global halved is \(.*0.25.*\), not \(.*0.5.*\)"),
    "function": ("inner(x) * SCALE", "inner(x) / SCALE", "the source of function scaled is another"),
    "function of a function": ("x.tanh()", "x.sin()", "the source of function inner is another"),
    "function of another file": ("x + SHIFT", "x - SHIFT", "the source of function shifted is another"),
    "imported function, bound": ("x * by", "x / by", "the source of function gate is another"),
    "function that a module holds": ("x + 1", "x + 2", "the source of function plain is another"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_is_refused(name: str, made: Callable[..., nn.Module]) -> None:
    old, new, sentence = OTHER[name]
    expected = describe(made())
    with pytest.raises(WrongModelError, match=sentence):
        refuse_other(made(old, new), expected)


SAME = {
    "nothing": ("", ""),
    "comment": ("def scaled(x):", "def scaled(x):  # what it does"),
    "what forward does not lead to": ("def unused(x):\n    return x", "def unused(x):\n    return -x"),
    "what only makes the weights": ("START = 0.5", "START = 0.75"),
    "another of several processes": ("LOCAL_RANK = 0", "LOCAL_RANK = 3"),
    "what code does not read": ('"rate": 0.1', '"rate": 0.2'),
    "what code does not ask of a class": ("    rate = 0.1", "    rate = 0.2"),
    "what code does not ask of an object": ("rate=0.1", "rate=0.2"),
    "what code counts in a dictionary": ('"count": 0', '"count": 9'),
    "what code fills": ("SEEN = []", "SEEN = [1]"),
    "what code counts": ("CALLS = 0", "CALLS = 7"),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_is_taken(name: str, made: Callable[..., nn.Module]) -> None:
    expected = describe(made())
    refuse_other(made(*SAME[name]), expected)


CELLS = """
import types
import torch
from torch import nn

GAIN, STEP, RATE, SEEN = 2.0, 0, 0.1, []
CONFIG = {"net": {"slope": 1.5, "rate": 0.1}}
SETTINGS = types.SimpleNamespace(power=2, rate=0.1)
ACT = torch.tanh
MASK = torch.ones(16)
CALLS = 0

def scaled(x, by=1.0):
    return inner(x) * GAIN * by

def inner(x):
    global CALLS
    CALLS += len(SEEN)
    return x * CONFIG["net"]["slope"] * MASK

def unused(x):
    return x * RATE

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = self.mixed(layer(x))
        return x

    def mixed(self, x):
        return scaled(ACT(x)) ** SETTINGS.power
"""
AGAIN = "def scaled(x, by=1.0):\n    return inner(x) * GAIN * by\n"
EDITS = {
    "value": ("GAIN = 3.0", "GAIN is 3.0, captured as 2.0"),
    "value of a builtin": (
        "del GAIN; import builtins; builtins.GAIN = 3.0",
        "GAIN is no longer there, captured as 2.0",
    ),
    "value in a dictionary": ('CONFIG["net"]["slope"] = 2.5', "CONFIG.net.slope is 2.5, captured as 1.5"),
    "another dictionary": ('CONFIG = {"net": {"slope": 2.5}}', "CONFIG.net.slope is 2.5, captured as 1.5"),
    "value of an object": ("SETTINGS.power = 3", "SETTINGS.power is 3, captured as 2"),
    "tensor": ("MASK = torch.zeros(16)", "MASK is another object than at capture"),
    "function of PyTorch's": ("ACT = torch.sigmoid", "ACT is another object than at capture"),
    "function": ("def scaled(x, by=1.0):\n    return inner(x)", "scaled was edited since"),
    "default": (AGAIN.replace("by=1.0", "by=2.0"), "scaled was edited since"),
    "code of a function": ("inner.__code__ = (lambda x: x).__code__", "inner was edited since"),
    "code of a method": ("Cell.mixed.__code__ = (lambda self, x: x * 2).__code__", "Cell.mixed was edited since"),
}
NO_EDITS = {
    "the same at another line": AGAIN,
    "what forward does not lead to": "def unused(x):\n    return x",
    "what code does not name": "RATE = SETTINGS.rate = CONFIG['net']['rate'] = 0.2; OTHER = 1",
    "what code counts and fills": "CALLS = 7; SEEN.append(1)",
    "an equal value": "GAIN = float('2.0'); CONFIG['net'] = dict(CONFIG['net'])",
}


def ran(edit: str) -> tuple[Any, Any, list[str]]:
    """What a drop-in and its model give after an edit in a later cell, and what is told of it."""
    space: dict[str, Any] = {"__name__": "cells"}
    exec(CELLS, space)  # noqa: S102  (as a notebook runs it)
    torch.manual_seed(0)
    model, x = space["Cell"](), torch.randn(32, 16)
    result = memrewrite.optimize(model, x, budget="min", passes=["checkpoint_segments"], optimizer="none", verify=False)
    assert memrewrite.report_of(result).segments
    exec(edit, space)  # noqa: S102
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [module(x) for module in (result, copy.deepcopy(result), model)]
    assert torch.equal(found[0], found[1])
    return found[0], found[2], [str(each.message) for each in told]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_in_a_later_cell_counts_and_is_told(name: str) -> None:
    edit, sentence = EDITS[name]
    try:
        ours, theirs, told = ran(edit)
    finally:
        vars(builtins).pop("GAIN", None)
    assert torch.equal(ours, theirs)
    assert told == [f"Optimized Cell ran its original forward: {sentence}."] * 2  # its copy says it for itself


@pytest.mark.parametrize("name", NO_EDITS)
def test_a_cell_that_changes_nothing_of_forward_leaves_the_plan(name: str) -> None:
    ours, theirs, told = ran(NO_EDITS[name])
    assert torch.equal(ours, theirs)
    assert not told


def test_what_is_there_now_and_then_is_not_asked_for(made: Callable[..., nn.Module]) -> None:
    expected: Likeness = describe(made())
    assert {name for name in expected if name.startswith("function ")} == {
        f"function {name}"
        for name in ("scaled", "inner", "plain", "shifted", "gate", "Straight.forward", "Straight.backward")
    }
    module: Any = sys.modules["named_net"]
    module.SCALE = nn.Parameter()  # of which there is no text
    refuse_other(module.Block(), expected)
