"""The ingredients of an experiment, names or live objects, and what follows from each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from anysize import data as data_sets
from anysize import methods, models
from anysize.attacks.data import ON_DATA, Poisoned
from anysize.client import accelerators
from anysize.client.work import calibrated, perform
from anysize.config.devices import NEEDS_LABELS, DevicesConfig
from anysize.config.files import from_dict
from anysize.config.own_code import look_in
from anysize.config.tables import ExperimentConfig, TricksConfig
from anysize.cost.count import Cost, measure
from anysize.data import Data, DeviceShares, RemoteShares, Share, Shares, SubsetPart, largest_token, to_input
from anysize.devices.fleet import Fleet, make_fleet, open_fleet
from anysize.elastic.axes import Axes, trace
from anysize.elastic.depth import Stage, stages
from anysize.elastic.norm import without_statistics
from anysize.elastic.skeleton import hollow, tensors_of
from anysize.errors import AnysizeError, ConfigError, DataError, ModelError, told, unknown
from anysize.experiment.signature import Known, Signature, declared
from anysize.experiment.weights import with_frozen, with_weights
from anysize.inputs import Inputs, named, tensors_in
from anysize.methods import Method, make, name_of
from anysize.methods.capabilities import OnBase
from anysize.methods.context import Base, Context, Proxy
from anysize.methods.size import Size
from anysize.methods.table import Table
from anysize.methods.training import Batch, Tricks
from anysize.rng import generator
from anysize.tasks import Classification, MultiLabel, Task, task

_LIVE = "live:"


_MAY_LIVE = ("data", "model", "method", "task")


_SCANNED = 100
"""How many devices' labels are read to count the classes, if each device has its own data."""


