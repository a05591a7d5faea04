"""The tables of an experiment file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from anysize.config.compare import CompareConfig
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
    """The data set, and how it is divided among the clients.

    >>> DataConfig(name="digits", clients=20).split
    'iid'
    """

    table: ClassVar[str] = "data"
    name: Name
    """A data set's name, `"module:function"`, `"hf:..."` for one of the package `datasets`, or `"devices"`: each device
    has its own."""
    test: Name | None = None
    """With name = "devices": the server's test data, the test part of a data set's name or `"module:function"`."""
    clients: Count | None = None
    """How many clients share the data; needed unless the split is natural or each device has its own. With split =
    "natural", absent: one for each data group. Fewer than groups: one group each, drawn at random, and the other groups
    are not used. More: every group is divided evenly among its clients."""
    split: Literal["iid", "classes", "dirichlet", "natural"] = "iid"
    """How the training data is divided among the clients."""
    classes_per_client: Count | None = None
    """With split = "classes": how many classes one client has."""
    unbalance: Part | None = None
    """With split = "classes": how much a client gets of each class after its first, as a fraction of a full share."""
    alpha: Positive | None = None
    """With split = "dirichlet": the concentration; smaller is more uneven."""
    equal_sizes: bool = True
    """With split = "dirichlet": whether every client has equally many samples."""
    groups_per_client: Count | None = None
    """With split = "natural": the most data groups (roles, writers) that one client gets; absent: one."""
    domains: Names = ()
    """With split = "natural": the names of the data groups that are used, in the order in which clients get them;
    absent: all, sorted. Test data is not restricted: `evaluation.by_domain` tells them apart."""
    fraction: Part = 1.0
    """The fraction of the training data that is used."""
    validation: BelowOne = 0.0
    """The fraction of each client's data that is its holdout."""
    augment: Names = ()
    """Random changes to training images: "crop", "flip"."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the data set's function."""
    normalize: bool | None = None
    """Whether the model's first layer normalises its input; absent: if the data has a mean."""

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
                yield f"data.{key}: each device brings its own data, so the server divides nothing; leave it out"


class ModelConfig(Table):
    """The network by name, its options, and what of it may shrink.

    >>> ModelConfig(name="mlp", options={"hidden": (64, 32)}).options
    {'hidden': [64, 32]}
    """

    table: ClassVar[str] = "model"
    name: Name
    """A model's name, `"module:function"` that returns any nn.Module, or a network of another package: `"hf:..."`,
    `"timm:..."`, `"torchvision:..."`."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the model's function."""
    weights: Name | None = None
    """A safetensors file to start from, relative to the experiment file."""
    keep: Names = ()
    """Patterns of parameters whose width group stays whole at every size."""
    frozen: Names = ()
    """Patterns of parameters that are not trained."""
    heads: Literal["within", "whole"] = "within"
    """Whether attention shrinks within every head, or drops whole heads."""
    input: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample as the network receives it; absent: as the data set says."""
    tokens: bool | None = None
    """Whether inputs are integers; absent: as the data set says, or false if the server has none."""
    blocks: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """Names of the modules that can be removed, a list for each stage; absent: found by tracing."""
    attributes: Options = Field(default_factory=dict)
    """Module attributes that hold a size and must shrink with it."""


class MethodConfig(Table):
    """The method and its options; the file lists them beside the name.

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
        """Move every key except the name into the options."""
        if not isinstance(given, dict) or not isinstance(given.get("options", {}), dict):
            return given
        flat = {key: value for key, value in given.items() if key not in ("name", "options")}
        named = {"name": given["name"]} if "name" in given else {}
        return {**named, "options": {**given.get("options", {}), **flat}}


