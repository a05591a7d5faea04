"""Stacked clients learn what each would learn alone; the same bits come from every engine that stacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import small
from anysize.client.stacking import STACK, clip_each, refusals, stacks, unrolled
from anysize.data import Data
from anysize.engines.base import Engine
from anysize.engines.inprocess import InProcess
from anysize.engines.stacked import Stacked
from anysize.engines.workers.engine import Processes
from anysize.errors import AnysizeError, ConfigError, MethodError
from anysize.methods import ELF, FedAvg, SplitMix
from anysize.methods.messages import Client, SubModel, Ticket
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment
from anysize.server.round import run_round
from anysize.wire import dump, flatten


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BOTH_WAYS = {"num_layers": 2, "bidirectional": True, "batch_first": True}


def tokens(count: int = 48, length: int = 6, vocabulary: int = 7) -> Data:
    text = np.random.default_rng(0).integers(vocabulary, size=(count, length + 1))
    return Data(train=(text[:, :-1], text[:, 1:]), classes=vocabulary)


def clients(made: Experiment) -> list[Client]:
    size = {c: made.size_of_group[made.fleet.group_of(c, 1).name] for c in range(len(made.shares))}
    ordered = sorted(size, key=lambda c: (-size[c].width, -made.shares.samples(c), c))
    return [Client(c, i, size[c], 1, made.shares.samples(c), 0) for i, c in enumerate(ordered)]


def after_a_round(made: Experiment, engine: Engine) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    state = made.method.init(made.context)
    found, tally = run_round(made.context, made.method, state, clients(made), engine, 0.05)
    return flatten(found)[0], tally.clients


def inside(made: Experiment) -> InProcess:
    return InProcess(made.context, made.method, made.shares, {})


def assert_stacking_changes_last_bits_only(made: Experiment) -> None:
    plain, told = after_a_round(made, inside(made))
    stacked, told_stacked = after_a_round(made, Stacked(inside(made), 4, made.shares.samples))
    assert plain.keys() == stacked.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(stacked[name], tensor, rtol=1e-4, atol=1e-5)
    assert [c["client"] for c in told] == [c["client"] for c in told_stacked]
    assert [c["loss"] for c in told_stacked] == pytest.approx([c["loss"] for c in told], rel=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "flanc"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": {"local_epochs": 2, "clip": 0.5, "optimizer": "adam", "learning_rate": 0.01}},
        {"tricks": {"masked_loss": True, "classwise_head": True, "proximal": 0.1}, "training": {"local_steps": 3}},
        {"tricks": {"max_entropy": 5.0}},
    ],
)
def test_a_stacked_round_equals_a_plain_one_but_for_the_last_bits(method: str, changes: dict[str, Any]) -> None:
    data = {"clients": 8, "split": "classes", "classes_per_client": 3}
    table = {"name": method} | ({"execution": "compose"} if method == "flanc" else {})
    assert_stacking_changes_last_bits_only(small.experiment(method=table, data=data, **changes))


def test_flanc_that_mixes_holds_its_factors_apart_and_is_refused() -> None:
    made = small.experiment(method={"name": "flanc", "execution": "mix"}, data={"clients": 8})
    with pytest.raises(MethodError, match=r"coefficients.* got no gradient from stacked clients"):
        after_a_round(made, Stacked(inside(made), 4, made.shares.samples))


@pytest.mark.parametrize("method", ["heterofl", "flanc"])
def test_recurrent_networks_are_stacked_too(method: str) -> None:
    made = Experiment(
        data=tokens(),
        clients=8,
        model={"name": "char-lstm", "options": {"hidden": 8, "embedding": 4}},
        method=method,
        task="next-token",
        devices={"capacities": [0.5, 1.0]},
        training={"batch_size": 3},
    )
    assert_stacking_changes_last_bits_only(made)


def test_batch_statistics_are_each_clients_own() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    made = Experiment(
        data="digits",
        clients=8,
        partition={"fraction": 0.2, "split": "classes", "classes_per_client": 2},
        model=network,
        method="heterofl",
        devices={"capacities": [0.5, 1.0]},
        tricks={"batch_norm": "batch"},
    )
    assert_stacking_changes_last_bits_only(made)


def test_both_engines_end_in_the_same_bits_with_stacks() -> None:
    made = small.experiment(data={"clients": 10}, method={"name": "flanc", "execution": "compose"})
    here, _ = after_a_round(made, Stacked(inside(made), 3, made.shares.samples))
    with Stacked(Processes(made, {}, workers=2), 3, made.shares.samples) as engine:
        there, _ = after_a_round(made, engine)
    assert dump(here, {}) == dump(there, {})


def test_a_run_with_stacks_says_so_in_its_complete_config_and_resumes_only_with_them(tmp_path: Path) -> None:
    small.experiment(rounds=1, method={"name": "heterofl"}, training={"stack": 4}).run(tmp_path / "run")
    assert "stack = 4" in (tmp_path / "run" / "config.toml").read_text()
    alone = small.experiment(rounds=2, method={"name": "heterofl"}, training={"stack": 1})
    with pytest.raises(AnysizeError, match=r"training\.stack: 4 -> 1"):
        alone.run(tmp_path / "run", resume=True)
    run = small.experiment(rounds=2, method={"name": "heterofl"}).run(tmp_path / "run", resume=True)
    assert (run.round, run.experiment.config.training.stack) == (2, 4)


def message(client: int, width: float = 1.0, job: str = "train") -> SubModel:
    shape = (round(4 * width),)
    return SubModel({"w": torch.zeros(shape)}, Ticket(client, 1, 0, str(width), width, job, rate=0.1))


def sizes_of(messages: list[SubModel], limit: int, samples: dict[int, int] | None = None) -> list[list[int]]:
    made = stacks(messages, limit, lambda client: (samples or {}).get(client, 5))
    return [[part["client"] for part in m.ticket.more.get(STACK, [m.ticket.to_json()])] for m in made]


def test_neighbours_of_one_shape_and_amount_of_data_are_stacked_up_to_the_limit() -> None:
    assert sizes_of([message(c) for c in range(5)], 2) == [[0, 1], [2, 3], [4]]
    assert sizes_of([message(0), message(1, 0.5), message(2, 0.5), message(3)], 4) == [[0], [1, 2], [3]]
    assert sizes_of([message(c) for c in range(4)], 4, {2: 6}) == [[0, 1], [2], [3]]
    assert sizes_of([message(c, job="evaluate") for c in range(2)], 4) == [[0], [1]]


def test_stacks_are_drawn_only_when_there_is_room() -> None:
    drawn: list[int] = []

    def source() -> Iterator[SubModel]:
        for client in range(20):
            drawn.append(client)
            yield message(client)

    made = stacks(source(), 4, lambda client: 5)
    next(made)
    assert len(drawn) == 4


def test_each_clients_gradient_is_clipped_as_torch_clips_one() -> None:
    random = torch.Generator().manual_seed(0)
    stacked = [torch.zeros(3, 4, 2), torch.zeros(3, 5), torch.zeros(3)]
    for tensor in stacked:
        tensor.grad = torch.randn(tensor.shape, generator=random) * torch.tensor([0.01, 1, 10]).view(
            -1, *[1] * (tensor.dim() - 1)
        )
    alone = [[nn.Parameter(tensor[i].clone()) for tensor in stacked] for i in range(3)]
    for i, parameters in enumerate(alone):
        for parameter, tensor in zip(parameters, stacked):
            parameter.grad = tensor.grad[i].clone()
        nn.utils.clip_grad_norm_(parameters, 1.5)
    clip_each(stacked, 1.5)
    for i, parameters in enumerate(alone):
        for parameter, tensor in zip(parameters, stacked):
            torch.testing.assert_close(tensor.grad[i], parameter.grad)


@pytest.mark.parametrize(
    "kind, options",
    [(kind, options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for options in ({}, BOTH_WAYS, {"bias": False})]
    + [(nn.LSTM, {"proj_size": 3}), (nn.RNN, {"nonlinearity": "relu"})],
)
def test_an_unrolled_layer_computes_what_torch_computes(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, **options)
    x = torch.randn(3, 6, 4)
    for start in (None, layer(x)[1]):
        (out, last), (expected, expected_last) = unrolled(layer, x, start), layer(x, start)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(last, expected_last)


@pytest.mark.parametrize(
    "network, tricks, reason",
    [
        (small.normalised_network(), {}, r"0: a convolution.*1: batch-norm with running statistics"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)), {}, "1: dropout"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), {"batch_norm": "local"}, r"tricks\.batch_norm"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), {"adversarial": 0.5}, r"tricks\.adversarial = 0\.5"),
    ],
)
def test_what_cannot_be_stacked_is_refused_by_name_before_a_file_is_written(
    network: nn.Module, tricks: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = Experiment(
        data="digits", clients=4, model=network, method="fedavg", tricks=tricks, training={"stack": 2}, rounds=1
    )
    with pytest.raises(ConfigError, match=rf"(?s)training\.stack = 2.*{reason}"):
        made.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [ELF(), SplitMix(), SplitMix(dual_norm=True)])
def test_methods_whose_clients_have_networks_of_their_own_kinds_are_refused_by_name(method: Any) -> None:
    (line,) = refusals(small.experiment().context, method)
    assert line.startswith(f"the method {type(method).__name__}: ")


def test_an_engine_that_stacks_lets_the_one_below_test_networks() -> None:
    class Below(Engine):
        def perform(self, sub_models: Any) -> Any:
            raise AssertionError

        def evaluate(self, evaluation: Any) -> Any:
            return iter([evaluation])

    assert list(Stacked(Below(), 2, lambda client: 1).evaluate("all shards")) == ["all shards"]


class Drawing(FedAvg):
    """A method whose loss makes a random choice."""

    def loss(self, module: Any, batch: Any, step: Any) -> torch.Tensor:
        return super().loss(module, batch, step) * torch.rand((), generator=step.generator)


def test_a_method_that_chooses_at_every_step_is_refused() -> None:
    made = small.experiment(method={"name": "fjord"}, data={"clients": 4}, devices={"capacities": [0.5, 1.0]})
    with pytest.raises(MethodError, match=r"training\.stack: at every step the method makes one of 2 choices"):
        after_a_round(made, Stacked(inside(made), 4, made.shares.samples))


def test_a_loss_that_draws_is_refused() -> None:
    made = small.experiment(data={"clients": 4}, devices={"capacities": [1.0]})
    made.__dict__["method"] = Drawing()
    with pytest.raises(MethodError, match="the loss of Drawing"):
        after_a_round(made, Stacked(inside(made), 2, made.shares.samples))
    assert made.sizes == (Size(1.0),)
