"""The tables of an experiment file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from anysize.config.devices import NEEDS_LABELS, DevicesConfig
from anysize.config.table import Table, raise_problems
from anysize.config.toml import flat
from anysize.config.values import (
    BelowOne,
    Count,
    Name,
    Names,
    NotNegative,
    Options,
    Part,
    Positive,
    UpToOne,
    distinct,
    folder_name,
    not_empty,
    within,
)


class DataConfig(Table):
    """What is learned from, and who has what.

    >>> DataConfig(name="digits", clients=20).split
    'iid'
    """

    table: ClassVar[str] = "data"
    name: Name
    """A data set's name, `"module:function"`, or `"devices"`: each device has its own."""
    test: Name | None = None
    """With name = "devices": a data set of the server's own, by name or `"module:function"`, whose test part tests."""
    clients: Count | None = None
    """How many clients share the data; needed unless the split is natural or each device has its own."""
    split: Literal["iid", "classes", "dirichlet", "natural"] = "iid"
    """How the training data is divided among the clients."""
    classes_per_client: Count | None = None
    """With split = "classes": how many classes one client has."""
    unbalance: Part | None = None
    """With split = "classes": the part of a share that a client has of its classes after the first; absent: all."""
    alpha: Positive | None = None
    """With split = "dirichlet": the concentration; smaller is more uneven."""
    equal_sizes: bool = True
    """With split = "dirichlet": whether every client has equally many samples."""
    groups_per_client: Count | None = None
    """With split = "natural": at most so many data groups (roles, writers) to a client, dealt evenly; absent: one."""
    domains: Names = ()
    """With split = "natural": every data group's name, in the order in which clients get them; absent: sorted."""
    fraction: Part = 1.0
    """The part of the training data that is used at all."""
    validation: BelowOne = 0.0
    """The part of each client's share that is held out on the client."""
    augment: Names = ()
    """Random changes to training images: "crop", "flip"."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the data set's function."""
    normalize: bool | None = None
    """Whether the model's first layer normalises its input; absent: where the data has a mean."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if self.clients is None and self.split != "natural" and self.name != "devices":
            yield 'data.clients: missing; give the number of clients, or split = "natural"'
        for key, split in (("classes_per_client", "classes"), ("alpha", "dirichlet")):
            given = getattr(self, key)
            if self.split == split and given is None:
                yield f'data.{key}: missing; split = "{split}" needs it'
            if self.split != split and given is not None:
                yield (
                    f'data.{key}: given {given}, but split = "{self.split}" does not use it; '
                    f'set split = "{split}" or leave it out'
                )
        others = {"unbalance": "classes", "groups_per_client": "natural", "domains": "natural"}
        for key, split in others.items():
            given = getattr(self, key)
            if given not in (None, ()) and self.split != split:
                shown = list(given) if isinstance(given, tuple) else given
                yield f'data.{key}: given {shown}, but only split = "{split}" uses it; leave it out'
        if self.name != "devices" and self.test is not None:
            yield 'data.test: only for name = "devices"; a data set brings its own test part'
        if self.name == "devices":
            given = {"split": self.split != "iid", "fraction": self.fraction != 1.0, "options": bool(self.options)}
            for key in (key for key, is_given in given.items() if is_given):
                yield f"data.{key}: every device has its own data, which the server does not divide; leave it out"


class ModelConfig(Table):
    """The network, as a name with options, and what of it may shrink.

    >>> ModelConfig(name="mlp", options={"hidden": (64, 32)}).options
    {'hidden': [64, 32]}
    """

    table: ClassVar[str] = "model"
    name: Name
    """A model's name, or `"module:function"` that returns any nn.Module."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the model's function."""
    weights: Name | None = None
    """A safetensors file to start from, relative to the experiment file."""
    keep: Names = ()
    """Patterns of parameters whose width group stays whole at every size."""
    frozen: Names = ()
    """Patterns of parameters that are not trained."""
    heads: Literal["within", "whole"] = "within"
    """Attention shrinks within every head, or by dropping whole heads."""
    input: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample as the network receives it; absent: as the data set says."""
    tokens: bool | None = None
    """Whether inputs are integers; absent: as the data set says, and false where the server has none."""
    blocks: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """Names of the modules that can be removed, a list for each stage; absent: found by tracing."""
    attributes: Options = Field(default_factory=dict)
    """Module attributes that hold a size and must shrink with it."""


