"""From an experiment file to everything a run needs: data, shares, fleet, network, sizes, context.

Each part is made when it is first asked for, so that `inspect` needs no shares and a finished run no data.
"""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from anysize import accelerators, methods, models
from anysize import data as data_sets
from anysize.config import NEEDS_LABELS, DevicesConfig, ExperimentConfig, TricksConfig, from_dict
from anysize.context import Context, Proxy, Size
from anysize.cost import Cost, first_fitting, measure
from anysize.data import Data, DeviceShares, Part, RemoteShares, Share, Shares, SubsetPart, to_input
from anysize.devices import Budget, DeviceGroup, Fleet, make_fleet, open_fleet
from anysize.elastic.axes import Axes, trace
from anysize.elastic.depth import Stage, stages
from anysize.elastic.norm import batch_norms, without_statistics
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.elastic.tracing import without_data
from anysize.errors import AnysizeError, ConfigError, DataError, ModelError, unknown
from anysize.imports import look_in
from anysize.methods import Method, make, name_of
from anysize.objectives import Batch, Tricks
from anysize.rng import generator
from anysize.table import Table, prepared
from anysize.tasks import MultiLabel, NextToken, Sums, Task, task
from anysize.wire import Json

if TYPE_CHECKING:
    from anysize.run import Run

_LIVE = "live:"
_MAY_LIVE = ("data", "model", "method", "task")
_SCANNED = 100
"""Devices with data of their own whose labels are looked at to count the classes."""


