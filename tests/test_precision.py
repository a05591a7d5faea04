"""Half precision: what a step computes with it, what stays float32, and where it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import small
from anysize.client import accelerators
from anysize.client.optimizer import make_optimizer
from anysize.client.precision import LossScale, passes
from anysize.client.stacking import stack, train_stack
from anysize.client.step import TrainingStep, client_loss
from anysize.client.work import perform
from anysize.data import SubsetPart
from anysize.engines.inprocess import InProcess
from anysize.engines.workers.engine import Processes
from anysize.errors import ConfigError
from anysize.methods import ELF, FIARSE, FLANC, FedAvg, FedHM, FjORD, HeteroFL, Ladder, Method, PriSM, SplitMix
from anysize.methods.context import Context
from anysize.methods.messages import Client, Update
from anysize.methods.training import Batch
from anysize.server.judging import on_test
from anysize.server.round import run_round
from anysize.tasks import task
from anysize.testing import Trial, make_trial
from anysize.wire import dump, flatten

METHODS = [HeteroFL(), FLANC(), PriSM(), FedHM(), SplitMix(), FjORD(), Ladder(), FIARSE(), ELF()]


def bfloat(values: Any) -> Any:
    """Numbers rounded to bf16: the upper half of a float32, to the nearest, ties to even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def context_of(precision: str) -> Context:
    """A task of least squares without momentum, decay and tricks."""
    context = small.experiment().context
    training = context.training.model_copy(update={"momentum": 0.0, "weight_decay": 0.0, "precision": precision})
    return replace(context, task=task("regression"), training=training)


def stepping(context: Context, module: nn.Module, rate: float) -> TrainingStep:
    loss = client_loss(context, HeteroFL(), module)
    optimizer = make_optimizer(context, HeteroFL(), module, rate)
    return TrainingStep(loss, optimizer, context.training.clip, scale=LossScale.of(context.training))


def line(*weights: float) -> nn.Linear:
    module = nn.Linear(len(weights), 1, bias=False)
    module.weight.data = torch.tensor([weights])
    return module


