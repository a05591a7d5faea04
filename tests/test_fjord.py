"""FjORD and ordered dropout: each equation by hand, one width alone is FedAvg, a run learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anysize as az
from anysize.client.objectives import make_distillation, make_objective, masked
from anysize.cost.count import measure, step_cost
from anysize.elastic.composed import ComposedWidths
from anysize.elastic.skeleton import hollow, tensors_of
from anysize.elastic.views import Nested
from anysize.errors import MethodError
from anysize.methods import FLANC, Client, FedAvg, FjORD, HeteroFL, Method
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.tasks import task
from small import fast_if, normalised_network
from test_equivalences import bare, digits, same
from test_golden import answers, context_of, mean_over_holders, numbers

Array = np.ndarray[Any, np.dtype[Any]]


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def crossed(logits: Array, targets: Array) -> float:
    """The mean cross-entropy of rows of probabilities."""
    return float(-(targets * np.log(softmax(logits))).sum(1).mean())


def forward(tensors: dict[str, Array], x: Array, width: float) -> Array:
    """The golden network of linear layers at a width, by numpy: its first channels."""
    keep = int(np.ceil(8 * width))
    h = np.maximum(x @ tensors["0.weight"][:keep].T + tensors["0.bias"][:keep], 0)
    h = np.maximum(h @ tensors["2.weight"][:keep, :keep].T + tensors["2.bias"][:keep], 0)
    return h @ tensors["4.weight"][:, :keep].T + tensors["4.bias"]


def built(method: Method[Any], context: Context, width: float) -> nn.Module:
    state = method.init(context)
    client = Client(0, 0, Size(width), 1, 10, 0)
    return method.build(context, method.extract(context, state, client))


def step_of(context: Context, choice: int, classes: Tensor | None = None) -> Step:
    """A step whose draw is known."""
    return Step(
        0,
        torch.Generator(),
        {},
        make_objective(context.task, context.tricks, classes),
        make_distillation(context.task, context.tricks, classes),
        lambda count: choice,
    )


def batch() -> Batch:
    return Batch(numbers(3, 5, 6), torch.arange(5) % 3)


# Ordered dropout


@pytest.mark.parametrize(("choice", "width"), [(0, 0.25), (1, 0.5), (2, 1.0)])
@pytest.mark.parametrize("method", [FjORD(), HeteroFL(scaler=False, ordered_dropout=True)], ids=["fjord", "heterofl"])
def test_the_loss_is_that_of_the_drawn_width(method: Method[Any], choice: int, width: float) -> None:
    context = context_of(method, [0.25, 0.5, 1.0])
    module = built(method, context, 1.0)
    x, y = batch()
    tensors = {name: tensor.numpy() for name, tensor in context.start().items()}
    expected = crossed(forward(tensors, x.numpy(), width), np.eye(3)[y.numpy()])
    loss = method.loss(module, Batch(x, y), step_of(context, choice))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)


def test_heterofl_with_dropout_scales_the_drawn_width_by_its_own() -> None:
    method = HeteroFL(ordered_dropout=True)
    context = context_of(method, [0.5, 1.0])
    module = built(method, context, 1.0)
    x, y = batch()
    t = {name: tensor.numpy() for name, tensor in context.start().items()}
    h = np.maximum((x.numpy() @ t["0.weight"][:4].T + t["0.bias"][:4]) / 0.5, 0)
    h = np.maximum((h @ t["2.weight"][:4, :4].T + t["2.bias"][:4]) / 0.5, 0)
    expected = crossed(h @ t["4.weight"][:, :4].T + t["4.bias"], np.eye(3)[y.numpy()])
    loss = method.loss(module, Batch(x, y), step_of(context, 0))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)


def test_a_client_draws_every_width_up_to_its_own_equally_often() -> None:
    context = context_of(FjORD(), [0.25, 0.5, 0.75, 1.0])
    module = built(FjORD(), context, 0.75)
    assert isinstance(module, Nested)
    assert len(module) == 3
    step = Step(0, torch.Generator().manual_seed(0), {}, lambda network, batch: torch.zeros(()))
    draws = np.bincount([step.choose(len(module)) for _ in range(3000)])
    assert len(draws) == 3
    assert (abs(draws - 1000) < 100).all()


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
def test_a_client_holds_its_own_widths_tensors_and_no_more(width: float) -> None:
    context = context_of(FjORD(), [0.25, 0.5, 1.0])
    own = sum(parameter.numel() for parameter in context.skeleton(width).parameters())
    assert sum(parameter.numel() for parameter in built(FjORD(), context, width).parameters()) == own


# Self-distillation


@pytest.mark.parametrize(("choice", "width"), [(0, 0.25), (1, 0.5)])
def test_distillation_adds_the_crossed_entropy_of_the_drawn_width_with_the_largest(choice: int, width: float) -> None:
    method = FjORD(distillation=True)
    context = context_of(method, [0.25, 0.5, 1.0])
    module = built(method, context, 1.0)
    x, y = batch()
    tensors = {name: tensor.numpy() for name, tensor in context.start().items()}
    full = forward(tensors, x.numpy(), 1.0)
    partial = forward(tensors, x.numpy(), width)
    expected = crossed(full, np.eye(3)[y.numpy()]) + crossed(partial, softmax(full))
    loss = method.loss(module, Batch(x, y), step_of(context, choice))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)


def test_the_largest_width_is_not_its_own_teacher_and_a_teacher_learns_nothing_from_its_pupil() -> None:
    method = FjORD(distillation=True)
    context = context_of(method, [0.5, 1.0])
    module = built(method, context, 1.0)
    plain = make_objective(context.task, context.tricks, None)
    assert torch.equal(method.loss(module, batch(), step_of(context, 1)), plain(module, batch()))
    gradients = []
    for loss in (method.loss(module, batch(), step_of(context, 0)), plain(module, batch())):
        module.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(module.get_parameter("network.0.weight").grad)
    torch.testing.assert_close(gradients[0][4:], gradients[1][4:])  # channels that only the teacher has
    assert not torch.allclose(gradients[0][:4], gradients[1][:4])


def test_a_masked_loss_masks_teacher_and_pupil() -> None:
    context = context_of(FjORD(), [1.0], tricks={"masked_loss": True})
    classes = torch.tensor([True, False, True])
    output, teacher = numbers(1, 4, 3), numbers(2, 4, 3)
    found = make_distillation(context.task, context.tricks, classes)(Fixed(output), batch(), teacher)
    expected = crossed(masked(output, classes, -1).numpy(), softmax(masked(teacher, classes, -1).numpy()))
    np.testing.assert_allclose(float(found), expected, rtol=1e-5)


class Fixed(nn.Module):
    """Always the same answer."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer


def test_distillation_of_every_task_is_least_where_pupil_and_teacher_agree() -> None:
    for name, shape in {
        "classification": (6, 4),
        "next-token": (2, 3, 4),
        "multilabel": (6, 4),
        "regression": (6, 1),
    }.items():
        teacher, start = numbers(1, *shape), numbers(2, *shape)
        pupil = teacher.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task(name).distillation(pupil, teacher), pupil)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)
        assert task(name).distillation(start, teacher) > task(name).distillation(teacher, teacher)


# Aggregation


def test_fjord_averages_each_entry_over_its_holders_and_statistics_by_width() -> None:
    method = FjORD()
    context = context_of(method, [0.25, 0.5, 1.0], model=normed())
    state = method.init(context)
    fleet = [{"width": 0.25, "samples": 2}, {"width": 0.5, "samples": 5}, {"width": 0.25, "samples": 1}]
    updates = answers(context, method, state, fleet)
    for update in updates:  # counters are whole numbers
        for name, tensor in update.tensors.items():
            if name.endswith("num_batches_tracked"):
                update.tensors[name] = (tensor.abs() * 10).long()
    after = method.aggregate(context, state, iter(updates))
    for name, old in state.tensors.items():
        parts = [(u.tensors[f"network.{name}"].numpy(), float(u.samples), None) for u in updates]
        np.testing.assert_allclose(after.tensors[name], mean_over_holders(old.numpy(), parts), rtol=1e-5, atol=1e-6)
    small, middle, least = (update.tensors for update in updates)
    of_small = (
        2 * small["network.1.running_mean"] + 5 * middle["inner.0.1.running_mean"] + least["network.1.running_mean"]
    )
    np.testing.assert_allclose(after.statistics["0.25"]["1.running_mean"], of_small / 8, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.statistics["0.5"]["1.running_mean"], middle["network.1.running_mean"])
    assert torch.equal(after.statistics["1.0"]["1.running_mean"], state.statistics["1.0"]["1.running_mean"])