@dataclass(frozen=True)
class Signature:
    """What a network must know of the data: kept in the checkpoint, so that a finished run needs the data no more.

    Attributes:
        input_shape: of one sample.
        tokens: whether inputs are integers.
        target_shape: of one sample's target.
        labels: whether targets are integers.
        outputs: how many numbers the network gives per sample or position.
        classes: how many classes there are, or None.
        class_names: their names, or None.
        mean: per channel, of inputs in [0, 1]; None for no normalisation.
        std: likewise.
    """

    input_shape: tuple[int, ...]
    tokens: bool
    target_shape: tuple[int, ...]
    labels: bool
    outputs: int
    classes: int | None
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def example(self, count: int) -> Tensor:
        """An input batch of zeros, on the meta device."""
        kind = torch.int64 if self.tokens else torch.float32
        return torch.zeros(count, *self.input_shape, dtype=kind, device="meta")

    def to_json(self) -> Json:
        """As JSON; `from_json` is the inverse."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Json) -> Signature:
        """The signature that `to_json` wrote."""
        made: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**made)


class Experiment:
    """An experiment with live objects or names in any place.

    >>> experiment = Experiment(data="digits", clients=20, model="mlp", method="fedavg", rounds=2)
    >>> [size.label for size in experiment.sizes]
    ['0.25', '0.5', '0.75', '1.0']

    Attributes:
        tabulates: whether a method's table is made; without it a method answers as far as it can.
    """

    tabulates = True

    def __init__(
        self,
        *,
        data: str | Mapping[str, Any] | Data | Callable[..., Any],
        model: str | Mapping[str, Any] | nn.Module,
        method: str | Mapping[str, Any] | Method[Any],
        clients: int | None = None,
        partition: Mapping[str, Any] | None = None,
        keep: Sequence[str] = (),
        pretrained: bool = False,
        devices: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        task: str | Task = "classification",
        tricks: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        engine: str | Mapping[str, Any] | None = None,
        name: str = "experiment",
        seed: int = 0,
        rounds: int = 100,
        evaluate_every: int = 25,
        checkpoint_every: int = 1,
    ) -> None:
        """Takes what the tables of an experiment file take, and live objects.

        Args:
            data: a name, the [data] table, an `az.Data`, or a function as in "module:function".
            model: a name, the [model] table, or any nn.Module, which is where training starts.
            method: a name, the [method] table, or a method.
            clients: how many share the data.
            partition: further keys of [data]: split, classes_per_client, alpha, validation, augment, ...
            keep: patterns of parameters whose width group stays whole.
            pretrained: whether a live model's weights were learned.
            devices: the [devices] table.
            training: the [training] table.
            task: a name or a task.
            tricks: the [tricks] table.
            evaluation: the [evaluation] table.
            engine: a name, or the [engine] table.
            name: of the run.
            seed: where every random choice starts.
            rounds: how many.
            evaluate_every: rounds from one evaluation to the next.
            checkpoint_every: rounds from one checkpoint to the next.
        """
        self._live: dict[str, Any] = {}
        tables: dict[str, Any] = {
            "name": name,
            "seed": seed,
            "rounds": rounds,
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "data": self._table("data", data),
            "model": self._table("model", model),
            "method": self._table("method", method),
            "task": self._table("task", task),
        }
        if partition is not None:
            if not isinstance(partition, Mapping):
                raise ConfigError(f'partition: given {partition!r}, must be a table, such as {{"split": "classes"}}')
            tables["data"] |= partition
        if clients is not None:
            tables["data"]["clients"] = clients
        if keep:
            tables["model"]["keep"] = list(keep)
        given: dict[str, Any] = {"devices": devices, "training": training, "tricks": tricks, "evaluation": evaluation}
        given["engine"] = {"name": engine} if isinstance(engine, str) else engine
        tables |= {key: dict(v) if isinstance(v, Mapping) else v for key, v in given.items() if v is not None}
        self.config = from_dict(tables)
        self._pretrained = pretrained
        self._known: tuple[Signature, tuple[Size, ...]] | None = None

    @classmethod
    def from_config(
        cls, config: ExperimentConfig, known: tuple[Signature, tuple[Size, ...]] | None = None, **live: Any
    ) -> Experiment:
        """The experiment of a config; `known` spares it the data, `live` gives the objects that a file cannot name."""
        foreign = [unknown("live object", key, _MAY_LIVE) for key in live if key not in _MAY_LIVE]
        if foreign:
            raise ConfigError("; ".join(foreign))
        made = cls.__new__(cls)
        made.config = config
        made._live = {key: value for key, value in live.items() if value is not None}
        made._pretrained = False
        made._known = known
        if config.folder is not None:
            look_in(config.folder)
        return made

    @contextmanager
    def blamed(self, when: str) -> Iterator[None]:
        """Makes an error that has the user's own code in it one that says so; leaves others, which are ours, alone."""
        try:
            yield
        except AnysizeError:
            raise
        except Exception as error:
            own = self._own_parts()
            if not own:
                raise
            reason = str(error).split("\n", 1)[0]  # a worker's error has its traceback below
            what = f"{type(error).__name__}: {reason}{own_line(error)}"
            raise AnysizeError(f"{when}: {what}. Look at {' and '.join(own)}") from error

    def notices(self) -> list[str]:
        """What a user should know before the first round."""
        found = self.method.notices(self.context)
        if self.context.tricks.batch_norm == "local" and batch_norms(self.context.template):
            found.append(
                'batch_norm = "local": norm layers never leave the clients, so a customised network and the test on '
                'the server have them as at the start; judge with evaluation.on = ["clients"]'
            )
        if not self.config.tells("samples"):
            found.append(
                "devices do not tell how many samples they have, so that every device counts alike; let them with "
                'devices.share = ["samples"]'
            )
        return found

    def run(self, out: str | Path | None = None, **options: Any) -> Run:
        """Runs it; see `anysize.run`."""
        from anysize.run import run

        return run(self, out=out, **options)

    @cached_property
    def complete(self) -> ExperimentConfig:
        """The config with all that it leaves to the method, the network and the data set written out.

        An experiment of it is this one, whatever their defaults will be. Absent are options that no file can hold
        (None, objects), and those of live objects.
        """
        tables: dict[str, Any] = {"tricks": TricksConfig(**asdict(self.tricks))}
        for kind in ("data", "model", "method"):
            table = getattr(self.config, kind)
            tables[kind] = table.model_copy(update={"options": self.defaults(kind) | table.options})
        return self.config.replaced(**tables)

    def defaults(self, kind: str) -> dict[str, Any]:
        """The options of the "data", "model" or "method" where a file gives none, as far as a file can hold them."""
        name = getattr(self.config, kind).name
        if kind in self._live or name.startswith(_LIVE) or (kind == "data" and self.config.own_data):
            return {}
        found: dict[str, Any] = {"data": data_sets, "model": models, "method": methods}[kind].defaults(name)
        return found

    def anew(self, config: ExperimentConfig) -> Experiment:
        """The experiment of another config with the same live objects; nothing that was made is shared."""
        other = Experiment.from_config(config, **self._live)
        other._pretrained, other.tabulates = self._pretrained, self.tabulates
        return other

    def with_config(self, config: ExperimentConfig) -> Experiment:
        """The experiment of a config that differs in its method alone; what was made of the data is not made again."""
        other = self.anew(config)
        other._live.pop("method", None)
        shared = ("task", "source", "tested", "shares", "fleet", "signature", "model")
        other.__dict__.update({key: self.__dict__[key] for key in shared if key in self.__dict__})
        return other

    @cached_property
    def task(self) -> Task:
        """What is learned."""
        live = self._live.get("task")
        if live is None:
            self._refuse_missing("task")
        return live if live is not None else task(self.config.task.name)

    @cached_property
    def method(self) -> Method[Any]:
        """The method."""
        live = self._live.get("method")
        return live if live is not None else make(self.config.method.name, self.config.method.options)

    @cached_property
    def source(self) -> Data | Callable[[Any], Share] | None:
        """The data set, or the function that gives each device its own share; None where only devices have data."""
        live = self._live.get("data")
        if isinstance(live, Data):
            return live
        if live is not None:
            return data_sets.from_function(self.config.data.name, live, self.config.data.options)
        self._refuse_missing("data")
        if self.config.own_data:
            return None
        return data_sets.load(self.config.data.name, self.config.data.options)

    @property
    def data(self) -> Data | None:
        """The whole data set; None where each device has its own."""
        return self.source if isinstance(self.source, Data) else None

    @cached_property
    def tested(self) -> Data | None:
        """The data set whose test part is the server's; None where it has none."""
        if self.config.data.test is None:
            return self.data
        found = data_sets.load(self.config.data.test)
        if not isinstance(found, Data):
            raise ConfigError(
                f"data.test: '{self.config.data.test}' gives single devices' shares; name one that gives a whole set"
            )
        return found

    @cached_property
    def shares(self) -> Shares:
        """Who has what."""
        config = self.config.data
        if self.source is None:
            return RemoteShares(config.clients or 0)
        if not isinstance(self.source, Data):
            if config.clients is None:
                raise ConfigError(
                    f"data.clients: missing; '{config.name}' gives one device's share, so say how many there are"
                )
            return DeviceShares(self._own_share, config.clients)
        return data_sets.split(
            self.source,
            config.clients,
            config.split,
            classes_per_client=config.classes_per_client,
            unbalance=1.0 if config.unbalance is None else config.unbalance,
            alpha=config.alpha,
            equal=config.equal_sizes,
            validation=config.validation,
            fraction=config.fraction,
            seed=self.config.seed,
        )

    @cached_property
    def fleet(self) -> Fleet:
        """The devices; on a fleet those that are expected, since who comes is seen only then."""
        if not len(self.shares):
            return open_fleet(self.config.devices, self.config.seed)
        by_group = self.config.devices.assignment == "group"
        names = [self.shares.group_of(client) for client in range(len(self.shares))] if by_group else []
        order = sorted({name for name in names if name is not None})
        domains = [order.index(name) for name in names if name is not None] or None
        return make_fleet(self.config.devices, len(self.shares), self.config.seed, domains)

    @cached_property
    def signature(self) -> Signature:
        """What the network must know of the data."""
        if self._known is not None:
            return self._known[0]
        if self.source is None and self.tested is None:
            return declared(self.config, self.task)
        data = self.tested or self._first_devices()
        x, y = data.train.batch(torch.zeros(1, dtype=torch.int64))
        normalize = self.config.data.normalize
        if normalize and data.mean is None:
            raise ConfigError(
                "data.normalize = true, but the data has no mean and std; give them in az.Data(mean=, std=)"
            )
        wanted = normalize if normalize is not None else self._own_model() is None and ":" not in self.config.model.name
        # Of a multi-label target every entry is a class of its own; without a class axis every entry is a number.
        one_each = self.task.class_axis is None or isinstance(self.task, MultiLabel)
        classes = self.config.task.classes or data.classes
        if classes is not None and data.classes is not None and classes < data.classes:
            raise ConfigError(f"task.classes: given {classes}, but the data has {data.classes}; leave it out")
        return Signature(
            input_shape=tuple(self.config.model.input or data.input_shape),
            tokens=not to_input(x).is_floating_point(),
            target_shape=tuple(y.shape[1:]),
            labels=not y.is_floating_point(),
            outputs=y[0].numel() if one_each else classes or data.outputs,
            classes=None if one_each else classes,
            class_names=data.class_names,
            mean=data.mean if wanted else None,
            std=data.std if wanted else None,
        )

    @cached_property
    def model(self) -> nn.Module:
        """The full network with its first weights, normalisation included, some of it frozen."""
        config, about = self.config.model, self.signature
        live = self._own_model()
        if live is None:
            self._refuse_missing("model")
        network = live or models.build(
            config.name, about.input_shape, about.outputs, config.options, seed=self.config.seed
        )
        if about.mean is not None:
            network = models.normalized(network, about.mean, about.std)
        if config.weights is not None and self._known is None:  # a finished run's weights are in its checkpoint
            network = with_weights(network, (self.config.folder or Path()) / config.weights)
        return with_frozen(network, config.frozen)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that the fleet trains, smallest first."""
        if self._known is not None:
            return self._known[1]
        by_label = {size.label: size for size in self.size_of_group.values()}
        return tuple(sorted(by_label.values(), key=lambda size: size.order))

    @cached_property
    def size_of_group(self) -> dict[str, Size]:
        """The size that each device group trains."""
        return solve_sizes(self, self.fleet.groups)

    @cached_property
    def table(self) -> Table | None:
        """What the method found out before the first round; None where it needs nothing, or has finished."""
        return prepared(self) if self.tabulates and self._known is None else None

    @cached_property
    def context(self) -> Context:
        """What server and clients both know, with what only the server holds."""
        return self.context_for(self.sizes, self.table)

    @property
    def tricks(self) -> Tricks:
        """The shared tricks: the method's own where the experiment gives none.

        Where devices do not tell how many samples they have, all count alike.
        """
        chosen = self.method.paper.chosen(self.config.tricks.model_dump())
        if chosen.classwise_head and not self.config.tells("labels"):
            if self.signature.classes is not None:
                raise ConfigError(f"{self.config.method.name}'s classwise_head: {NEEDS_LABELS}")
            chosen = replace(chosen, classwise_head=False)  # without classes it changes nothing
        return chosen if self.config.tells("samples") else replace(chosen, weighting="clients")

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The blocks that can be removed."""
        return stages(self._template[0], self.signature.example(2), self.config.model.blocks)

    def _proxy(self) -> Proxy | None:
        """The server's part of the data; None where each device has its own."""
        from anysize.local import perform

        if self._known is not None or not isinstance(self.source, Data):
            return None
        return Proxy(self._proxy_share, perform)

    def _proxy_share(self, fraction: float) -> Share:
        """An even draw of the training data, the same for every method, a fifth of it held out."""
        assert isinstance(self.source, Data)
        whole = self.source.train
        order = torch.randperm(len(whole), generator=generator(self.config.seed, "proxy"))
        chosen = order[: min(len(whole), max(5, round(fraction * len(whole))))]
        held = max(1, len(chosen) // 5)
        return Share(SubsetPart(whole, chosen[held:]), SubsetPart(whole, chosen[:held]))

    def context_for(self, sizes: tuple[Size, ...], table: Table | None = None) -> Context:
        """The context of a fleet that trains `sizes`."""
        if self.signature.tokens and self.tricks.adversarial:
            raise ConfigError("tricks.adversarial: inputs are tokens, which cannot be moved by a little; set it to 0")
        return Context(
            template=self._template[0],
            axes=self.axes,
            task=self.task,
            sizes=sizes,
            training=self.config.training,
            tricks=self.tricks,
            augment=self.config.data.augment,
            classes=self.signature.classes,
            scarce_activations=limits_activations(self.config.devices),
            seed=self.config.seed,
            initial=self._template[1],
            pretrained=self._pretrained or self.config.model.weights is not None,
            stages=self.stages,
            proxy=self._proxy(),
            table=table,
            tells=frozenset(what for what in ("samples", "labels") if self.config.tells(what)),
            device=accelerators.device(self.config.engine.accelerator, or_cpu=self._known is not None),
            _skeletons=self._skeletons,
        )

    @cached_property
    def axes(self) -> Axes:
        """Which axis of which tensor belongs to which width group."""
        config = self.config.model
        return trace(
            self._template[0],
            self.signature.example(2),
            keep=config.keep,
            heads=config.heads,
            class_axis=self.task.class_axis,
            attributes=config.attributes,
        )

    def cost(
        self, size: Size, context: Context | None = None, state: Any = None, method: Method[Any] | None = None
    ) -> Cost:
        """What a client of that size costs; by default with this experiment's method, in its first state."""
        context, method = context or self.context, method or self.method
        state = method.init(context) if state is None else state
        return measure(context, method, state, size, self.example)

    @cached_property
    def example(self) -> Batch:
        """A batch of the training batch size on the meta device."""
        count, about = self.config.training.batch_size, self.signature
        kind = torch.int64 if about.labels else torch.float32
        return Batch(about.example(count), torch.zeros(count, *about.target_shape, dtype=kind, device="meta"))

    @cached_property
    def _template(self) -> tuple[nn.Module, dict[str, Tensor]]:
        network = self.model if self.tricks.batch_norm in ("tracked", "local") else without_statistics(self.model)
        return hollow(network), {name: tensor.clone() for name, tensor in tensors_of(network).items()}

    @cached_property
    def _skeletons(self) -> dict[tuple[float, int | None], nn.Module]:
        return {}  # narrowed once for all contexts of this experiment

    def _own_parts(self) -> list[str]:
        """The parts of the experiment that are not ours: named "module:attribute", or live."""
        names = {kind: str(getattr(self.config, kind).name) for kind in _MAY_LIVE}
        return [f"your {kind} '{name.removeprefix(_LIVE)}'" for kind, name in names.items() if ":" in name]

    def is_live(self, kind: str) -> bool:
        """Whether the "data", "model", "method" or "task" is an object that no name leads to."""
        return kind in self._live and str(getattr(self.config, kind).name).startswith(_LIVE)

    def _own_model(self) -> nn.Module | None:
        return self._live.get("model")

    def _own_share(self, device: int) -> Share:
        """What the data function gives for a device, refused where it has classes that the network does not know."""
        assert callable(self.source)
        share, classes = self.source(device), self.signature.classes
        labels = share.train.labels()
        if classes is None or labels.is_floating_point() or 0 <= int(labels.min()) <= int(labels.max()) < classes:
            return share
        raise DataError(
            f"device {device} has labels from {int(labels.min())} to {int(labels.max())}; the network has {classes} "
            "outputs. Say how many classes there are with data.options.classes, which your function must accept"
        )

    def _first_devices(self) -> Data:
        """The first device's data, with as many classes as the first devices have together."""
        assert callable(self.source)
        devices = range(min(self.config.data.clients or 1, _SCANNED))
        classes = self.config.data.options.get("classes")
        if classes is None:
            found = [Data(train=self.source(device).train).classes for device in devices]
            classes = max((count for count in found if count is not None), default=None)
        return Data(train=self.source(0).train, classes=classes)

    def _table(self, kind: str, value: Any) -> dict[str, Any]:
        """The config table of a value that may be a name, a table or a live object."""
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping):
            return dict(value)
        self._live[kind] = value
        if isinstance(value, Method) and is_dataclass(value):
            options = {field.name: getattr(value, field.name) for field in fields(value)}
            return {"name": name_of(value), **options}
        return {"name": f"{_LIVE}{getattr(value, '__name__', type(value).__name__)}"}

    def _refuse_missing(self, kind: str) -> None:
        name = getattr(self.config, kind).name
        if name.startswith(_LIVE):
            raise ConfigError(
                f"{kind}: this run was made with a live {name.removeprefix(_LIVE)}, which no file can name; pass it "
                f"again with {kind}="
            )