class Setup:
    """The ingredients of an experiment, names or live objects, and what follows from each; no sizes yet."""

    def __init__(
        self,
        *,
        data: str | Mapping[str, Any] | Data | Callable[..., Any],
        model: str | Mapping[str, Any] | nn.Module,
        method: str | Mapping[str, Any] | Method[Any],
        clients: int | None = None,
        partition: Mapping[str, Any] | None = None,
        keep: Sequence[str] = (),
        heads: str = "within",
        pretrained: bool = False,
        devices: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        task: str | Task = "classification",
        tricks: Mapping[str, Any] | None = None,
        aggregation: str | Mapping[str, Any] | None = None,
        adversary: str | Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        engine: str | Mapping[str, Any] | None = None,
        communication: Mapping[str, Any] | None = None,
        name: str = "experiment",
        seed: int = 0,
        rounds: int = 100,
        evaluate_every: int = 25,
        checkpoint_every: int = 1,
    ) -> None:
        """Take the tables of an experiment file, or live objects.

        Args:
            data: a name, the [data] table, an `az.Data`, or a function as in "module:function".
            model: a name, the [model] table, or any nn.Module; training starts from its weights.
            method: a name, the [method] table, or a method.
            clients: how many share the data.
            partition: further keys of [data]: split, classes_per_client, alpha, validation, augment, ...
            keep: patterns of parameters whose width group is not narrowed.
            heads: whether attention shrinks "within" every head, or drops "whole" heads.
            pretrained: whether a live model's weights were learned.
            devices: the [devices] table.
            training: the [training] table.
            task: a name or a task.
            tricks: the [tricks] table.
            aggregation: a rule's name, or the [aggregation] table.
            adversary: an attack's name, or the [adversary] table.
            privacy: the [privacy] table.
            evaluation: the [evaluation] table.
            engine: a name, or the [engine] table.
            communication: the [communication] table.
            name: the name of the run.
            seed: the seed of every random choice.
            rounds: how many rounds the run has.
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
        if heads != "within":
            tables["model"]["heads"] = heads
        given: dict[str, Any] = {"devices": devices, "training": training, "tricks": tricks, "evaluation": evaluation}
        given["communication"], given["privacy"] = communication, privacy
        given["engine"] = {"name": engine} if isinstance(engine, str) else engine
        given["aggregation"] = {"rule": aggregation} if isinstance(aggregation, str) else aggregation
        given["adversary"] = {"name": adversary} if isinstance(adversary, str) else adversary
        tables |= {key: dict(v) if isinstance(v, Mapping) else v for key, v in given.items() if v is not None}
        self.config = from_dict(tables)
        self._pretrained = pretrained
        self._known: Known | None = None

    @classmethod
    def from_config(cls, config: ExperimentConfig, known: Known | None = None, **live: Any) -> Self:
        """The experiment of a config; `known` replaces the data, `live` holds the objects that a file cannot name."""
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
        """Turn an exception from the user's code into an error that names the code; keep exceptions of anysize."""
        try:
            yield
        except AnysizeError:
            raise
        except Exception as error:
            own = self._own_parts()
            if not own:
                raise
            raise AnysizeError(f"{when}: {told(error)}. Look at {' and '.join(own)}") from error

    @cached_property
    def complete(self) -> ExperimentConfig:
        """The config with every default of the method, the network and the data set.

        It gives the same experiment even if these defaults change later. It leaves out options that no file can hold
        (None, objects), and those of live objects.
        """
        tables: dict[str, Any] = {"tricks": TricksConfig(**asdict(self.tricks)), "compare": None}
        for kind in ("data", "model", "method"):
            table = getattr(self.config, kind)
            tables[kind] = table.model_copy(update={"options": self.defaults(kind) | table.options})
        return self.config.replaced(**tables)

    def defaults(self, kind: str) -> dict[str, Any]:
        """The default options of the "data", "model" or "method", as far as a file can hold them."""
        name = getattr(self.config, kind).name
        if kind in self._live or name.startswith(_LIVE) or (kind == "data" and self.config.own_data):
            return {}
        found: dict[str, Any] = {"data": data_sets, "model": models, "method": methods}[kind].defaults(name)
        return found

    def anew(self, config: ExperimentConfig) -> Self:
        """The experiment of another config with the same live objects; it shares nothing that was computed."""
        other = type(self).from_config(config, **self._live)
        other._pretrained = self._pretrained
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
        """The data set, or the function that returns the share of a device; None if only devices have data."""
        live = self._live.get("data")
        if isinstance(live, Data):
            return live
        if live is not None:
            return data_sets.from_function(self.config.data.name, live, self.config.data.options)
        self._refuse_missing("data")
        if self.config.own_data:
            return None
        return data_sets.load(self.config.data.name, self.config.data.options, self.config.folder)

    @property
    def data(self) -> Data | None:
        """The whole data set; None if each device has its own."""
        return self.source if isinstance(self.source, Data) else None

    @cached_property
    def tested(self) -> Data | None:
        """The data set with the server's test data; None if the server has none."""
        if self.config.data.test is None:
            return self.data
        found = data_sets.load(self.config.data.test, folder=self.config.folder)
        if not isinstance(found, Data):
            raise ConfigError(f"data.test: '{self.config.data.test}' returns one device's share; name a whole data set")
        return found

    @cached_property
    def shares(self) -> Shares:
        """Which client has which samples; of attackers, those that they make up."""
        name = self.config.adversary.name
        if name not in ON_DATA:
            return self._honest_shares
        self._check_poisonable(name)
        return Poisoned(self._honest_shares, name, self.signature.classes or 0, lambda: self.attackers)

    @cached_property
    def attackers(self) -> frozenset[int]:
        """The clients that attack."""
        options, clients = self.config.adversary, len(self.shares)
        if options.name == "none":
            return frozenset()
        order: list[int] = torch.randperm(clients, generator=generator(self.config.seed, "adversary")).tolist()
        if options.who == "largest":
            capacities = [self.described.group_of(client, 1).capacity for client in order]
            if self.config.devices.redraw != "never" or None in capacities:
                raise ConfigError('adversary.who = "largest": devices need fixed capacities; use "any"')
            order = [client for _, client in sorted(zip(capacities, order), key=lambda pair: -(pair[0] or 0))]
        return frozenset(order[: max(1, round(options.share * clients))])

    def _check_poisonable(self, name: str) -> None:
        about = self.signature
        if about.classes is None or about.target_shape:
            raise ConfigError(f'adversary.name = "{name}": needs a task with one class for each sample')
        if name == "backdoor" and (about.tokens or len(about.input_shape) != 3):
            raise ConfigError('adversary.name = "backdoor": its trigger needs pictures (channels, height, width)')

    @cached_property
    def _honest_shares(self) -> Shares:
        config = self.config.data
        if self.source is None:
            return RemoteShares(config.clients or 0)
        if not isinstance(self.source, Data):
            if config.clients is None:
                raise ConfigError(
                    f"data.clients: missing; '{config.name}' returns one device's share, so say how many there are"
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
            groups_per_client=config.groups_per_client or 1,
            domains=config.domains,
            validation=config.validation,
            fraction=config.fraction,
            seed=self.config.seed,
        )

    @cached_property
    def described(self) -> Fleet:
        """The devices as the file describes them; on a fleet, those of the plan, since nobody knows who will join."""
        if not len(self.shares):
            return open_fleet(self.config.devices, self.config.seed)
        by_group = self.config.devices.assignment == "group"
        names = [self.shares.group_of(client) for client in range(len(self.shares))] if by_group else []
        order = self.config.data.domains or sorted({name for name in names if name is not None})
        domains = [order.index(name) for name in names if name is not None] or None
        fleet = make_fleet(self.config.devices, len(self.shares), self.config.seed, domains)
        return replace(fleet, independent=self.config.privacy.clip is not None)

    @cached_property
    def signature(self) -> Signature:
        """What the network must know about the data."""
        if self._known is not None:
            return self._known.signature
        if self.source is None and self.tested is None:
            return declared(self.config, self.task)
        data = self.tested or self._first_devices()
        # Texts differ in length: the longest says what a batch costs at most.
        x, y = data.train.batch(torch.tensor([getattr(data.train, "longest", 0)]))
        x = to_input(x)
        live = self._own_model()
        if live is not None:
            models.check_head(live, self.task, x.keys() if isinstance(x, Inputs) else ())
        if y.is_floating_point() and y.ndim == 1 and type(self.task) is Classification:
            raise DataError(
                'task: "classification" needs classes, integers from 0, and the labels are numbers with a point; '
                'encode them, or name the task "regression"'
            )
        if not y.is_floating_point():
            models.check_targets(live, self.config.model.name, self.task, tuple(y.shape[1:]))
        normalize = self.config.data.normalize
        if normalize and data.mean is None:
            raise ConfigError(
                "data.normalize = true, but the data has no mean and std; give them in az.Data(mean=, std=)"
            )
        wanted = normalize if normalize is not None else live is None and ":" not in self.config.model.name
        # In a multi-label target every entry is a separate class; without a class axis every entry is a number.
        one_each = self.task.class_axis is None or isinstance(self.task, MultiLabel)
        classes = self.config.task.classes or self._logits() or data.classes
        if classes is not None and data.classes is not None and classes < data.classes:
            what = "task.classes: given" if self.config.task.classes else "model: it has logits for"
            raise ConfigError(f"{what} {classes}, but the data has {data.classes} classes; give at least as many")
        inputs = [(name, tuple(t.shape[1:]), not t.is_floating_point()) for name, t in named(x)]
        return Signature(
            input_shape=tuple(self.config.model.input or inputs[0][1]),
            tokens=any(tokens for _, _, tokens in inputs),
            target_shape=tuple(y.shape[1:]),
            labels=not y.is_floating_point(),
            outputs=y[0].numel() if one_each else classes or data.outputs,
            classes=None if one_each else classes,
            class_names=data.class_names,
            mean=data.mean if wanted else None,
            std=data.std if wanted else None,
            inputs=tuple(inputs) if isinstance(x, Inputs) else None,
        )

    def _logits(self) -> int | None:
        """How many classes or tokens the network has logits for, if it says so before it is built."""
        live = self._own_model()
        if live is not None:
            return models.logits_of(live)
        config = self.config.model
        return models.logits(config.name, config.options, self.task, self.config.folder)

    @cached_property
    def model(self) -> nn.Module:
        """The full network with its first weights, normalisation included, some of it frozen."""
        config, about = self.config.model, self.signature
        live = self._own_model()
        if live is None:
            self._refuse_missing("model")
        network = live or models.build(
            config.name,
            about.input_shape,
            about.outputs,
            config.options,
            seed=self.config.seed,
            task=self.task,
            folder=self.config.folder,
            bare=self._known is not None and not isinstance(self.method, OnBase),
        )
        network = models.keyed(network, about.names)
        if self._known is None and self.data is not None:
            self._refuse_numbers(network)
            self._refuse_unknown_tokens(network, self.data)
            self._refuse_long_texts(network)
        if about.mean is not None:
            network = models.normalized(network, about.mean, about.std)
        if config.weights is not None:
            file = (self.config.folder or Path()) / config.weights
            # Elsewhere than on a server the weights are in messages, and a finished run's in its checkpoint; but what
            # nobody trains is in neither.
            if self._known is None or (isinstance(self.method, OnBase) and file.is_file()):
                network = with_weights(network, file)
        network = with_frozen(network, config.frozen)
        learning = [parameter.requires_grad for parameter in network.parameters()]
        if self._known is None and learning and not any(learning) and not isinstance(self.method, OnBase):
            raise ModelError(
                "no parameter of the network is trained: all have requires_grad = False; set it on those to train, as "
                'network.requires_grad_(True) does, leave some out of model.frozen, or take method "lora"'
            )
        return network

    def _refuse_numbers(self, network: nn.Module) -> None:
        """Raise an error if the network reads tokens and the data has none."""
        about = self.signature
        named = about.names is not None and "input_ids" not in about.names  # embeddings, perhaps
        if models.vocabulary(network) is not None and not about.tokens and not named:
            raise DataError(
                f"{type(models.plain(network)).__name__} reads tokens, the data has numbers of shape "
                f"{about.input_shape}; give texts, or a network that reads such numbers"
            )

    def _refuse_unknown_tokens(self, network: nn.Module, data: Data) -> None:
        """Raise an error if the data has tokens that the network has no embedding for."""
        rows, largest = models.vocabulary(network), largest_token(data.train)
        if rows is not None and largest is not None and largest >= rows:
            raise DataError(
                f"the data has the token {largest}, the network embeddings for 0 to {rows - 1}; use the tokenizer that "
                "belongs to the network, or a network with a larger vocabulary (vocab_size)"
            )

    def _refuse_long_texts(self, network: nn.Module) -> None:
        """Raise an error if a text has more tokens than the network has positions."""
        most, about = models.positions(network), self.signature
        longest = max(
            (shape[0] for _, shape, _ in about.inputs or (("", about.input_shape, True),) if shape), default=0
        )
        if most is not None and longest > most:
            raise DataError(
                f"the longest text has {longest} tokens, the network positions for {most}; cut texts, in Python with "
                f"tokenizer(text, truncation=True, max_length={most}), in a file with data.options.length"
            )

    @property
    def tricks(self) -> Tricks:
        """The tricks: those of the experiment, completed by the method's.

        If devices do not tell how many samples they have, all count equally.
        """
        chosen = self.method.recipe.chosen(self.config.tricks.model_dump())
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
        """The server's proxy data; None if each device has its own data."""
        if self._known is not None or not isinstance(self.source, Data):
            return None
        return Proxy(self._proxy_share, perform, calibrated)

    def _proxy_share(self, fraction: float) -> Share:
        """An even draw of the training data in use, the same for every method, a fifth of it held out."""
        assert isinstance(self.source, Data)
        whole, order = self.source.train, self._proxy_order(self.source)
        chosen = order[: min(len(order), max(5, round(fraction * len(order))))]
        held = max(1, len(chosen) // 5)
        return Share(SubsetPart(whole, chosen[held:]), SubsetPart(whole, chosen[:held]))

    def _proxy_order(self, data: Data) -> Tensor:
        """The training samples that the server may hold, in a random order; of a split data set, those in use."""
        some = self.config.data.fraction < 1 or (self.config.data.domains and len(self.shares.used) < len(data.train))
        split = data is self.source and some
        used = self.shares.used if split else torch.arange(len(data.train))
        return used[torch.randperm(len(used), generator=generator(self.config.seed, "proxy"))]

    def calibration_proxy(self) -> SubsetPart | None:
        """The server's own samples for batch-norm statistics; None if it has none.

        They are training samples in use or, if the devices have those, training samples of the set in data.test.
        """
        count = self.config.evaluation.calibration_proxy
        if count is None:
            return None
        data = self.data or self.tested
        if data is None:
            raise ConfigError(
                f"evaluation.calibration_proxy: given {count}, but '{self.config.data.name}' returns one device's "
                "share, so that the server has no samples; leave it out"
            )
        return SubsetPart(data.train, self._proxy_order(data)[:count])

    def context_for(self, sizes: tuple[Size, ...], table: Table | None = None) -> Context:
        """The context of a fleet that trains `sizes`."""
        if self.signature.tokens and self.tricks.adversarial:
            raise ConfigError("tricks.adversarial: inputs are tokens, and no attack moves tokens a little; set it to 0")
        training, elsewhere = self.config.training, self._known is not None
        if training.precision == "fp16" and self.tricks.adversarial:
            raise ConfigError('training.precision = "fp16": an attack\'s gradients are not scaled; take "bf16"')
        device = accelerators.device(self.config.engine.accelerator, or_cpu=elsewhere)
        precision = accelerators.precision(training.precision, device, or_float32=elsewhere)
        return Context(
            template=self._template[0],
            axes=self.axes,
            task=self.task,
            sizes=sizes,
            training=training.model_copy(update={"precision": precision}),
            tricks=self.tricks,
            aggregation=self.config.aggregation,
            augment=self.config.data.augment,
            classes=self.signature.classes,
            scarce_activations=limits_activations(self.config.devices),
            seed=self.config.seed,
            initial=self._template[1],
            base=self._base if isinstance(self.method, OnBase) else None,
            pretrained=self._starts_learned,
            stages=self.stages,
            proxy=self._proxy(),
            table=table,
            private=self.config.privacy.clip is not None,
            tells=frozenset(what for what in ("samples", "labels") if self.config.tells(what)),
            communication=self.config.communication,
            device=device,
            _skeletons=self._skeletons,
        )

    @cached_property
    def axes(self) -> Axes:
        """Which axis of which tensor belongs to which width group."""
        config = self.config.model
        if self._keeps_statistics not in self._traced:
            self._traced[self._keeps_statistics] = trace(
                self._template[0],
                tensors_in(self.signature.example(2)),
                keep=config.keep,
                heads=config.heads,
                class_axis=self.task.class_axis,
                attributes=config.attributes,
            )
        return self._traced[self._keeps_statistics]

    @cached_property
    def _traced(self) -> dict[bool, Axes]:
        return {}  # with and without batch-norm statistics; methods that are compared share it

    def cost_in(self, context: Context, size: Size, state: Any = None) -> Cost:
        """What a client of a size costs in a fleet that trains the context's sizes; by default in the first state."""
        state = self.method.init(context) if state is None else state
        return measure(context, self.method, state, size, self.example)

    @cached_property
    def example(self) -> Batch:
        """A batch of the training batch size on the meta device."""
        count, about = self.config.training.batch_size, self.signature
        kind = torch.int64 if about.labels else torch.float32
        return Batch(about.example(count), torch.zeros(count, *about.target_shape, dtype=kind, device="meta"))

    @cached_property
    def _template(self) -> tuple[nn.Module, dict[str, Tensor]]:
        network = self.model if self._keeps_statistics else without_statistics(self.model)
        return hollow(network), {name: tensor.clone() for name, tensor in tensors_of(network).items()}

    @cached_property
    def _base(self) -> Base:
        return Base(self._template[1])  # made once, since its fingerprint takes time

    @property
    def _keeps_statistics(self) -> bool:
        return self.tricks.batch_norm in ("tracked", "local")

    @property
    def _skeletons(self) -> dict[tuple[float, int | None], nn.Module]:
        return self._narrowed.setdefault(self._keeps_statistics, {})

    @cached_property
    def _narrowed(self) -> dict[bool, dict[tuple[float, int | None], nn.Module]]:
        return {}  # narrowed once for all contexts of this experiment, with running statistics or without

    @property
    def _starts_learned(self) -> bool:
        """Whether the first weights were learned elsewhere."""
        config = self.config.model
        by_name = self._own_model() is None and models.learned(config.name, config.options, self.config.folder)
        return self._pretrained or config.weights is not None or by_name

    def _own_parts(self) -> list[str]:
        """The user's code in the experiment: named "module:attribute", or live."""
        names = {kind: str(getattr(self.config, kind).name) for kind in _MAY_LIVE}
        return [f"your {kind} '{name.removeprefix(_LIVE)}'" for kind, name in names.items() if ":" in name]

    def is_live(self, kind: str) -> bool:
        """Whether the "data", "model", "method" or "task" is an object that no name leads to."""
        return kind in self._live and str(getattr(self.config, kind).name).startswith(_LIVE)

    def _own_model(self) -> nn.Module | None:
        return self._live.get("model")

    def _own_share(self, device: int) -> Share:
        """The share that the data function returns for a device; an error if the network lacks one of its classes."""
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
        if kind == "model":
            models.check_network(value)
        self._live[kind] = value
        if isinstance(value, Method) and is_dataclass(value):
            options = {field.name: getattr(value, field.name) for field in fields(value)}
            return {"name": name_of(value), **options}
        return {"name": f"{_LIVE}{getattr(value, '__name__', type(value).__name__)}"}

    def _refuse_missing(self, kind: str) -> None:
        name = getattr(self.config, kind).name
        if name.startswith(_LIVE):
            raise ConfigError(
                f"{kind}: this run was made with a live {name.removeprefix(_LIVE)}, which no file can name; "
                f"give it again in Python, az.load(directory, {kind}=...); commands need a name, such as 'module:name'"
            )


# Python names a function by this where it was called with a wrong argument, and users know the class derived from it.
Setup.__init__.__qualname__ = "Experiment.__init__"


def limits_activations(devices: DevicesConfig) -> bool:
    """Whether any device's budget, or what capacities are fractions of, limits the memory of a training step."""
    budgets = (*(group.budget for group in devices.groups), *devices.budgets)
    return devices.capacity_of == "activation_bytes" or any(
        b is not None and (b.activation_bytes or b.memory_bytes) for b in budgets
    )
