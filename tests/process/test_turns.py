"""Calls of several threads take turns: what each puts back, all share."""

import threading
from typing import Any

import torch
from torch import nn

import memrewrite
from memrewrite.process.turns import one_at_a_time


def test_threads_optimize_one_after_the_other() -> None:
    stages: list[str] = []
    found: list[Any] = []
    x = torch.randn(4, 8)
    models = [
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.1)) for _ in range(3))) for _ in "ab"
    ]

    def work(model: nn.Module) -> None:
        name = threading.current_thread().name
        found.append(memrewrite.optimize(model, x, budget="min", progress=lambda stage: stages.append(name)))

    threads = [
        threading.Thread(target=work, args=(model,), name=name) for model, name in zip(models, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.report.equivalent for result in found] == [True, True]
    assert {*stages} == {"a", "b"}
    assert stages == sorted(stages, reverse=stages[0] == "b")


def test_a_call_may_make_another() -> None:
    @one_at_a_time
    def inner() -> int:
        return 1

    @one_at_a_time
    def outer() -> int:
        return inner() + 1

    assert outer() == 2