def declared(config: ExperimentConfig, task: Task) -> Signature:
    """What the experiment says of data that only the devices have; an error that lists what it must say.

    Raises:
        ConfigError: with a line for each key that is missing.
    """
    model, about = config.model, config.task
    one_each = task.class_axis is None or isinstance(task, MultiLabel)
    tokens = isinstance(task, NextToken) if model.tokens is None else model.tokens
    problems = []
    if model.input is None:
        problems.append("model.input: missing; give the shape of one sample, such as [1, 28, 28]")
    if one_each and about.target is None:
        problems.append("task.target: missing; give the shape of one sample's target, such as [1]")
    if not one_each and about.classes is None:
        problems.append("task.classes: missing; say how many classes there are")
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(f'data.name = "devices": the server sees no data, so the experiment must say:\n  {listed}')
    shape = tuple(model.input or ())
    target = about.target if about.target is not None else shape if isinstance(task, NextToken) else ()
    return Signature(
        input_shape=shape,
        tokens=tokens,
        target_shape=tuple(target),
        labels=not one_each,
        outputs=math.prod(target) if one_each else about.classes or 0,
        classes=None if one_each else about.classes,
        class_names=None,
        mean=None,
        std=None,
    )


def limits_activations(devices: DevicesConfig) -> bool:
    """Whether any device's budget, or what capacities are fractions of, limits activation memory."""
    budgets = (group.budget for group in devices.groups or ())
    return devices.capacity_of == "activation_bytes" or any(b is not None and b.activation_bytes for b in budgets)