class MethodConfig(Table):
    """The method and its own options, which stand flat beside the name in the file.

    >>> MethodConfig(name="flanc", orthogonality=10.0).options
    {'orthogonality': 10.0}
    """

    table: ClassVar[str] = "method"
    name: Name
    """A method's name, or `"module:Class"`."""
    options: Options = Field(default_factory=dict)
    """The method's hyperparameters."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        """The table with every key but the name moved into the options."""
        if not isinstance(given, dict) or not isinstance(given.get("options", {}), dict):
            return given
        flat = {key: value for key, value in given.items() if key not in ("name", "options")}
        named = {"name": given["name"]} if "name" in given else {}
        return {**named, "options": {**given.get("options", {}), **flat}}


class TrainingConfig(Table):
    """What a client does with its sub-model in one round; the same defaults for every method.

    >>> TrainingConfig(schedule="step", milestones=[0.5]).rate(100, 200)
    0.001
    """

    table: ClassVar[str] = "training"
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The client's optimizer, made anew every round."""
    local_epochs: Count | None = None
    """Passes over the client's data; 1 unless local_steps is given."""
    local_steps: Count | None = None
    """Optimizer steps, whatever the amount of data."""
    batch_size: Count = 32
    """Samples in a step."""
    learning_rate: Positive = 0.01
    """The learning rate of the first round."""
    momentum: BelowOne = 0.9
    """Momentum of sgd."""
    weight_decay: NotNegative = 1e-4
    """Decay of every parameter."""
    clip: Positive | None = None
    """The largest norm of the gradient of a parameter group (most methods have one); absent: no clipping."""
    stack: Count = 1
    """Clients of equal shape and amount of data that are trained together, in networks of linear and recurrent layers;
    1: each alone. Results differ in their last bits."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the learning rate falls over the rounds."""
    milestones: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """step: when the rate falls, in rounds; below 1: in fractions of all rounds."""
    gamma: Positive = 0.1
    """step: what the rate is multiplied by at each milestone."""
    final_learning_rate: NotNegative = 0.0
    """cosine: where the rate would arrive after the last round."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """The table with one local epoch unless it says otherwise."""
        if not isinstance(given, dict) or given.get("local_epochs") or given.get("local_steps"):
            return given
        return {"local_epochs": 1, **{key: value for key, value in given.items() if value is not None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if self.local_epochs is not None and self.local_steps is not None:
            yield "training.local_epochs: given together with training.local_steps; give one of the two"
        if self.schedule == "step" and not self.milestones:
            yield 'training.milestones: missing; schedule = "step" needs at least one, such as [0.5]'
        if self.final_learning_rate > self.learning_rate:
            yield (
                f"training.final_learning_rate: given {self.final_learning_rate:g}, "
                f"must be at most learning_rate, {self.learning_rate:g}"
            )

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round, counted from 0, in a run of `rounds` rounds.

        >>> training = TrainingConfig(learning_rate=0.1, schedule="cosine")
        >>> [round(training.rate(number, 4), 4) for number in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        """
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "cosine":
            fall = (1.0 + math.cos(math.pi * round / rounds)) / 2.0
            return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * fall
        passed = sum(round >= _milestone_round(milestone, rounds) for milestone in self.milestones)
        return float(self.learning_rate * self.gamma**passed)


def _milestone_round(milestone: float, rounds: int) -> int:
    """The first round, counted from 0, at or after a milestone."""
    exact = milestone * rounds if milestone < 1 else milestone
    # 0.07 * 100 is 7.000000000000001: without the tolerance the milestone would come a round late.
    return math.ceil(exact - 1e-9)


