"""The laws that every method keeps: `check_method` proves them, for our methods and for yours.

    from anysize.testing import check_method

    check_method(MyMethod())            # raises one AssertionError that lists every law it breaks

A method that cannot keep a law says so in `exceptions`, with the reason; such a law is not checked.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.networks import built
from anysize.client.process import one_thread
from anysize.client.work import perform
from anysize.data import Data, to_input
from anysize.deploy.affordable import Costs
from anysize.devices.budget import UNITS
from anysize.elastic.depth import Skipped
from anysize.elastic.ensemble import Ensemble
from anysize.elastic.norm import MixedOutputs, batch_norms
from anysize.elastic.skeleton import tensors_of
from anysize.errors import AnysizeError
from anysize.experiment.experiment import evaluation_part
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.records.directory import CLIENTS
from anysize.rng import generator
from anysize.runs.experiment import Experiment
from anysize.runs.run import Run
from anysize.wire import Json, Tensors, copies, dump, flatten, load, restore

Law = Callable[["Trial"], str | None]
"""Takes a trial and gives what is wrong, or None."""


def convolutional(normalised: bool = True) -> nn.Module:
    """A small network of torch's own layers for 8 x 8 images and 4 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8) if normalised else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


@dataclass(frozen=True)
class Trial:
    """A method with a network, a fleet and data small enough to try every law in seconds."""

    method: Method[Any]
    experiment: Experiment
    context: Context
    state: Any
    again: Callable[..., Experiment]
    """The same experiment as a new process would make it; takes further keywords of `Experiment`."""
    _trained: list[Update] = field(default_factory=list, repr=False, compare=False)
    _runs: list[tuple[Run, tempfile.TemporaryDirectory[str]]] = field(default_factory=list, repr=False, compare=False)

    def client(self, position: int, size: Size) -> Client:
        """The client at a position, of a size."""
        return Client(position, position, size, 1, self.experiment.shares.samples(position), self.context.seed)

    def extract(self, client: Client) -> SubModel:
        """What the client receives, ready for its job."""
        message = self.method.extract(self.context, self.state, client)
        return replace(message, ticket=replace(message.ticket, rate=0.05))

    def clients(self) -> list[Client]:
        """One client of each size, and one more of the smallest."""
        return [self.client(i, size) for i, size in enumerate((*self.context.sizes, self.context.sizes[0]))]

    def train(self, client: Client) -> Update:
        """The client's update after local training."""
        share = self.experiment.shares.share(client.id)
        return perform(self.context.for_client(), self.method, self.extract(client), share)

    def trained(self) -> list[Update]:
        """The updates of all clients after local training, as copies: a law may find them changed."""
        if not self._trained:
            self._trained.extend(self.train(client) for client in self.clients())
        return [replace(update, tensors=copies(update.tensors)) for update in self._trained]

    def unchanged(self, client: Client) -> Update:
        """The update of a client that learned nothing."""
        message = self.extract(client)
        update = self.method.pack(self.method.build(self.context.for_client(), message), message)
        return replace(update, samples=client.samples, loss=0.0)

    def short(self, rounds: int = 2) -> Experiment:
        """The experiment again, with a few short rounds, each evaluated on the test set and on clients."""
        return self.again(
            rounds=rounds,
            evaluate_every=1,
            training={"batch_size": 8, "local_steps": 2},
            partition={"validation": 0.25},
            evaluation={"on": ["test", "clients"], "clients": 2, "calibration_clients": 2},
        )

    def run(self) -> Run:
        """The short experiment's run, made once; its directory goes with the trial."""
        if not self._runs:
            folder = tempfile.TemporaryDirectory()
            self._runs.append((self.short().run(folder.name), folder))
        return self._runs[0][0]

    def aggregate(self, updates: Sequence[Update]) -> Tensors:
        """The new state's tensors."""
        return flatten(self.method.aggregate(self.context, self.state, iter(updates)))[0]


