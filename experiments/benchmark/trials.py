"""Trials of ideas for a method of our own, judged on clients' held-out data alone: "3 classes" of cifar.toml.

    python experiments/benchmark/trials.py heterofl
    python experiments/benchmark/trials.py ladder data.split=dirichlet data.alpha=0.3
    python experiments/benchmark/trials.py ladder tricks.server_momentum=0.5 seed=1
    python experiments/benchmark/trials.py heterofl damping=expected

A trial has equal tricks, 60 rounds and seed 0, unless it says otherwise. Every size is measured on what all clients
hold out together (2,500 samples), with batch-norm statistics as clients estimate them. It prints a line for
trials.csv, where words stand for the options, and one more for every average of the server's states.

A key with a dot is one of the experiment file. The others are ideas that are not part of anysize:

    averages=0.8,0.9        measure exponential averages of the server's states with these decays too
    damping=expected        an entry's step by the samples behind it, over their mean so far; at most twice the step
    damping=total           an entry's step by the root of the samples behind it, over those of the whole round
    correction=0.3          FedCM (Xu et al. 2021): this much of the own gradient, the rest is the last round's mean
    memory=1                FedNTD (Lee et al. 2022): this much distillation of the received network's answers, over the
                            classes that are not the label
    rate_by_width=0.5       clients of width p multiply the learning rate by p to the power of minus this
    absent=out              classes that a client does not have are left out of its softmax, instead of zero in it
    prior=1                 logit adjustment (Menon et al. 2021; FedLC, Zhang et al. 2022): this much of the log of a
                            client's share of each class is added to its logits; without classes that it has not
    weight_by_width=1       clients of width p count p to the power of this in the mean
    scaffold=1              SCAFFOLD (Karimireddy et al. 2020), entry by entry: this much of the difference between the
                            mean gradient of all holders and the client's own at its last turn
    varp=1                  FedVARP (Jhunjhunwala et al. 2022), entry by entry: clients that are not in the round count
                            with this much of their last step
    dyn=0.1                 FedDyn (Acar et al. 2021), entry by entry, with this strength
    entry_momentum=0.5      server momentum of this times the fraction of the clients that hold an entry
    adaptive=0.01           FedAdam (Reddi et al. 2021) with this rate, entry by entry, where a round holds it
    pupil=0.5               of `ladder`: how much the smaller width's loss counts
    beside=smallest         of `ladder`: the smaller width beside the own one is always the smallest, or the `next`;
                            `sandwich`: two of them, the smallest and one drawn between it and the own
    mutual=0.3              of `ladder`: the own width also learns from the smaller one's answers, this much
    order=magnitude         after every round, units change places: those with the largest weights come first, so that
                            small widths have them (the choice of `fiarse`; the full network computes the same)
    norms=own               of `ladder`: every width has weights and biases of its own in norm layers
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from anysize.client import objectives, step, work
from anysize.client.batches import draw
from anysize.client.process import one_thread
from anysize.config import load
from anysize.data.parts import TensorPart
from anysize.elastic.views import Nested
from anysize.engines.inprocess import InProcess
from anysize.experiment.experiment import Experiment
from anysize.methods import ladder
from anysize.methods.fiarse import magnitudes
from anysize.methods.kit import loss_and_answers
from anysize.methods.ladder import Ladder, Said
from anysize.methods.mean import StreamingMean
from anysize.methods.messages import Client, SubModel, Update
from anysize.runs.runner import with_momentum
from anysize.server.calibration import calibrate
from anysize.server.judging import on_test
from anysize.server.round import run_round
from anysize.wire import Tensors, flatten, restore

FILE = Path(__file__).parent / "cifar.toml"
RATES = {"heterofl": 0.1, "fjord": 0.1, "splitmix": 0.1, "fedrolex": 0.1}  # as tuned in the benchmark; others 0.05
TRICKS = (
    *("tricks.masked_loss=true", "tricks.classwise_head=true"),
    *('tricks.batch_norm="batch"', 'tricks.weighting="samples"'),
)
SIZES = ("0.25", "0.5", "0.75", "1.0")
MOST = 2.0  # of a damped step, in steps


def main(method: str, *given: str) -> None:
    """Run a trial, and print its lines."""
    options = {"seed": "0", "rounds": "60", "training.learning_rate": str(RATES.get(method, 0.05))}
    options |= dict(text.split("=", 1) for text in given)
    ideas = {key: options.pop(key) for key in list(options) if key in IDEAS or key == "averages"}
    experiment = made(method, options)
    correction = None
    for key, value in ideas.items():
        if key != "averages":
            correction = IDEAS[key](value, experiment) or correction
    began = time.perf_counter()
    decays = [float(text) for text in ideas.get("averages", "").split(",") if text]
    state, averages = trained(experiment, decays, correction)
    seconds = time.perf_counter() - began
    rows = {"": state} | {f"average of decay {decay:g}": own for decay, own in averages.items()}
    command = " ".join(["python experiments/benchmark/trials.py", method, *given])
    rate = experiment.config.training.learning_rate
    for words, own in rows.items():
        found = {size: round(100 * accuracy, 2) for size, accuracy in judged(experiment, own).items()}
        about = [", ".join(filter(None, [*given, words])), setting(experiment), method, f"{rate:g}"]
        about += [options["seed"], options["rounds"], *(str(found.get(size, "")) for size in SIZES)]
        mean = round(sum(found.values()) / len(found), 2)
        csv.writer(sys.stdout, lineterminator="\n").writerow([*about, mean, round(seconds, 1), command])


def setting(experiment: Experiment) -> str:
    """The name of the benchmark's setting with that split."""
    data = experiment.config.data
    if data.split == "dirichlet":
        return f"Dirichlet {data.alpha:g}"
    return f"{data.classes_per_client} classes" if data.split == "classes" else data.split