class TaskConfig(Table):
    """What is learned.

    >>> TaskConfig().name
    'classification'
    """

    table: ClassVar[str] = "task"
    name: Name = "classification"
    """classification, next-token, regression, multilabel, or `"module:Task"`."""
    classes: Count | None = None
    """How many classes there are, or symbols; absent: as the data says."""
    target: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample's target, where the server has no data to see it in; absent: one class per sample, or per
    token."""


class TricksConfig(Table):
    """What may be added to any method; absent means as in the method's paper.

    >>> TricksConfig(masked_loss=True).batch_norm is None
    True
    """

    table: ClassVar[str] = "tricks"
    masked_loss: bool | None = None
    """Leave the classes that a client does not have out of its loss."""
    classwise_head: bool | None = None
    """Average a class's row of the classifier over the clients that have the class."""
    batch_norm: Literal["batch", "tracked", "calibrated", "local"] | None = None
    """Which statistics batch-norm uses."""
    weighting: Literal["samples", "clients"] | None = None
    """Weigh an update by its number of samples, or every client alike."""
    rescaled_init: bool | None = None
    """Start narrower networks of their own with the full network's smaller weights."""
    proximal: NotNegative | None = None
    """The strength of the pull towards the received weights."""
    proximal_form: Literal["sum", "mean"] | None = None
    """Whether that pull sums over a tensor's entries or takes their mean."""
    max_entropy: NotNegative | None = None
    """The strength of the pull of what enters the classifier towards the uniform distribution."""
    server_momentum: BelowOne | None = None
    """Momentum of the server's own step."""
    adversarial: UpToOne | None = None
    """The weight of the loss on inputs under attack; the rest is that on clean inputs."""
    attack_epsilon: Positive | None = None
    """How far the attack in training may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive | None = None
    """How far one step of that attack moves it."""
    attack_steps: Count | None = None
    """How many steps that attack has."""


class EvaluationConfig(Table):
    """Where and how accuracy is measured.

    >>> EvaluationConfig().on
    ('test',)
    """

    table: ClassVar[str] = "evaluation"
    on: Annotated[
        tuple[Literal["test", "clients"], ...],
        Field(strict=False),
        AfterValidator(not_empty),
        AfterValidator(distinct),
    ] = ("test",)
    """The server's test set, and/or each client's held-out share."""
    batch_size: Count = 500
    """Samples in a forward pass."""
    by_domain: bool = False
    """Test every data group (domain, writer) by itself: no batch mixes two, and each one's metric is kept."""
    calibration_clients: Count = 20
    """How many clients re-estimate batch-norm statistics."""
    calibration_samples: Count = 64
    """How many of its training samples each of them takes for it, at most."""
    clients: Count | None = None
    """How many clients judge themselves where on has "clients"; absent: all."""
    attack: Literal["none", "pgd", "auto"] = "none"
    """Also measure under attack: by projected gradient descent, or by a library's stronger attacks."""
    attack_epsilon: Positive = 8 / 255
    """How far an attack may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive = 2 / 255
    """How far one step of "pgd" moves it."""
    attack_steps: Count = 7
    """How many steps "pgd" has."""
    attack_samples: Count = 500
    """How many test samples are attacked at most."""
    robustness: Annotated[tuple[UpToOne, ...], Field(strict=False), AfterValidator(distinct)] = (
        0.0,
        0.2,
        0.5,
        0.8,
        1.0,
    )
    """The levels of robustness that are measured under attack, where a method offers a choice."""


def _default_engine() -> Any:
    """The engine of a file that names none: ANYSIZE_ENGINE, else worker processes where they can help."""
    return os.environ.get("ANYSIZE_ENGINE") or ("processes" if (os.cpu_count() or 1) > 1 else "inprocess")


class EngineConfig(Table):
    """Where clients run.

    >>> EngineConfig(name="processes", workers=2).workers
    2
    """

    table: ClassVar[str] = "engine"
    name: Literal["inprocess", "processes", "flower"] = Field(default_factory=lambda: _default_engine())
    """In this process, in worker processes, or on Flower's simulation; absent: processes if there are several cores."""
    workers: Count | None = None
    """How many worker processes; absent: one per core."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where clients train and networks are tested; auto: cuda if there is one, else cpu."""
    round_timeout: Positive | None = None
    """On a fleet: seconds after which a round closes without the missing clients; absent: it waits for all."""
    min_clients: Count | None = None
    """How many clients must answer in a round; if fewer do, it changes nothing. Absent: one, on a fleet."""
    update_norm: Positive = 10.0
    """On a fleet: an update is refused if it changes the parameters by more than so many times their norm plus one."""
    max_samples: Count = 1_000_000
    """On a fleet: an update is refused if its device claims more samples, which are its weight."""
    void_rounds: Count = 5
    """On a fleet: the run stops after so many rounds in a row in which too few clients answered."""