def check_method(
    method: Method[Any],
    model: nn.Module | None = None,
    capacities: Sequence[float] = (0.25, 0.5, 1.0),
    tricks: Json | None = None,
    devices: Json | None = None,
    whole_runs: bool = True,
) -> None:
    """Raises an AssertionError that lists every law that `method` breaks.

    Args:
        method: the method, with any hyperparameters.
        model: a network for inputs (1, 8, 8) and 4 classes; by default a small convolutional one.
        capacities: the fleet's.
        tricks: the [tricks] table.
        devices: the [devices] table, instead of capacities.
        whole_runs: also try the laws about whole runs, which take seconds.

    >>> from anysize.methods import HeteroFL
    >>> check_method(HeteroFL())
    """
    with one_thread():
        trial = make_trial(method, model, capacities, tricks, devices=devices)
        left_out = {*method.excused, *(() if whole_runs else ABOUT_RUNS)}
        broken = {name: _verdict(law, trial) for name, law in LAWS.items() if name not in left_out}
    foreign = sorted(set(method.excused) - set(LAWS))
    problems = [f"{name}: {problem}" for name, problem in broken.items() if problem is not None]
    problems += [f"exceptions names '{name}', which is no law; laws: {', '.join(LAWS)}" for name in foreign]
    if problems:
        count = "1 law" if len(problems) == 1 else f"{len(problems)} laws"
        raise AssertionError(f"{type(method).__name__} breaks {count}:\n  " + "\n  ".join(problems))


def make_trial(
    method: Method[Any],
    model: nn.Module | None,
    capacities: Sequence[float],
    tricks: Json | None,
    pretrained: bool = False,
    devices: Json | None = None,
) -> Trial:
    """The trial of a method."""
    random = generator("check_method")
    x = torch.randint(256, (96, 1, 8, 8), generator=random, dtype=torch.uint8)
    y = torch.arange(96) % 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = model if model is not None else convolutional()
    again = partial(
        Experiment,
        data=Data(train=(x, y), test=(x, y)),
        clients=8,
        model=network,
        pretrained=pretrained,
        method=method,
        devices=devices or {"capacities": list(capacities)},
        training={"batch_size": 8},
        tricks=tricks,
    )
    experiment = again()
    return Trial(method, experiment, experiment.context, method.init(experiment.context), again)


def full_round_trip(trial: Trial) -> str | None:
    """At full capacity, what is built and packed again is what was extracted, bit for bit."""
    client = trial.client(0, trial.context.largest)
    return _difference(trial.extract(client).tensors, trial.unchanged(client).tensors)


def unchanged_updates(trial: Trial) -> str | None:
    """Clients that learned nothing leave the state as it was; whole numbers may count them."""
    before = flatten(trial.state)[0]
    after = trial.aggregate([trial.unchanged(client) for client in trial.clients()])
    return _difference(_learned(before), _learned(after), 1e-6)


def order_of_clients(trial: Trial) -> str | None:
    """The order of clients does not matter, but for rounding."""
    updates = trial.trained()
    return _difference(trial.aggregate(updates), trial.aggregate(updates[::-1]), 1e-5)


def scale_of_weights(trial: Trial) -> str | None:
    """Only the ratio of the clients' samples matters."""
    updates = trial.trained()
    scaled = [replace(update, samples=10 * (update.samples or 0)) for update in updates]
    return _difference(trial.aggregate(updates), trial.aggregate(scaled), 1e-5)


def inputs_untouched(trial: Trial) -> str | None:
    """Extracting, training and aggregating change neither the state nor the updates."""
    before = copies(flatten(trial.state)[0])
    updates = trial.trained()
    sent = [copies(update.tensors) for update in updates]
    trial.aggregate(updates)
    trial.method.customize(trial.context, trial.state, trial.method.sizes(trial.context)[-1])
    problems = [_difference(before, flatten(trial.state)[0])]
    problems += [_difference(old, update.tensors) for old, update in zip(sent, updates)]
    return next((problem for problem in problems if problem is not None), None)


def training_changes_something(trial: Trial) -> str | None:
    """A client's training reaches the state."""
    updates = trial.trained()
    same = _difference(flatten(trial.state)[0], trial.aggregate(updates)) is None
    return "the state after a round of training is the state before it" if same else None


def cost_is_monotone(trial: Trial) -> str | None:
    """A larger size never costs less (but for the length of its label in a message)."""
    costs = [trial.experiment.cost(size, state=trial.state).units() for size in trial.context.sizes]
    for small, large in pairwise(costs):
        for unit in small:
            if small[unit] > large[unit] + (64 if "bytes" in unit else 0):
                return f"{unit} falls from {small[unit]:g} to {large[unit]:g} with the size"
    return None