def solve_sizes(experiment: Experiment, groups: Sequence[DeviceGroup]) -> dict[str, Size]:
    """The best of the method's choices that each group's budget, or its fraction of the full cost, allows.

    A group that has a plain capacity trains what the method makes of it.
    """
    unit = experiment.config.devices.capacity_of
    method, table = experiment.method, experiment.table
    context = experiment.context_for((), table)
    costs: dict[Size, Mapping[str, float]] = {}

    def units(size: Size) -> Mapping[str, float]:
        entry = None if table is None else table.entry(size)
        if entry is not None:
            return entry.cost
        if size not in costs:
            costs[size] = experiment.cost(size, experiment.context_for((size,), table)).units()
        return costs[size]

    solved: dict[str, Size] = {}
    allowed: dict[str, list[Size]] = {}
    budgets: dict[str, Budget] = {}
    problems = []
    for group in groups:
        if group.capacity is not None and unit == "width":
            solved[group.name] = method.sized(context, group.capacity)
            continue
        budget = group.budget
        if budget is None and group.depth is None:
            budget = Budget(**{unit: (group.capacity or 1.0) * units(Size(1.0))[unit]})
        choices = [size for size in method.choices(context) if group.depth in (None, size.depth)]
        problem = _no_choice(experiment, group, budget, choices)
        size = None if problem else first_fitting(choices, budget.fits if budget else lambda _: True, units)
        if size is None:
            problems.append(
                problem or f"devices: group '{group.name}' can train no size; {_least(choices, budget, units)}"
            )
            continue
        solved[group.name] = _labelled(size, group)
        if budget is not None:
            allowed[group.name], budgets[group.name] = choices, budget
    if problems:
        raise ConfigError("\n".join(problems))
    return lowered(experiment, solved, budgets, allowed)