def made(method: str, options: Mapping[str, str]) -> Experiment:
    """The benchmark's setting "3 classes" with a method and options."""
    text = FILE.read_text(encoding="utf-8").partition("[compare]")[0] + f'\n[method]\nname = "{method}"\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"
        path.write_text(text, encoding="utf-8")
        return Experiment.from_config(load(path, [*TRICKS, *(f"{key}={value}" for key, value in options.items())]))


def trained(
    experiment: Experiment, decays: list[float], after_round: Callable[[Any, Any, float], Any] | None
) -> tuple[Any, dict[float, Any]]:
    """The state after the last round, and the averages of all states; the rounds are those of `anysize run`."""
    config, context, method, shares = experiment.config, experiment.context, experiment.method, experiment.shares
    costs = {size.label: experiment.cost(size).training_macs for size in context.sizes}
    engine, buffers = InProcess(context, method, shares, {}), dict(context.template.named_buffers())
    state, momentum, averages = method.init(context), dict[str, Tensor](), dict[float, Tensors]()
    for number in range(1, config.rounds + 1):
        rate = config.training.rate(number - 1, config.rounds)
        after, _ = run_round(context, method, state, participants(experiment, number, costs), engine, rate)
        if after_round is not None:
            after = after_round(state, after, rate) or after
        state, momentum = with_momentum(state, after, momentum, context.tricks.server_momentum, buffers)
        flat, note = flatten(state)
        for decay in decays:
            weight = (1 - decay) / (1 - decay**number)  # so that the start has no part in it
            own = averages.setdefault(decay, flat)
            averages[decay] = {n: own[n].lerp(t, weight) if t.is_floating_point() else t for n, t in flat.items()}
    return state, {decay: restore(type(state), own, note) for decay, own in averages.items()}


def participants(experiment: Experiment, number: int, costs: Mapping[str, int]) -> list[Client]:
    """The clients of a round in the order of aggregation: the most work first."""
    fleet, samples = experiment.fleet, experiment.shares.samples
    found = [(c, experiment.size_of_group[fleet.group_of(c, number).key]) for c in fleet.participants(number)]
    found.sort(key=lambda entry: (-costs[entry[1].label] * samples(entry[0]), entry[0]))
    seed = experiment.config.seed
    return [Client(c, i, size, number, samples(c), seed) for i, (c, size) in enumerate(found)]


def judged(experiment: Experiment, state: Any) -> dict[str, float]:
    """The accuracy of every size on what all clients hold out."""
    context, method, shares = experiment.context, experiment.method, experiment.shares
    held = [shares.share(client).held_out for client in range(len(shares))]
    batches = [draw(part, torch.arange(len(part))) for part in held if part is not None]
    order = torch.randperm(sum(len(batch.y) for batch in batches), generator=torch.Generator().manual_seed(0))
    part = TensorPart(torch.cat([b.x for b in batches])[order], torch.cat([b.y for b in batches])[order])
    engine = InProcess(context, method, shares, {})
    statistics = calibrate(experiment, state, engine, experiment.fleet, experiment.config.rounds)
    found = on_test(context, method, state, part, statistics, 500)
    return {size: metrics["accuracy"] for size, metrics in found.items()}