class TrainingConfig(Table):
    """How a client trains its sub-model in one round; every method has the same defaults.

    >>> TrainingConfig(schedule="step", milestones=[0.5]).rate(100, 200)
    0.001
    """

    table: ClassVar[str] = "training"
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The client's optimizer, a new one every round."""
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
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """In what a network's passes compute; weights, optimizer, losses, messages and tests stay float32. fp16 scales the
    loss, and leaves out steps that overflow."""
    stack: Count = 1
    """How many clients with networks of equal shape and equally many samples are trained together, if their layers are
    linear or recurrent; 1: each alone. Results differ in the last bits."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """How the learning rate falls over the rounds."""
    milestones: Annotated[tuple[Positive, ...], Field(strict=False)] = ()
    """step: when the rate falls, in rounds; below 1: in fractions of all rounds."""
    gamma: Positive = 0.1
    """step: what the rate is multiplied by at each milestone."""
    final_learning_rate: NotNegative = 0.0
    """cosine: the rate after the last round."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in one local epoch if the table gives neither epochs nor steps."""
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
        if self.precision == "fp16" and self.stack > 1:
            yield 'training.precision: given "fp16"; it needs training.stack = 1, since clients overflow one by one'
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
    """classification, next-token, regression, multilabel, token-classification, masked-lm, causal-lm, seq2seq-lm, or
    `"module:Task"`."""
    classes: Count | None = None
    """How many classes there are, or symbols; absent: as the data says."""
    target: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """The shape of one sample's target, if the server has no data that shows it; absent: one class per sample, or per
    token."""


class TricksConfig(Table):
    """Techniques that any method can use; absent: as in the method's paper.

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
    """Weigh updates by their numbers of samples, or all clients equally."""
    rescaled_init: bool | None = None
    """Whether separate narrower networks start with the full network's smaller weights."""
    proximal: NotNegative | None = None
    """The strength of the pull towards the received weights."""
    proximal_form: Literal["sum", "mean"] | None = None
    """Whether that pull sums over a tensor's entries or takes their mean."""
    max_entropy: NotNegative | None = None
    """The strength of the pull of the classifier's inputs towards the uniform distribution."""
    server_momentum: BelowOne | None = None
    """Momentum of the server's step."""
    adversarial: UpToOne | None = None
    """The weight of the loss on attacked inputs; clean inputs get the rest."""
    attack_epsilon: Positive | None = None
    """How far the attack in training may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive | None = None
    """How far one step of that attack moves an entry."""
    attack_steps: Count | None = None
    """How many steps that attack has."""


class AggregationConfig(Table):
    """How the server combines what clients send.

    >>> AggregationConfig(rule="median").attackers
    0.2
    """

    table: ClassVar[str] = "aggregation"
    rule: Literal["mean", "median", "trimmed-mean", "norm-clip", "norm-filter", "krum", "geometric-median"] = "mean"
    """What every entry gets from the clients that hold it. Only "mean", "norm-clip" and "norm-filter" use
    tricks.weighting."""
    attackers: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """trimmed-mean and krum: the share of the clients that hold an entry that may lie, rounded up."""
    norm: Positive | None = None
    """norm-clip, norm-filter: the largest norm of an update; absent: the median norm of the round's updates, of its
    size for norm-clip and of all sizes for norm-filter, which leaves out updates of more than twice that."""
    secure_threshold: Annotated[int, Field(ge=2)] | None = None
    """Secure aggregation: the server learns only sums over at least so many clients of one size, and nothing of a
    single one; absent: it sees every update."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.norm is not None and self.rule not in ("norm-clip", "norm-filter"):
            raise_problems(
                [f'aggregation.norm: given with rule = "{self.rule}"; only "norm-clip" and "norm-filter" use it']
            )
        if self.secure_threshold is not None and self.rule != "mean":
            raise_problems(
                [
                    f'aggregation.secure_threshold: given with rule = "{self.rule}", which compares single updates; '
                    'take rule = "mean", or leave one out'
                ]
            )
        return self