def _no_choice(
    experiment: Experiment, group: DeviceGroup, budget: Budget | None, choices: Sequence[Size]
) -> str | None:
    """Why a group has nothing to choose from, or None."""
    name = experiment.config.method.name
    if not choices:
        every = experiment.method.choices(experiment.context_for((), experiment.table))
        depths = sorted({size.depth for size in every if size.depth is not None})
        known = f"it trains depths {', '.join(map(str, depths))}" if depths else "it does not change the depth"
        return f"devices: group '{group.name}' has depth = {group.depth}, which {name} cannot train; {known}"
    timed = experiment.table is not None and all("latency_ms" in entry.cost for entry in experiment.table.entries)
    if budget is not None and budget.latency_ms is not None and not timed:
        return (
            f"devices: group '{group.name}' limits latency_ms, which is measured only for a method with a look-up "
            "table (elf) and kept in its file; name the file in method.table"
        )
    return None


def _labelled(size: Size, group: DeviceGroup) -> Size:
    """The size under the group's label, unless that is its own."""
    return replace(size, name="" if group.label == size.label else group.label)


def _least(choices: Sequence[Size], budget: Budget | None, units: Callable[[Size], Mapping[str, float]]) -> str:
    """What the choices cost at least, in the units of a budget."""
    limits = {} if budget is None else budget.limits()
    least = ", ".join(f"{unit} = {min(units(size)[unit] for size in choices):g}" for unit in limits)
    return f"the smallest needs {least}"