# The ideas. Each changes anysize in this process.


def damped(mode: str, experiment: Experiment) -> None:
    plain, seen = StreamingMean.result, dict[str, tuple[Tensor, int]]()

    def result(self: StreamingMean) -> Tensors:
        after = plain(self)
        most = max((float(weight.max()) for weight in self._weight.values()), default=0.0)
        for name, weight in self._weight.items():
            before = self._before[name]
            if not before.is_floating_point():
                continue
            if mode == "total":
                factor = (weight / most).sqrt()
            else:
                total, rounds = seen.get(name, (torch.zeros_like(before), 0))
                seen[name] = total + weight, rounds + 1
                factor = (weight * (rounds + 1) / (total + weight).clamp_min(1e-9)).clamp_max(MOST)
            after[name] = before + (after[name] - before) * factor
        return after

    StreamingMean.result = result  # type: ignore[method-assign]


def reach_of(experiment: Experiment, client: int = 0) -> float:
    """How far a constant gradient of one moves an entry in a client's round, with momentum, at rate one."""
    training = experiment.config.training
    steps = -(-int(experiment.shares.samples(client)) // training.batch_size)
    return sum((1 - training.momentum**k) / (1 - training.momentum) for k in range(1, steps + 1))


def corrected(own: str, experiment: Experiment) -> Callable[[Any, Any, float], None]:
    share, mean = float(own), dict[str, Tensor]()
    make, take = work.make_optimizer, step.take_step
    reach = reach_of(experiment)

    def make_optimizer(context: Any, method: Any, module: nn.Module, rate: float) -> torch.optim.Optimizer:
        made: Any = make(context, method, module, rate)
        made.means = {}
        for name, parameter in module.named_parameters() if mean else ():
            full = mean[name if name in mean else name.removeprefix("network.")]
            made.means[parameter] = full[tuple(slice(size) for size in parameter.shape)]
        return made  # type: ignore[no-any-return]

    def take_step(optimizer: Any) -> None:
        for parameter, gradient in optimizer.means.items():
            if parameter.grad is not None:
                parameter.grad = share * parameter.grad + (1 - share) * gradient
        take(optimizer)

    def after_round(before: Any, after: Any, rate: float) -> None:
        for name, tensor in after.tensors.items():
            mean[name] = (before.tensors[name] - tensor) / (max(rate, 1e-9) * reach)

    work.make_optimizer, step.take_step = make_optimizer, take_step
    return after_round


def remembering(strength: str, experiment: Experiment) -> None:
    kind = type(experiment.method)
    plain = kind.loss

    def loss(self: Any, module: nn.Module, batch: Any, step: Any) -> Tensor:
        network, prefix = (module.network, "network.") if isinstance(module, Nested) else (module, "")
        answers: list[Tensor] = []
        heard = network.register_forward_hook(lambda network, inputs, output: answers.append(output))
        own = plain(self, module, batch, step)
        heard.remove()
        received = {name.removeprefix(prefix): t for name, t in step.received.items() if name.startswith(prefix)}
        with torch.no_grad():
            teacher = functional_call(network, received, (batch.x,))
        others = ~functional.one_hot(batch.y, teacher.shape[1]).bool()
        said, known = (t[others].reshape(len(batch.y), -1).log_softmax(1) for t in (answers[0], teacher))
        gap: Tensor = functional.kl_div(said, known, log_target=True, reduction="batchmean")
        return own + float(strength) * gap

    kind.loss = loss  # type: ignore[method-assign]


def faster_if_narrow(power: str, experiment: Experiment) -> None:
    plain = InProcess.perform

    def faster(message: SubModel) -> SubModel:
        rate = message.ticket.rate
        own = None if rate is None else rate * message.width ** -float(power)
        return replace(message, ticket=replace(message.ticket, rate=own))

    def perform(self: InProcess, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        return plain(self, map(faster, sub_models))

    InProcess.perform = perform  # type: ignore[method-assign]


def without_absent(how: str, experiment: Experiment) -> None:
    def masked(output: Tensor, classes: Tensor, class_axis: int | None) -> Tensor:
        return output.masked_fill(~classes.reshape(1, -1), -1e4)

    objectives.masked = masked


def with_prior(strength: str, experiment: Experiment) -> None:
    plain, shares = work.train, dict[str, Tensor]()

    def train(context: Any, method: Any, message: SubModel, share: Any, kept: Any) -> Update:
        counts = torch.bincount(share.train.labels().long(), minlength=context.classes).float()
        shares["own"] = float(strength) * (counts / counts.sum()).log().clamp_min(-1e4)
        return plain(context, method, message, share, kept)

    work.train = train
    objectives._seen = lambda task, mask: lambda output: output + shares.get("own", 0.0)  # type: ignore[assignment]


def wide_count_more(power: str, experiment: Experiment) -> None:
    plain = Update.weight

    def weight(self: Update, tricks: Any) -> float:
        return plain(self, tricks) * self.width ** float(power)

    Update.weight = weight  # type: ignore[method-assign]


class Memory:
    """What clients remember of their last turn, and its mean over all holders of an entry, at rate one."""

    def __init__(self, experiment: Experiment) -> None:
        context, fleet = experiment.context, experiment.fleet
        self.own: dict[int, Tensors] = {}
        self.mean = {name: torch.zeros_like(tensor) for name, tensor in context.start().items()}
        self.holders = {name: torch.zeros_like(tensor) for name, tensor in self.mean.items()}
        for client in range(len(experiment.shares)):
            kept = context.axes.kept(experiment.size_of_group[fleet.group_of(client, 1).key].width)
            for name, count in self.holders.items():
                count[window(context.axes.shape(name, kept))] += 1

    def replace(self, client: int, new: Tensors) -> Tensors:
        """The difference from what the client remembered, which the mean takes over."""
        old = self.own.get(client)
        change = {name: tensor - old[name] if old else tensor for name, tensor in new.items()}
        self.own[client] = new
        for name, tensor in change.items():
            at = window(tensor.shape)
            self.mean[name][at] += tensor / self.holders[name][at]
        return change


def window(shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


def moved(message: SubModel, update: Update, scale: float) -> Tensors:
    """How far a client moved each entry, over a scale, by the full network's names."""
    return {
        name.removeprefix("network."): (tensor - message.tensors[name]) / scale
        for name, tensor in update.tensors.items()
        if tensor.is_floating_point()
    }


def steered(
    correction: Callable[[int, str, Tensor], Tensor | None], learned: Callable[[SubModel, Update], None]
) -> None:
    """Adds to every gradient of a client what `correction` says, and calls `learned` after its training."""
    plain, take, make = work.train, step.take_step, work.make_optimizer
    at: dict[str, Any] = {}

    def train(context: Any, method: Any, message: SubModel, share: Any, kept: Any) -> Update:
        at["client"] = message.ticket.client
        update = plain(context, method, message, share, kept)
        learned(message, update)
        return update

    def make_optimizer(context: Any, method: Any, module: nn.Module, rate: float) -> torch.optim.Optimizer:
        at["names"] = [(name.removeprefix("network."), parameter) for name, parameter in module.named_parameters()]
        return make(context, method, module, rate)

    def take_step(optimizer: Any) -> None:
        for name, parameter in at["names"]:
            more = None if parameter.grad is None else correction(at["client"], name, parameter.detach())
            if more is not None:
                parameter.grad = parameter.grad + more
        take(optimizer)

    work.train, work.make_optimizer, step.take_step = train, make_optimizer, take_step


def scaffold(strength: str, experiment: Experiment) -> Callable[[Any, Any, float], None]:
    memory, pending = Memory(experiment), dict[int, Tensors]()

    def correction(client: int, name: str, parameter: Tensor) -> Tensor | None:
        if client not in memory.own:
            return None
        return float(strength) * (memory.own[client][name] - memory.mean[name][window(parameter.shape)])

    def learned(message: SubModel, update: Update) -> None:
        client = message.ticket.client
        scale = (message.ticket.rate or 1.0) * reach_of(experiment, client)
        pending[client] = moved(message, update, max(scale, 1e-9))

    def after_round(before: Any, after: Any, rate: float) -> None:
        for client in list(pending):
            memory.replace(client, pending.pop(client))

    steered(correction, learned)
    return after_round


def varp(strength: str, experiment: Experiment) -> Callable[[Any, Any, float], Any]:
    memory, share, plain = Memory(experiment), float(strength), work.train
    waiting: dict[int, Tensors] = {}

    def train(context: Any, method: Any, message: SubModel, data: Any, kept: Any) -> Update:
        update = plain(context, method, message, data, kept)
        client, rate = message.ticket.client, max(message.ticket.rate or 1.0, 1e-9)
        waiting[client] = moved(message, update, rate)
        old = memory.own.get(client, {})
        tensors = dict(update.tensors)
        for name in tensors:
            if name.removeprefix("network.") in old:
                tensors[name] = tensors[name] - share * rate * old[name.removeprefix("network.")]
        return replace(update, tensors=tensors)

    def after_round(before: Any, after: Any, rate: float) -> Any:
        tensors = {n: t + share * rate * memory.mean[n] if n in memory.mean else t for n, t in after.tensors.items()}
        for client in list(waiting):
            memory.replace(client, waiting.pop(client))
        return replace(after, tensors=tensors)

    work.train = train
    return after_round


def dynamic(strength: str, experiment: Experiment) -> Callable[[Any, Any, float], Any]:
    alpha, memory = float(strength), Memory(experiment)
    total = {name: torch.zeros_like(tensor) for name, tensor in memory.mean.items()}
    received: dict[str, Tensor] = {}
    waiting: dict[int, Tensors] = {}

    def correction(client: int, name: str, parameter: Tensor) -> Tensor:
        pull = alpha * (parameter - received[name][window(parameter.shape)])
        own = memory.own.get(client)
        return pull if own is None else pull + alpha * own[name]

    def learned(message: SubModel, update: Update) -> None:
        waiting[message.ticket.client] = moved(message, update, 1.0)

    def after_round(before: Any, after: Any, rate: float) -> Any:
        for client, change in waiting.items():
            old = memory.own.get(client)
            memory.own[client] = {name: tensor + old[name] if old else tensor for name, tensor in change.items()}
            for name, tensor in change.items():
                at = window(tensor.shape)
                total[name][at] += tensor / memory.holders[name][at]
        waiting.clear()
        tensors = {n: t + total[n] if n in total else t for n, t in after.tensors.items()}
        received.update(tensors)
        return replace(after, tensors=tensors)

    received.update({name: tensor.clone() for name, tensor in experiment.context.start().items()})
    steered(correction, learned)
    return after_round


def by_entry(strength: str, experiment: Experiment) -> Callable[[Any, Any, float], Any]:
    holders = Memory(experiment).holders
    share = {name: float(strength) * count / len(experiment.shares) for name, count in holders.items()}
    speed = {name: torch.zeros_like(count) for name, count in holders.items()}

    def after_round(before: Any, after: Any, rate: float) -> Any:
        tensors = dict(after.tensors)
        for name, old in before.tensors.items():
            if old.is_floating_point():
                speed[name] = share[name] * speed[name] + (tensors[name] - old)
                tensors[name] = old + speed[name]
        return replace(after, tensors=tensors)

    return after_round


def adaptive(rate: str, experiment: Experiment) -> Callable[[Any, Any, float], Any]:
    first, second = dict[str, Tensor](), dict[str, Tensor]()

    def after_round(before: Any, after: Any, client_rate: float) -> Any:
        tensors, top = dict(after.tensors), experiment.config.training.rate(0, experiment.config.rounds)
        for name, old in before.tensors.items():
            if not old.is_floating_point():
                continue
            step = tensors[name] - old
            m, v = first.setdefault(name, step * 0), second.setdefault(name, torch.full_like(old, 1e-6))
            first[name] = torch.where(step == 0, m, 0.9 * m + 0.1 * step)
            second[name] = torch.where(step == 0, v, 0.99 * v + 0.01 * step.square())
            moved = first[name] / (second[name].sqrt() + 1e-3)
            tensors[name] = old + torch.where(step == 0, step, float(rate) * client_rate / top * moved)
        return replace(after, tensors=tensors)

    return after_round


def quiet_pupil(strength: str, experiment: Experiment) -> None:
    def loss(self: Any, module: nn.Module, batch: Any, step: Any) -> Tensor:
        assert isinstance(module, Nested)
        if len(module) == 1:
            own: Tensor = step.objective(module.network, batch)
            return own
        own, answers = loss_and_answers(module.network, batch, step)
        by_labels, said = loss_and_answers(module.at(step.choose(len(module) - 1)), batch, step)
        taught = step.distillation(Said(said), batch, answers)
        return own + float(strength) * ((1 - self.teaching) * by_labels + self.teaching * taught)

    Ladder.loss = loss  # type: ignore[method-assign]


def fixed_pupil(which: str, experiment: Experiment) -> None:
    plain = Ladder.loss
    if which == "sandwich":
        Ladder.loss = sandwich  # type: ignore[method-assign]
        return

    def loss(self: Any, module: nn.Module, batch: Any, step: Any) -> Tensor:
        return plain(self, module, batch, Chosen(step, which))

    Ladder.loss = loss  # type: ignore[method-assign]


def sandwich(self: Ladder, module: nn.Module, batch: Any, step: Any) -> Tensor:
    """The own width, the smallest, and one drawn between them."""
    assert isinstance(module, Nested)
    own, answers = loss_and_answers(module.network, batch, step)
    between = len(module) - 2
    for place in [0] * (between >= 0) + [1 + step.choose(between)] * (between > 0):
        by_labels, said = loss_and_answers(module.at(place), batch, step)
        taught = step.distillation(Said(said), batch, answers)
        own = own + (1 - self.teaching) * by_labels + self.teaching * taught
    return own


def mutual(strength: str, experiment: Experiment) -> None:
    def loss(self: Any, module: nn.Module, batch: Any, step: Any) -> Tensor:
        assert isinstance(module, Nested)
        if len(module) == 1:
            alone: Tensor = step.objective(module.network, batch)
            return alone
        own, answers = loss_and_answers(module.network, batch, step)
        by_labels, said = loss_and_answers(module.at(step.choose(len(module) - 1)), batch, step)
        taught = step.distillation(Said(said), batch, answers)
        learned = step.distillation(Said(answers), batch, said)
        return own + (1 - self.teaching) * by_labels + self.teaching * taught + float(strength) * learned

    Ladder.loss = loss  # type: ignore[method-assign]


class Chosen:
    """A step whose smaller width is not drawn."""

    def __init__(self, step: Any, which: str) -> None:
        self._step, self._which = step, which

    def choose(self, count: int) -> int:
        return 0 if self._which == "smallest" else count - 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def own_norms(which: str, experiment: Experiment) -> None:
    def names(module: nn.Module) -> list[str]:
        norms = [(prefix, child) for prefix, child in module.named_modules() if isinstance(child, _NormBase)]
        return [f"{prefix}.{name}" for prefix, child in norms for name in child.state_dict()]

    ladder.statistics_names = names


def largest_first(by: str, experiment: Experiment) -> Callable[[Any, Any, float], Any]:
    groups = [group for group in experiment.context.axes.groups if not group.fixed]

    def after_round(before: Any, after: Any, rate: float) -> Any:
        tensors = dict(after.tensors)
        for group in groups:
            order = magnitudes(group, after.tensors).argsort(descending=True, stable=True)
            for member in group.members:
                units = torch.tensor(member.units)
                places = torch.arange(len(units))
                for place, unit in enumerate(order.tolist()):
                    places[units == place] = (units == unit).nonzero().flatten()
                if member.name in tensors:
                    tensors[member.name] = tensors[member.name].index_select(member.axis, places)
        return replace(after, tensors=tensors)

    return after_round


IDEAS: dict[str, Callable[[str, Experiment], Callable[[Any, Any, float], Any] | None]] = {
    "damping": damped,
    "correction": corrected,
    "memory": remembering,
    "rate_by_width": faster_if_narrow,
    "absent": without_absent,
    "prior": with_prior,
    "weight_by_width": wide_count_more,
    "scaffold": scaffold,
    "varp": varp,
    "dyn": dynamic,
    "entry_momentum": by_entry,
    "adaptive": adaptive,
    "mutual": mutual,
    "pupil": quiet_pupil,
    "beside": fixed_pupil,
    "norms": own_norms,
    "order": largest_first,
}


if __name__ == "__main__":
    with one_thread():
        main(*sys.argv[1:])