class AdversaryConfig(Table):
    """Clients that attack, in a simulation.

    >>> AdversaryConfig(name="sign-flip").share
    0.2
    """

    table: ClassVar[str] = "adversary"
    name: Literal["none", "sign-flip", "scale", "noise", "inner-product", "label-flip", "backdoor"] = "none"
    """What the attackers do."""
    share: Part = 0.2
    """The share of all clients that attack."""
    strength: Positive | None = None
    """sign-flip, scale: the factor on the update, 4 and 10 if absent. noise: its norm, in norms of the update, 4 if
    absent."""
    who: Literal["any", "largest"] = "any"
    """Which clients attack: any, or those with the largest capacity, as if each attacker claimed it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strength is not None and self.name not in ("sign-flip", "scale", "noise"):
            raise_problems(
                [f'adversary.strength: given with name = "{self.name}", which does not use it; leave it out']
            )
        return self


class PrivacyConfig(Table):
    """Differential privacy of clients, in a simulation.

    >>> PrivacyConfig().clip is None
    True
    """

    table: ClassVar[str] = "privacy"
    clip: Positive | None = None
    """The largest norm of a client's update, over all entries that its size has; absent: no differential privacy. With
    `quantile`, that of the first round."""
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The clip follows the norms: from round to round it moves towards the norm that this share of the updates does not
    exceed; absent: it stays as it is."""
    count_noise: Positive | None = None
    """The deviation of the noise on the count of updates within the clip, in clients; absent: a twentieth of the
    clients that are expected in a round."""
    noise: Positive = 1.0
    """The deviation of the Gaussian noise that the server adds to the sum of the updates, in clips. With `quantile`,
    the sum gets a little more, so that sum and count together tell as much as the sum alone would."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The probability with which the guarantee may fail."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantile is not None and self.clip is None:
            raise_problems(["privacy.quantile: given without privacy.clip; give the clip of the first round"])
        if self.count_noise is not None and self.quantile is None:
            raise_problems(["privacy.count_noise: given without privacy.quantile; leave it out"])
        return self


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
    """What to evaluate on: the server's test set, each client's holdout, or both."""
    batch_size: Count = 500
    """Samples in a forward pass."""
    by_domain: bool = False
    """Test every data group (domain, writer) separately: no batch mixes two, and each gets its metric."""
    calibration_clients: Count = 20
    """How many clients re-estimate batch-norm statistics."""
    calibration_samples: Count = 64
    """The most training samples that each of these clients uses for that."""
    calibration_proxy: Count | None = None
    """How many training samples the server has itself, for sizes that no device can run; absent: it has none."""
    clients: Count | None = None
    """How many clients evaluate on their holdouts if `on` has "clients"; absent: all."""
    attack: Literal["none", "pgd", "auto"] = "none"
    """Also measure under attack: projected gradient descent, or the stronger attacks of a library."""
    attack_epsilon: Positive = 8 / 255
    """How far an attack may move any entry of an input; inputs are in [0, 1]."""
    attack_step: Positive = 2 / 255
    """How far one step of "pgd" moves an entry."""
    attack_steps: Count = 7
    """How many steps "pgd" has."""
    attack_samples: Count = 500
    """The most test samples that are attacked."""
    robustness: Annotated[tuple[UpToOne, ...], Field(strict=False), AfterValidator(distinct)] = (
        0.0,
        0.2,
        0.5,
        0.8,
        1.0,
    )
    """The levels of robustness that are measured under attack, if the method offers a choice."""


def _default_engine() -> Any:
    """The default engine: ANYSIZE_ENGINE, or worker processes if there are several cores."""
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
    """Where clients train and networks are tested; auto: cuda if available, else cpu."""
    round_timeout: Positive | None = None
    """On a fleet: seconds after which a round ends without the missing clients; absent: it waits for all."""
    min_clients: Count | None = None
    """How many clients must answer in a round; if fewer do, it changes nothing. Absent: one, on a fleet."""
    update_norm: Positive = 10.0
    """On a fleet: refuse an update that changes the parameters by more than this factor times (their norm plus one)."""
    max_samples: Count = 1_000_000
    """On a fleet: refuse an update whose device claims more samples; they are its weight in the mean."""
    void_rounds: Count = 5
    """On a fleet: the run stops after this many rounds in a row with too few answers."""


class CommunicationConfig(Table):
    """In which form a client's update travels, the same for every method.

    >>> CommunicationConfig(update="top-k").keep
    0.1
    """

    table: ClassVar[str] = "communication"
    update: Literal["float32", "float16", "int8", "top-k"] = "float32"
    """How the change of each weight of 1,024 entries or more is sent: in 16 or 8 bits, or only its largest entries.
    What int8 and top-k leave out stays with the client, for its next update."""
    keep: Part = 0.1
    """top-k: the fraction of a weight's entries that is sent."""

    @property
    def feeds_back(self) -> bool:
        """Whether a client keeps what its update leaves out."""
        return self.update in ("int8", "top-k")


