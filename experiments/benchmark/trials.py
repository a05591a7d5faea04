"""Trials of ideas for a method of our own, judged on clients' held-out data alone: "3 classes" of cifar.toml.

    python experiments/benchmark/trials.py heterofl
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

from anysize.client import objectives, step, work
from anysize.client.batches import draw
from anysize.client.process import one_thread
from anysize.config import load
from anysize.data.parts import TensorPart
from anysize.elastic.views import Nested
from anysize.engines.inprocess import InProcess
from anysize.experiment.experiment import Experiment
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
        found = [round(100 * accuracy, 2) for accuracy in judged(experiment, own)]
        about = [", ".join(filter(None, [*given, words])), method, f"{rate:g}", options["seed"], options["rounds"]]
        mean = round(sum(found) / len(found), 2)
        csv.writer(sys.stdout, lineterminator="\n").writerow([*about, *found, mean, round(seconds, 1), command])


def made(method: str, options: Mapping[str, str]) -> Experiment:
    """The benchmark's setting "3 classes" with a method and options."""
    text = FILE.read_text(encoding="utf-8").partition("[compare]")[0] + f'\n[method]\nname = "{method}"\n'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"
        path.write_text(text, encoding="utf-8")
        return Experiment.from_config(load(path, [*TRICKS, *(f"{key}={value}" for key, value in options.items())]))


def trained(
    experiment: Experiment, decays: list[float], after_round: Callable[[Any, Any, float], None] | None
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
            after_round(state, after, rate)
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


def judged(experiment: Experiment, state: Any) -> list[float]:
    """The accuracy of every size on what all clients hold out."""
    context, method, shares = experiment.context, experiment.method, experiment.shares
    held = [shares.share(client).held_out for client in range(len(shares))]
    batches = [draw(part, torch.arange(len(part))) for part in held if part is not None]
    order = torch.randperm(sum(len(batch.y) for batch in batches), generator=torch.Generator().manual_seed(0))
    part = TensorPart(torch.cat([b.x for b in batches])[order], torch.cat([b.y for b in batches])[order])
    engine = InProcess(context, method, shares, {})
    statistics = calibrate(experiment, state, engine, experiment.fleet, experiment.config.rounds)
    return [found["accuracy"] for found in on_test(context, method, state, part, statistics, 500).values()]


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


def corrected(own: str, experiment: Experiment) -> Callable[[Any, Any, float], None]:
    share, mean = float(own), dict[str, Tensor]()
    make, take, training = work.make_optimizer, step.take_step, experiment.config.training
    steps = -(-int(experiment.shares.samples(0)) // training.batch_size)
    # How far a constant gradient of one moves an entry in a round of so many steps with momentum, at rate one.
    reach = sum((1 - training.momentum**k) / (1 - training.momentum) for k in range(1, steps + 1))

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


IDEAS: dict[str, Callable[[str, Experiment], Callable[[Any, Any, float], None] | None]] = {
    "damping": damped,
    "correction": corrected,
    "memory": remembering,
    "rate_by_width": faster_if_narrow,
    "absent": without_absent,
}


if __name__ == "__main__":
    with one_thread():
        main(*sys.argv[1:])