def costs_need_no_weights(trial: Trial) -> str | None:
    """What a size costs can be told from shapes alone: a device asks before it takes anything."""
    costs = Costs(trial.context.for_client(), trial.method, trial.experiment.example)
    for size in trial.context.sizes:
        told, counted = costs.units(size), trial.experiment.cost(size, state=trial.state).units()
        for unit in (unit for unit in UNITS if told[unit] != counted[unit]):
            return f"size {size.label} has {unit} = {counted[unit]:g}, and by its shapes alone {told[unit]:g}"
    return None


def survives_saving(trial: Trial) -> str | None:
    """The state is the same after saving and loading, serves clients as before, and always gives the same bytes."""
    tensors, note = flatten(trial.state)
    blob = dump(tensors, note)
    again = replace(trial, state=restore(type(trial.state), *load(blob)))
    if dump(*flatten(again.state)) != blob:
        return "saving, loading and saving again gives other bytes"
    problems = [_difference(tensors, flatten(again.state)[0])]
    problems += [_difference(trial.extract(c).tensors, again.extract(c).tensors) for c in trial.clients()]
    return next((problem for problem in problems if problem is not None), None)


def same_seed_same_bits(trial: Trial) -> str | None:
    """Twice the same gives the same bits."""
    first = trial.aggregate(trial.trained())
    second = trial.aggregate([trial.train(client) for client in trial.clients()])
    return _difference(first, second)


def reused_networks_are_like_new(trial: Trial) -> str | None:
    """A network that is loaded with another client's tensors trains like one that is built for it."""
    if not trial.method.reusable:
        return None
    *_, last = trial.clients()  # of the first one's size, so that it trained in the first one's network
    context = replace(trial.context.for_client(), built={})
    alone = perform(context, trial.method, trial.extract(last), trial.experiment.shares.share(last.id))
    problem = _difference(alone.tensors, trial.trained()[-1].tensors)
    return None if problem is None else f"{problem}; set reusable = False if `build` reads more than the tensors"


def updates_stream_once(trial: Trial) -> str | None:
    """`aggregate` takes an iterator, draws each update once and all of them."""
    updates = trial.trained()
    drawn = []

    def stream() -> Iterator[Update]:
        for position, update in enumerate(updates):
            drawn.append(position)
            yield update

    trial.method.aggregate(trial.context, trial.state, stream())
    return None if drawn == list(range(len(updates))) else f"drew updates {drawn} of {len(updates)}"


def misfits_are_refused(trial: Trial) -> str | None:
    """An update with a tensor of another shape, or with a number that is not finite, is refused, not averaged."""
    update = trial.unchanged(trial.clients()[0])
    name, tensor = max(update.tensors.items(), key=lambda item: item[1].numel())
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = torch.nan
    for wrong, why in ((spoiled, "with NaN"), (tensor[:1], f"of shape {tuple(tensor[:1].shape)}")):
        try:
            trial.aggregate([replace(update, tensors=update.tensors | {name: wrong})])
        except AnysizeError:
            continue
        return f"{name} {why} was taken instead of {tuple(tensor.shape)}"
    return None


def customised_is_ordinary(trial: Trial) -> str | None:
    """A customised network of any size consists of the model's own layer types, or is a mean of such; and it runs."""
    x = torch.rand(3, 1, 8, 8, generator=generator("customised_is_ordinary"))
    ours = {nn.Identity, Skipped, Ensemble, MixedOutputs, nn.ModuleList}
    allowed = {type(child) for child in trial.experiment.model.modules()} | ours
    for size in trial.method.sizes(trial.context):
        network = trial.method.customize(trial.context, trial.state, size).eval()
        strange = {type(child) for child in network.modules()} - allowed
        if strange:
            return f"size {size.label} holds {', '.join(sorted(kind.__name__ for kind in strange))}"
        if any(child._forward_hooks or child._forward_pre_hooks for child in network.modules()):
            return f"size {size.label} has forward hooks"
        if network(x).shape != (3, 4):
            return f"size {size.label} gives outputs of shape {tuple(network(x).shape)}, not (3, 4)"
    return None