def test_a_step_in_bf16_rounds_what_the_network_computes_and_not_its_weights() -> None:
    w = np.array([[1 + 2**-10, 0.5, -2.0]], dtype=np.float32)
    random = np.random.default_rng(0)
    x, y = (random.normal(size=shape).astype(np.float32) for shape in ((4, 3), (4, 1)))
    module = line(*w[0].tolist())
    found = stepping(context_of("bf16"), module, 0.25)(Batch(torch.from_numpy(x), torch.from_numpy(y)), 0)

    answer = bfloat(bfloat(x) @ bfloat(w).T)
    error = answer - y  # the loss is float32
    slope = bfloat(bfloat(2 * error / 4).T @ bfloat(x))
    np.testing.assert_allclose(float(found), (error**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(module.weight.detach().numpy(), w - 0.25 * slope, rtol=1e-6)
    assert not np.allclose(float(found), ((x @ w.T - y) ** 2).mean(), rtol=1e-5)  # float32 would be told apart


def test_weights_keep_what_bf16_cannot_hold() -> None:
    module = line(1.0)
    take = stepping(context_of("bf16"), module, 1.0)
    for number in range(4):
        take(Batch(torch.tensor([[2.0**-6]]), torch.tensor([[2.0**-6 - 2.0**-5]])), number)
    # A gradient of 2 * 2^-5 * 2^-6 = 2^-10 in every step; bf16 has no number between 1 and 1 - 2^-8.
    assert module.weight.item() == pytest.approx(1 - 4 * 2**-10, abs=1e-6)
    assert module.weight.dtype == torch.float32


def test_fp16_keeps_gradients_that_it_could_not_hold_without_a_scale() -> None:
    batch = Batch(torch.tensor([[2.0**-10]]), torch.tensor([[1 - 2.0**-16]]))
    for scaled in (True, False):
        module = nn.Linear(1, 1)
        module.weight.data.fill_(0.0)
        module.bias.data.fill_(1.0)
        take = stepping(context_of("fp16"), module, 1.0)
        if not scaled:
            take._scale = None
        take(batch, 0)
        # d loss / d weight = 2 * 2^-16 * 2^-10 = 2^-25: the smallest number of fp16 is 2^-24.
        assert module.weight.item() == (-(2.0**-25) if scaled else 0.0)


def test_a_step_that_overflows_fp16_is_left_out_and_a_smaller_scale_is_tried() -> None:
    module = line(1.0)
    take = stepping(context_of("fp16"), module, 2.0**-20)
    batch = Batch(torch.tensor([[256.0]]), torch.tensor([[-768.0]]))
    moved = []
    for number in range(8):
        take(batch, number)
        moved.append(1.0 - module.weight.item())
    # The gradient, 2 * 1024 * 256 = 2^19, is above what fp16 holds at every scale from 2^12 down to 2^5.
    assert moved == [0.0] * 8
    small_batch = Batch(torch.tensor([[16.0]]), torch.tensor([[0.0]]))  # 2 * 16 * 16 = 2^9, and the scale is 2^4 now
    take(small_batch, 8)
    assert module.weight.item() == 1.0 - 2.0**-11


def test_gradients_without_infinities_are_divided_exactly_and_an_empty_list_is_fine() -> None:
    scale = LossScale()
    gradients = [torch.tensor([3.0, -5.0]) * scale.factor, torch.tensor([[0.25]]) * scale.factor]
    assert scale.removed(gradients)
    assert [gradient.tolist() for gradient in gradients] == [[3.0, -5.0], [[0.25]]]
    assert scale.removed([])


def trained(trial: Trial, precision: str) -> Update:
    training = trial.context.training.model_copy(update={"precision": precision})
    context = replace(trial.context, training=training, built={})
    message = trial.method.extract(context, trial.state, Client(0, 0, context.sizes[0], 1, 12, 0))
    message = replace(message, ticket=replace(message.ticket, rate=0.05))
    return perform(context, trial.method, message, trial.experiment.shares.share(0))


class Blocks(nn.Module):
    """Blocks that can be removed, for methods that need some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))
        return answer


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_every_method_trains_in_bf16_and_sends_float32(method: Method[Any]) -> None:
    model = Blocks() if isinstance(method, ELF) else None
    trial = make_trial(method, model, (0.5, 1.0), None)
    half, whole = trained(trial, "bf16"), trained(trial, "float32")
    assert half.loss == pytest.approx(whole.loss, rel=0.02)
    assert half.loss != whole.loss
    for name, tensor in whole.tensors.items():
        assert half.tensors[name].dtype == tensor.dtype


@dataclass(frozen=True)
class Seen(FedAvg):
    """Notes whether a step's passes are lowered."""

    def loss(self, module: nn.Module, batch: Batch, step: Any) -> Tensor:
        handles = [
            part.register_forward_hook(lambda *_: LOWERED.append(torch.is_autocast_enabled("cpu")))
            for part in module.modules()
        ]
        try:
            return super().loss(module, batch, step)
        finally:
            for handle in handles:
                handle.remove()


LOWERED: list[bool] = []


@pytest.mark.parametrize(("precision", "lowered"), [("float32", {False}), ("bf16", {True})])
def test_only_passes_of_the_network_are_lowered_and_none_without_the_option(precision: str, lowered: set[bool]) -> None:
    LOWERED.clear()
    trained(make_trial(Seen(), None, (1.0,), None), precision)
    assert set(LOWERED) == lowered
    assert not torch.is_autocast_enabled("cpu")


def test_tests_stay_in_float32() -> None:
    trial = make_trial(HeteroFL(), None, (1.0,), None)
    training = trial.context.training.model_copy(update={"precision": "bf16"})
    assert trial.experiment.data is not None
    part, other = trial.experiment.data.train, replace(trial.context, training=training)
    found = [on_test(context, trial.method, trial.state, part, {}, 50) for context in (trial.context, other)]
    assert found[0] == found[1]


def test_attention_on_a_processor_stays_single_inside_a_lowered_pass() -> None:
    seen = []

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x @ x
            seen.append(x.dtype)
            seen.append(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).dtype)
            return x

    run = passes(context_of("bf16").training, torch.device("cpu"))
    assert run(Attends(), torch.ones(1, 4, 4)).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.float32]