def lowered(
    experiment: Experiment, solved: dict[str, Size], budgets: Mapping[str, Budget], allowed: Mapping[str, list[Size]]
) -> dict[str, Size]:
    """The sizes, lowered among the choices until each fits its budget in the fleet that they make together.

    What a size costs may depend on the others: the inputs of FLANC's basis divide the inputs of every trained width.
    """
    while budgets:
        context = experiment.context_for(
            tuple(sorted(set(solved.values()), key=lambda size: size.order)), experiment.table
        )
        state = experiment.method.init(context)
        costs = {name: experiment.cost(solved[name], context, state).units() for name in budgets}
        timed = {name: costs[name] | {"latency_ms": 0.0} for name in budgets}  # time was judged by the table
        over = [name for name, budget in budgets.items() if not budget.fits(timed[name])]
        if not over:
            break
        for name in over:
            unnamed = [replace(size, name="") for size in allowed[name]]
            below = unnamed[unnamed.index(replace(solved[name], name="")) + 1 :]
            if not below:
                raise ConfigError(
                    f"devices: group '{name}' can train no size in this fleet; the smallest needs "
                    + ", ".join(f"{unit} = {costs[name][unit]:g}" for unit in budgets[name].limits())
                )
            solved[name] = replace(below[0], name=solved[name].name or name)
    return solved