class ExperimentConfig(Table):
    """A complete, checked experiment.

    >>> from anysize.config import from_dict
    >>> config = from_dict({"data": {"name": "digits", "clients": 20},
    ...                     "model": {"name": "small-cnn"}, "method": {"name": "flanc"}})
    >>> config.rounds, config.training.learning_rate, config.devices.participation
    (100, 0.01, 1.0)
    """

    name: Annotated[str, AfterValidator(folder_name)] = "experiment"
    """What the run is called; its folder's name."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Where every random choice starts."""
    rounds: Count = 100
    """How many rounds the run has."""
    evaluate_every: Count = 25
    """Rounds from one evaluation to the next."""
    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next; what was done since the last one is done again after a resume."""
    data: DataConfig
    model: ModelConfig
    devices: DevicesConfig = Field(default_factory=DevicesConfig)
    method: MethodConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    tricks: TricksConfig = Field(default_factory=TricksConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    _folder: Path | None = PrivateAttr(default=None)
    _given: frozenset[str] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """The file with what follows where every device has its own data: it is judged on the devices."""
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, dict) or data.get("name") != "devices":
            return given
        evaluation = given.get("evaluation", {})
        if isinstance(evaluation, dict) and evaluation.get("on") is None:
            evaluation = {**evaluation, "on": ["clients"] if data.get("test") is None else ["test", "clients"]}
        held_out = {"validation": 0.1} if data.get("validation") is None else {}
        return {**given, "data": {**data, **held_out}, "evaluation": evaluation}

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._problems() if self.own_data else ())
        # A data set of the user's own may come with held-out shares, so only named sets can be judged here.
        named = ":" not in self.data.name and self.data.name != "devices"
        if named and "clients" in self.evaluation.on and self.data.validation == 0:
            raise_problems(['evaluation.on: "clients" needs a held-out share; set data.validation above 0'])
        return self

    @property
    def own_data(self) -> bool:
        """Whether every device has its own data, which the server never sees."""
        return self.data.name == "devices"

    def tells(self, what: str) -> bool:
        """Whether a client tells the server its number of "samples", or its "labels": which classes it has.

        >>> from anysize.config import from_dict
        >>> tables = {"data": {"name": "devices"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}}
        >>> from_dict(tables).tells("samples"), from_dict(tables, ['devices.share=["samples"]']).tells("samples")
        (False, True)
        """
        return not self.own_data or what in self.devices.share

    def _problems(self) -> Iterator[str]:
        """What does not go together with data that only the devices have."""
        devices, own = self.devices, 'with data.name = "devices"'
        if devices.redraw != "never":
            yield f'devices.redraw: given "{devices.redraw}"; {own} a device has the capacity that it has'
        if devices.assignment == "group":
            yield f'devices.assignment: "group" goes by the data, which {own} the server does not know'
        if devices.available not in (None, 1.0) or any(g.available not in (None, 1.0) for g in devices.groups):
            yield f"devices.available: {own} devices are there or not; leave it out"
        if "test" in self.evaluation.on and self.data.test is None:
            yield f'evaluation.on: {own} the server has no test set; name one in data.test, or set on = ["clients"]'
        if self.tricks.weighting == "samples" and not self.tells("samples"):
            yield (
                'tricks.weighting: "samples" needs every device\'s number of samples; set devices.share = ["samples"], '
                'or weighting = "clients"'
            )
        if self.tricks.classwise_head and not self.tells("labels"):
            yield f"tricks.classwise_head: {NEEDS_LABELS}"
        if self.data.normalize and self.data.test is None:
            yield f"data.normalize: {own} nobody knows the data's mean; normalise in the model, or name a data.test"

    def __eq__(self, other: object) -> bool:
        """Whether two experiments say the same; where their files lie does not matter."""
        if not isinstance(other, ExperimentConfig):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    @property
    def folder(self) -> Path | None:
        """The experiment file's folder, or None for an experiment that was not read from a file."""
        return self._folder

    def path(self, name: str) -> Path:
        """The file that the experiment calls `name`: relative names start at the experiment file's folder.

        >>> from anysize.config import from_dict
        >>> from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...            "method": {"name": "fedavg"}}, folder=Path("/lab")).path("start.pt").as_posix()
        '/lab/start.pt'
        """
        return (self._folder or Path()) / name

    def gives(self, key: str) -> bool:
        """Whether the file itself says something of a dotted key, rather than leaving it to a default.

        An experiment that was not read from tables means all that it says.

        >>> from anysize.config import from_dict
        >>> config = from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...                     "method": {"name": "flanc", "layers": {"conv1": {"basis_size": 0.5}}}})
        >>> config.gives("data.clients"), config.gives("method.layers"), config.gives("training.learning_rate")
        (True, True, False)
        """
        return self._given is None or any(within(key, other) or within(other, key) for other in self._given)

    def replaced(self, **tables: Any) -> ExperimentConfig:
        """A copy with other tables, which means all that it says, whatever the file gave."""
        made = self.model_copy(update=tables)
        made._given = None
        return made

    def to_dict(self) -> dict[str, Any]:
        """The tables as the file has them: defaults filled in, absent values left out."""
        tables = self.model_dump(exclude_none=True)
        method = tables["method"]
        tables["method"] = {"name": method["name"], **method["options"]}
        return tables


def given_keys(tables: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of everything that tables say; a file of groups says the groups."""
    read = {"devices.file": "devices.groups"}
    for key, value in flat(tables).items():
        if not isinstance(value, Mapping):  # such a leaf is empty
            yield read.get(key, re.sub(r"^method\.options\.", "method.", key))