def clients_run_what_is_customised(trial: Trial) -> str | None:
    """The network that a client is asked to evaluate or to calibrate is the customised one of its size.

    One client is asked about all sizes in turn, of the first state and of the one after a round, so that networks are
    used again where the method says that they can be.
    """
    x = torch.rand(4, 1, 8, 8, generator=generator("clients_run_what_is_customised"))
    context = replace(trial.context.for_client(), built={})
    after = trial.method.aggregate(trial.context, trial.state, iter(trial.trained()))
    for now in (trial, replace(trial, state=after)):
        for size in trial.method.sizes(trial.context):
            asked = built(context, trial.method, now.extract(replace(trial.client(0, size), job="evaluate"))).eval()
            network = trial.method.customize(trial.context, now.state, size).eval()
            if [n.num_features for n in batch_norms(asked)] != [n.num_features for n in batch_norms(network)]:
                return f"size {size.label}: other batch-norm layers than in the customised network"
            with torch.no_grad():
                problem = _difference({"output": network(x)}, {"output": asked(x)}, 1e-4)
            if problem is not None:
                return f"size {size.label}: {problem}"
    return None


def reported_is_shipped(trial: Trial) -> str | None:
    """Every metric in a run's last event is that of the customised network on the same data."""
    run, task = trial.run(), trial.context.task
    part = evaluation_part(trial.experiment)
    x, y = part.batch(torch.arange(len(part)))
    for size in run.sizes:
        found = run.history[-1]["metrics"][size.label]
        with torch.no_grad():
            metrics = task.metrics(task.sums(run.customize(size.label)(to_input(x)), y))
        for name, value in metrics.items():
            # One batch of all rounds otherwise than the run's own batches, which may turn one sample's answer.
            if not math.isclose(value, found[name], rel_tol=1e-3, abs_tol=1.01 / len(y)):
                return f"size {size.label}: {name} is {found[name]:g} in the events and {value:g} as shipped"
    return None


def resumed_is_unbroken(trial: Trial) -> str | None:
    """A run that another process goes on with ends in the state and the evaluated numbers of one that never stopped."""
    whole = trial.run()
    with tempfile.TemporaryDirectory() as folder:
        trial.short(rounds=1).run(folder)
        resumed = trial.short().run(folder, resume=True)
        rows = [(run.directory / CLIENTS).read_bytes() for run in (whole, resumed)]
        events = resumed.history
    problem = _difference(flatten(whole.state)[0], flatten(resumed.state)[0])
    if problem is not None:
        return f"the state: {problem}"
    for one, other in zip(whole.history, events, strict=True):
        for key in sorted(set(one) - {"seconds"}):
            if one[key] != other.get(key):
                return f"round {one['round']}: {key} is {other.get(key)}, and {one[key]} in the unbroken run"
    return None if rows[0] == rows[1] else f"{CLIENTS} differs"


def pretrained_start(trial: Trial) -> str | None:
    """Started from learned weights, the full-size network is the given one, bit for bit."""
    full = trial.context.largest
    if full.width < 1 or full not in list(trial.method.sizes(trial.context)):
        return None
    tricks = trial.experiment.config.tricks.model_dump(exclude_none=True)
    started = make_trial(trial.method, trial.experiment.model, [1.0], tricks, pretrained=True)
    network = trial.method.customize(started.context, started.state, Size(1.0))
    return _difference(dict(started.context.start()), tensors_of(network))


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        full_round_trip,
        unchanged_updates,
        order_of_clients,
        scale_of_weights,
        inputs_untouched,
        training_changes_something,
        cost_is_monotone,
        costs_need_no_weights,
        survives_saving,
        same_seed_same_bits,
        reused_networks_are_like_new,
        updates_stream_once,
        misfits_are_refused,
        customised_is_ordinary,
        clients_run_what_is_customised,
        reported_is_shipped,
        resumed_is_unbroken,
        pretrained_start,
    )
}


ABOUT_RUNS = ("reported_is_shipped", "resumed_is_unbroken")
"""The laws that take whole runs."""


def _verdict(law: Law, trial: Trial) -> str | None:
    alone = replace(trial, state=copy.deepcopy(trial.state))  # one that spoils its state spoils no other law's
    try:
        return law(alone)
    except Exception as error:  # a verb that fails breaks the law that called it, and the others are still tried
        return f"{type(error).__name__}: {error}"


def _learned(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _difference(expected: Tensors, found: Tensors, tolerance: float = 0.0) -> str | None:
    """The first difference in words, or None."""
    if set(expected) != set(found):
        return f"names differ: {sorted(set(expected) ^ set(found))}"
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            return f"{name} has shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        if not _close(tensor, found[name], tolerance):
            return f"{name} differs by up to {float((found[name] - tensor).abs().max()):g}"
    return None


def _close(expected: Tensor, found: Tensor, tolerance: float) -> bool:
    if tolerance == 0 or not expected.is_floating_point():
        return torch.equal(expected, found)
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance)
