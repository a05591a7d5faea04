"""The one training step: what it computes, who takes it, and how it is timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anysize
import small
from anysize.client.optimizer import make_optimizer
from anysize.client.step import TrainingStep, client_loss
from anysize.cost.latency import blank, step_latency_ms, step_seconds
from anysize.methods import FedAvg, HeteroFL
from anysize.methods.context import Context
from anysize.methods.messages import Client
from anysize.methods.training import Batch, Step
from anysize.tasks import task

SOURCE = Path(anysize.__file__).parent


def context_of(**changes: Any) -> Context:
    context = small.experiment().context
    training = context.training.model_copy(update={"momentum": 0.0, "weight_decay": 0.0} | changes.pop("training", {}))
    tricks = replace(context.tricks, **changes.pop("tricks", {}))
    return replace(context, task=task("regression"), training=training, tricks=tricks)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_is_gradient_descent_on_loss_and_proximal_term_clipped(clip: float | None) -> None:
    context = context_of(training={"clip": clip}, tricks={"proximal": 0.6})
    random = np.random.default_rng(0)
    w, start, x, y = (random.normal(size=shape).astype(np.float32) for shape in ((1, 3), (1, 3), (5, 3), (5, 1)))
    module = nn.Linear(3, 1, bias=False)
    module.weight.data = torch.from_numpy(w.copy())
    loss = client_loss(context, HeteroFL(), module, {"weight": torch.from_numpy(start)})
    take = TrainingStep(loss, make_optimizer(context, HeteroFL(), module, 0.1), context.training.clip)
    found = take(Batch(torch.from_numpy(x), torch.from_numpy(y)), 0)

    error = x @ w.T - y
    slope = 2 * error.T @ x / 5 + 0.6 * (w - start)
    norm = float(np.linalg.norm(slope))
    slope = slope * min(1.0, clip / norm) if clip is not None else slope
    assert clip is None or norm > clip
    np.testing.assert_allclose(module.weight.detach().numpy(), w - 0.1 * slope, rtol=1e-4)
    assert float(found) == pytest.approx(float((error**2).mean() + 0.3 * ((w - start) ** 2).sum()), rel=1e-5)
    assert not found.requires_grad


def test_gradients_of_one_step_are_gone_in_the_next() -> None:
    context = context_of(tricks={"proximal": 0.0})
    module = nn.Linear(3, 1, bias=False)
    take = TrainingStep(
        client_loss(context, HeteroFL(), module), make_optimizer(context, HeteroFL(), module, 0.0), None
    )
    batch = Batch(torch.ones(2, 3), torch.zeros(2, 1))
    take(batch, 0)
    first = module.weight.grad
    take(batch, 1)
    assert first is not None
    assert module.weight.grad is not None
    assert torch.equal(first, module.weight.grad)


def test_no_other_module_puts_a_step_together() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\btake_step\(|\bStep\(|\bproximal\(|\bzero_grad\(\)", path.read_text())
    }
    # Where these are defined, and where a network that is used again drops the gradients of the last client.
    assert found - {"client/optimizer.py", "client/objectives.py", "client/networks.py"} == {"client/step.py"}


@dataclass(frozen=True)
class Watched(FedAvg):
    """Notes what surrounds every step, and draws one of two choices."""

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        hooks = [part._forward_hooks or part._forward_pre_hooks for part in module.modules()]
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        SEEN.append((step.choose(2), step.number, any(hooks), modes, saving, torch.get_num_threads()))
        return super().loss(module, batch, step)


SEEN: list[tuple[int, int, bool, int, Any, int]] = []


@pytest.fixture
def seen() -> Iterator[list[tuple[int, int, bool, int, Any, int]]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


def test_a_timed_step_runs_without_counters_in_one_thread_for_every_choice(seen: list[Any]) -> None:
    made = small.experiment(method={"name": "fedavg"})
    context, method, size = made.context, Watched(), made.context.largest
    message = method.extract(context, method.init(context), Client(0, 0, size, 1, 1, 0))
    torch.set_num_threads(2)
    try:
        assert step_latency_ms(context, method, message, made.example) > 0
    finally:
        torch.set_num_threads(1)
    assert {entry[2:] for entry in seen} == {(False, 0, None, 1)}
    steps = [(choice, number) for choice, number, *_ in seen]
    assert steps == [(choice, number) for choice in (0, 1) for number in range(7)]


def test_a_timed_step_lets_the_optimizer_step() -> None:
    made = small.experiment(method={"name": "fedavg"})
    message = made.method.extract(made.context, made.method.init(made.context), Client(0, 0, made.sizes[0], 1, 1, 0))
    module = made.method.build(made.context, message)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    assert step_seconds(made.context, made.method, module, blank(made.example, "cpu")) > 0
    assert any(not torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