class CallbacksConfig(Table):
    """What happens between rounds: early stopping, the best round, and your own callbacks.

    >>> CallbacksConfig(patience=5).keep_best
    False
    """

    table: ClassVar[str] = "callbacks"
    patience: Annotated[int, Field(ge=0)] = 0
    """Stop when this many evaluations in a row are no better on the clients' held-out data; 0: run all rounds."""
    min_delta: NotNegative = 0.0
    """With patience: by more than this an evaluation must be better to count as such."""
    keep_best: bool = False
    """Keep the state after the best round on the clients' held-out data, beside that after the last."""
    own: Names = ()
    """Your own callbacks, `"module:name"` each: an object, or a class or function that makes one without arguments."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_delta and not self.patience:
            raise_problems(["callbacks.min_delta: given without callbacks.patience, which it is for; give both"])
        return self


class TrackConfig(Table):
    """Where else a run shows its numbers.

    >>> TrackConfig().name
    'none'
    """

    table: ClassVar[str] = "track"
    name: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"
    """The program that shows them: TensorBoard, Weights & Biases or MLflow, each an extra of that name."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of its class in `anysize.callbacks`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.options and self.name == "none":
            raise_problems(["track.options: given without track.name, which they are for; give both"])
        return self


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
    """The seed of every random choice."""
    rounds: Count = 100
    """How many rounds the run has."""
    evaluate_every: Count = 25
    """Rounds from one evaluation to the next."""
    checkpoint_every: Count = 1
    """Rounds from one checkpoint to the next; a resumed run repeats the rounds since the last checkpoint."""
    data: DataConfig
    model: ModelConfig
    devices: DevicesConfig = Field(default_factory=DevicesConfig)
    method: MethodConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    tricks: TricksConfig = Field(default_factory=TricksConfig)
    aggregation: AggregationConfig = Field(default_factory=AggregationConfig)
    adversary: AdversaryConfig = Field(default_factory=AdversaryConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    communication: CommunicationConfig = Field(default_factory=CommunicationConfig)
    callbacks: CallbacksConfig = Field(default_factory=CallbacksConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    compare: CompareConfig | None = None
    _folder: Path | None = PrivateAttr(default=None)
    _given: frozenset[str] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in what follows from data that only the devices have (they evaluate on their holdouts), and the method.

        A file with a comparison and no [method] has the first method of the comparison.
        """
        given = _with_method(given)
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, dict) or data.get("name") != "devices":
            return given
        evaluation = given.get("evaluation", {})
        if isinstance(evaluation, dict) and evaluation.get("on") is None:
            aggregation = given.get("aggregation")
            secure = isinstance(aggregation, dict) and aggregation.get("secure_threshold") is not None
            both = ["test"] if secure else ["test", "clients"]
            evaluation = {**evaluation, "on": ["clients"] if data.get("test") is None else both}
        held_out = {"validation": 0.1} if data.get("validation") is None else {}
        return {**given, "data": {**data, **held_out}, "evaluation": evaluation}

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._problems() if self.own_data else ())
        if self.training.stack > 1 and self.communication.update != "float32":
            raise_problems([f'communication.update: given "{self.communication.update}"; it needs training.stack = 1'])
        # A user's data set may bring holdouts, so only built-in data sets can be checked here.
        named = ":" not in self.data.name and self.data.name != "devices"
        if named and "clients" in self.evaluation.on and self.data.validation == 0:
            raise_problems(['evaluation.on: "clients" needs a holdout on each client; set data.validation above 0'])
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
        """Keys that conflict with data that only the devices have."""
        devices, own = self.devices, 'with data.name = "devices"'
        if self.adversary.name != "none":
            yield f"adversary.name: {own} clients are real; attackers are simulated, so leave it out"
        if devices.redraw != "never":
            yield f'devices.redraw: given "{devices.redraw}"; {own} a device has a fixed capacity'
        if devices.budgets:
            yield f"devices.budgets: {own} every device tells its budget itself, with every answer; leave it out"
        if devices.assignment == "group":
            yield f'devices.assignment: "group" needs the data, but {own} the server does not know it'
        if devices.available not in (None, 1.0) or any(g.available not in (None, 1.0) for g in devices.groups):
            yield f"devices.available: {own} real devices decide when they are available; leave it out"
        if "test" in self.evaluation.on and self.data.test is None:
            yield f'evaluation.on: {own} the server has no test set; name one in data.test, or set on = ["clients"]'
        if self.evaluation.calibration_proxy is not None and self.data.test is None:
            yield f"evaluation.calibration_proxy: {own} the server has no samples; name a data set in data.test"
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
        """Whether two experiments have equal values; the folders of their files do not matter."""
        if not isinstance(other, ExperimentConfig):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    @property
    def folder(self) -> Path | None:
        """The experiment file's folder, or None for an experiment that was not read from a file."""
        return self._folder

    def path(self, name: str) -> Path:
        """The path of a file that the experiment names; relative names start at the experiment file's folder.

        >>> from anysize.config import from_dict
        >>> from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...            "method": {"name": "fedavg"}}, folder=Path("/lab")).path("start.pt").as_posix()
        '/lab/start.pt'
        """
        return (self._folder or Path()) / name

    def gives(self, key: str) -> bool:
        """Whether the file gives a value for a dotted key, instead of leaving it to a default.

        An experiment that was not read from tables gives all its values.

        >>> from anysize.config import from_dict
        >>> config = from_dict({"data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"},
        ...                     "method": {"name": "flanc", "layers": {"conv1": {"basis_size": 0.5}}}})
        >>> config.gives("data.clients"), config.gives("method.layers"), config.gives("training.learning_rate")
        (True, True, False)
        """
        return self._given is None or any(within(key, other) or within(other, key) for other in self._given)

    def replaced(self, **tables: Any) -> ExperimentConfig:
        """A copy with other tables; it counts as giving all its values, whatever the file gave."""
        made = self.model_copy(update=tables)
        made._given = None
        return made

    def to_dict(self) -> dict[str, Any]:
        """The tables in the form of a file: with defaults, without absent values."""
        tables = self.model_dump(exclude_none=True)
        method = tables["method"]
        tables["method"] = {"name": method["name"], **method["options"]}
        return tables


def _with_method(given: Any) -> Any:
    """The tables with the first method of their comparison as the method, if they have none."""
    if not isinstance(given, dict) or "method" in given or not isinstance(given.get("compare"), dict):
        return given
    first = next(iter(given["compare"].get("methods") or ()), None)
    if isinstance(first, str):
        return {**given, "method": {"name": first}}
    if not isinstance(first, dict) or "name" not in first:
        return given
    return {**given, "method": {"name": first["name"], "options": first.get("options", {})}}


def given_keys(tables: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of every value in the tables; `devices.file` gives `devices.groups`."""
    read = {"devices.file": "devices.groups"}
    for key, value in flat(tables).items():
        if not isinstance(value, Mapping):  # such a leaf is empty
            yield read.get(key, re.sub(r"^method\.options\.", "method.", key))