def test_a_customised_width_has_its_own_statistics_and_one_between_those_of_the_next_larger() -> None:
    method = FjORD()
    context = context_of(method, [0.5, 1.0], model=normed())
    state = method.init(context)
    for i, (key, statistics) in enumerate(state.statistics.items()):
        statistics["1.running_mean"] = numbers(i, round(8 * float(key)))
    for width, source in ((0.5, "0.5"), (1.0, "1.0"), (0.25, "0.5"), (0.75, "1.0")):
        mean = method.customize(context, state, Size(width)).get_buffer("1.running_mean")
        assert torch.equal(mean, state.statistics[source]["1.running_mean"][: round(8 * width)])


def test_a_width_above_the_trained_ones_is_refused() -> None:
    context = context_of(FjORD(), [0.25, 0.5])
    with pytest.raises(MethodError, match=r"width 0\.75 was asked for; this fleet trained widths up to 0\.5"):
        FjORD().customize(context, FjORD().init(context), Size(0.75))


def test_a_tensor_of_no_part_is_refused() -> None:
    context = context_of(FjORD(), [0.5, 1.0])
    state = FjORD().init(context)
    (update,) = answers(context, FjORD(), state, [{"width": 0.5, "samples": 1}])
    update.tensors["stray"] = torch.zeros(1)
    with pytest.raises(MethodError, match="'stray'; allowed: names that begin with"):
        FjORD().aggregate(context, state, [update])


# FLANC with ordered dropout


def composed(context: Context, state: Any, width: float) -> dict[str, Array]:
    """The tensors of a width's network by numpy: each weight is U V."""
    key = str(width)
    tensors = {name: tensor.numpy() for name, tensor in (state.dense[key] | state.shared).items()}
    for name, u in state.coefficients[key].items():
        flat = u.numpy().reshape(-1, u.shape[2]) @ state.basis[name].numpy()  # (T S/R1, R1)
        tensors[name] = flat.reshape(u.shape[0], -1)
    return tensors


@pytest.mark.parametrize(("choice", "width"), [(0, 0.25), (1, 0.5), (2, 1.0)])
def test_flanc_with_dropout_trains_the_drawn_width_and_the_one_basis(choice: int, width: float) -> None:
    method = FLANC(ordered_dropout=True, orthogonality=0.0, basis_inputs=0.25, basis_size=0.5)
    context = context_of(method, [0.25, 0.5, 1.0])
    state, module = method.init(context), built(method, context, 1.0)
    x, y = batch()
    expected = crossed(forward(composed(context, state, width), x.numpy(), width), np.eye(3)[y.numpy()])
    loss = method.loss(module, Batch(x, y), step_of(context, choice))
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    drawn = "largest." if choice == 2 else f"inner.{choice}."
    assert {name for name in trained if ".coefficients." in name} == {f"{drawn}coefficients.2:weight"}
    assert [name for name in trained if ".basis." in name] == ["largest.basis.2:weight"]


def test_flanc_with_dropout_averages_coefficients_over_all_clients_that_hold_them() -> None:
    method = FLANC(ordered_dropout=True, basis_inputs=0.25, basis_size=0.5)
    context = context_of(method, [0.25, 0.5, 1.0])
    state = method.init(context)
    updates = answers(context, method, state, [{"width": 0.25, "samples": 2}, {"width": 0.5, "samples": 5}])
    small, large = (update.tensors for update in updates)
    after = method.aggregate(context, state, iter(updates))
    name = "coefficients.2:weight"
    mean = (2 * small[f"largest.{name}"] + 5 * large[f"inner.0.{name}"]) / 7
    np.testing.assert_allclose(after.coefficients["0.25"]["2.weight"], mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.coefficients["0.5"]["2.weight"], large[f"largest.{name}"])
    assert torch.equal(after.coefficients["1.0"]["2.weight"], state.coefficients["1.0"]["2.weight"])
    basis = (2 * small["largest.basis.2:weight"] + 5 * large["largest.basis.2:weight"]) / 7
    np.testing.assert_allclose(after.basis["2.weight"], basis, rtol=1e-5, atol=1e-6)
    head = (2 * small["largest.network.4.weight"] + 5 * large["inner.0.network.4.weight"]) / 7
    np.testing.assert_allclose(after.dense["0.25"]["4.weight"], head, rtol=1e-5, atol=1e-6)