def with_weights(network: nn.Module, path: Path) -> nn.Module:
    """The network with the weights of a safetensors file."""
    try:
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise ModelError(f"model.weights: {path} does not exist") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"model.weights: {path} is damaged or not a safetensors file ({error})") from None
    own = tensors_of(network)
    prefix = "" if set(own) & set(tensors) else "network."  # files of the bare network fit behind normalisation too
    try:
        return fill(hollow(network), {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    except ModelError as error:
        raise ModelError(f"model.weights: {path}: {error}") from None


def own_line(error: BaseException) -> str:
    """Where the innermost line of neither this package, nor a library, nor Python was, or nothing."""
    others = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*others, "<"))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def with_frozen(network: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """The same network, the parameters that match a pattern not trained."""
    names = dict(network.named_parameters())
    for pattern in patterns:
        hits = [name for name in names if any(fnmatch(name, form) for form in _forms(pattern))]
        if not hits:
            raise ConfigError("model.frozen: " + unknown("parameter", pattern, names))
        for name in hits:
            names[name].requires_grad_(False)
    return network


def _forms(pattern: str) -> tuple[str, ...]:
    return pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"


def metric_names(experiment: Experiment) -> list[str]:
    """The names of the task's metrics, found by judging an answer of zeros; refuses a task that cannot."""
    task = experiment.task
    metrics = dict(task.metrics(example_sums(experiment)))
    missing = [name for name in (task.metric, "loss") if name not in metrics]
    if missing:
        raise ConfigError(
            f"task: its metrics are {', '.join(metrics) or 'none'}; {', '.join(missing)} must be there too"
        )
    return list(metrics)


def example_sums(experiment: Experiment) -> Sums:
    """What the task sums up, found by judging an answer of zeros."""
    about, task = experiment.signature, experiment.task
    network = hollow(experiment.context.template, constants=False).eval()
    with without_data(), torch.no_grad():
        output = network(about.example(2))
    if not isinstance(output, Tensor):
        raise ModelError(f"the model gives a {type(output).__name__}; it must give one tensor")
    y = experiment.example.y[:1].expand(2, *about.target_shape)
    return task.sums(torch.zeros(output.shape), torch.zeros(y.shape, dtype=y.dtype))


def evaluation_part(experiment: Experiment) -> Part:
    """The server's test samples, or an error that says how to do without."""
    data = experiment.tested
    if data is None or data.test is None:
        raise DataError(
            'the data has no test part to evaluate on; give it one, or set evaluation.on = ["clients"] and '
            "data.validation above 0"
        )
    return data.test