def test_the_entropy_term_and_distillation_see_single_precision() -> None:
    trial = make_trial(FjORD(), None, (0.5, 1.0), {"max_entropy": 10.0})
    assert trained(trial, "bf16").loss == pytest.approx(trained(trial, "float32").loss, rel=0.02)


def without_units(monkeypatch: pytest.MonkeyPatch, **units: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, **units})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_processor_without_units_refuses_in_one_line_and_another_machines_run_takes_float32(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_units(monkeypatch)
    with pytest.raises(ConfigError, match=rf'^training.precision = "{precision}": cpu has no units .*float32\)$'):
        small.experiment(training={"precision": precision}).context  # noqa: B018
    asked: Any = precision
    assert accelerators.precision(asked, torch.device("cpu"), or_float32=True) == "float32"
    without_units(monkeypatch, avx512_bf16=True, avx512_fp16=True)
    assert small.experiment(training={"precision": precision}).context.training.precision == precision
    with pytest.raises(ConfigError, match="mps has no units"):
        accelerators.precision(asked, torch.device("mps"))


def test_fp16_is_refused_where_steps_cannot_be_left_out_or_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    without_units(monkeypatch, amx_fp16=True)
    with pytest.raises(ConfigError, match=r'training\.precision: given "fp16"; it needs training\.stack = 1'):
        small.experiment(training={"precision": "fp16", "stack": 2})
    with pytest.raises(ConfigError, match=r'training\.precision = "fp16": an attack'):
        small.experiment(training={"precision": "fp16"}, tricks={"adversarial": 0.5}).context  # noqa: B018


def test_a_plan_counts_the_same_in_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    without_units(monkeypatch, avx512_bf16=True)
    plain, lowered = (small.experiment(training={"precision": kind}) for kind in ("float32", "bf16"))
    assert plain.cost(plain.sizes[0]) == lowered.cost(lowered.sizes[0])


def test_stacked_clients_train_in_bf16() -> None:
    made = small.experiment(method={"name": "heterofl"})
    losses = {}
    for precision in ("float32", "bf16"):
        training = made.context.training.model_copy(update={"precision": precision})
        context, state = replace(made.context, training=training, built={}), made.method.init(made.context)
        clients = [Client(i, i, context.largest, 1, 12, 0) for i in range(2)]
        messages = [made.method.extract(context, state, client) for client in clients]
        messages = [replace(sent, ticket=replace(sent.ticket, rate=0.05)) for sent in messages]
        data = [SubsetPart(made.shares.share(client.id).train, torch.arange(12)) for client in clients]
        update = train_stack(context, made.method, stack(messages), data)
        losses[precision] = [note["loss"] for note in update.ticket.more["stack"]]
        assert {tensor.dtype for tensor in update.tensors.values()} <= {torch.float32, torch.int64}
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bf16"] != losses["float32"]


@pytest.mark.skipif("bf16" not in accelerators._fast(torch.device("cpu")), reason="this processor has no units for it")
def test_workers_train_in_bf16_to_the_same_bits_as_one_process() -> None:
    made = small.experiment(method={"name": "heterofl"}, training={"precision": "bf16"})
    state, ends = made.method.init(made.context), []
    clients = [Client(i, i, made.context.sizes[i % 2], 1, made.shares.samples(i), 0) for i in range(3)]
    with Processes(made, {}, workers=1) as processes:
        for engine in (processes, InProcess(made.context, made.method, made.shares, {})):
            after, _ = run_round(made.context, made.method, state, clients, engine, 0.05)
            ends.append(dump(*flatten(after)))
    assert ends[0] == ends[1]