def test_flanc_with_dropout_costs_the_coefficients_of_every_width_up_to_the_clients() -> None:
    def costs(method: FLANC, width: float) -> Any:
        context = context_of(method, [0.25, 0.5, 1.0])
        return measure(context, method, method.init(context), Size(width), batch())

    plain, dropped = (FLANC(ordered_dropout=on, basis_inputs=0.25, basis_size=0.5) for on in (False, True))
    context = context_of(plain, [0.25, 0.5, 1.0])
    state = plain.init(context)
    own = {
        w: sum(t.numel() for t in (*state.coefficients[w].values(), *state.dense[w].values())) for w in ("0.25", "0.5")
    }
    extra = costs(dropped, 1.0).parameters - costs(plain, 1.0).parameters
    assert extra == own["0.25"] + own["0.5"]
    assert costs(dropped, 1.0).bytes_up - costs(plain, 1.0).bytes_up > 4 * extra
    assert costs(dropped, 0.25).parameters == costs(plain, 0.25).parameters
    works = [costs(plain, width).training_macs for width in (0.25, 0.5, 1.0)]
    assert abs(costs(dropped, 1.0).training_macs - sum(works) / 3) <= 1


def test_a_shared_stem_is_one_tensor_in_all_widths() -> None:
    method = FLANC(ordered_dropout=True, basis_inputs=0.25, basis_size=0.5)
    context = context_of(method, [0.5, 1.0], model=Kept())
    module = built(method, context, 1.0)
    assert isinstance(module, ComposedWidths)
    large, small = module.largest, module.inner[0]
    assert large.network.stem.weight is small.network.stem.weight  # type: ignore[union-attr]
    assert large.network.norm.running_mean is small.network.norm.running_mean  # type: ignore[union-attr]
    assert "inner.0.network.norm.running_mean" not in tensors_of(module)


class Kept(nn.Module):
    """A stem that no width changes, since the input is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)) + x
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


# Costs


@pytest.mark.parametrize("method", [FjORD(), HeteroFL(ordered_dropout=True)], ids=["fjord", "heterofl"])
def test_a_step_costs_the_mean_work_and_the_most_memory_of_the_widths_that_may_be_drawn(method: Method[Any]) -> None:
    context = context_of(method, [0.25, 0.5, 1.0])
    x, y = (tensor.to("meta") for tensor in batch())
    plain = HeteroFL(scaler=isinstance(method, HeteroFL))
    alone = [step_cost(context, plain, hollow(built(plain, context, width)), Batch(x, y)) for width in (0.25, 0.5, 1.0)]
    work, held = step_cost(context, method, hollow(built(method, context, 1.0)), Batch(x, y))
    assert work == sum(macs for macs, _ in alone) // 3
    assert held == max(bytes_held for _, bytes_held in alone)


# Equivalences and runs


@pytest.mark.parametrize("batch_norm", ["calibrated", "tracked"])
@pytest.mark.parametrize("distillation", [False, True])
def test_fjord_with_one_width_is_fedavg_bit_for_bit(tmp_path: Path, batch_norm: str, distillation: bool) -> None:
    more = {"tricks": {"batch_norm": batch_norm}}
    ours = digits(FjORD(distillation), [1.0], tmp_path / "fjord", model=normalised_network(), **more)
    theirs = digits(FedAvg(), [1.0], tmp_path / "fedavg", model=normalised_network(), **more)
    assert same(bare(ours), bare(theirs))


@pytest.mark.parametrize("kind", [HeteroFL, FLANC])
def test_dropout_over_one_width_is_none_bit_for_bit(tmp_path: Path, kind: type[HeteroFL] | type[FLANC]) -> None:
    dropped = digits(kind(ordered_dropout=True), [0.5], tmp_path / "dropped")
    assert same(dropped, digits(kind(), [0.5], tmp_path / "plain"))


@pytest.mark.parametrize(
    "method",
    fast_if(
        lambda method: method == FjORD(distillation=True),
        [FjORD(), FjORD(distillation=True), HeteroFL(ordered_dropout=True), FLANC(ordered_dropout=True)],
    ),
    ids=["fjord", "distilled", "heterofl", "flanc"],
)
def test_digits_are_learned_at_every_width(tmp_path: Path, method: Method[Any]) -> None:
    run = az.Experiment(
        data="digits",
        clients=8,
        model=normalised_network(),
        method=method,
        devices={"capacities": [0.5, 1.0]},
        training={"learning_rate": 0.1, "batch_size": 32, "local_epochs": 2},
        rounds=8,
        evaluate_every=8,
    ).run(out=tmp_path / "run")
    assert min(run.history[-1]["accuracy"].values()) > 0.7


def test_two_worker_processes_give_the_same_bits(tmp_path: Path) -> None:
    runs = [
        digits(FjORD(distillation=True), [0.5, 1.0], tmp_path / engine["name"], engine=engine)
        for engine in ({"name": "inprocess"}, {"name": "processes", "workers": 2})
    ]
    assert same(*runs)
