"""Samples that can be drawn by index, and the two things made of them: a data set and a device's share.

A part keeps its samples as they are stored (`uint8` images, `int32` tokens, a lazy `Dataset`) and returns a
batch only on request; `to_input` converts a batch to what a network receives. Inputs are not copied if their
memory can be shared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from anysize.errors import AnysizeError, DataError, told
from anysize.inputs import Input, Inputs, named, tensors_in
from anysize.rng import derive
from anysize.tasks import IGNORED

CHANNELS = (1, 3, 4)
"""Sizes by which the channel axis of an image is told from a spatial axis."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@runtime_checkable
class Part(Protocol):
    """Samples that can be drawn by index.

    Any object with these three methods is a part. If it also has an attribute `group` (the data group of each
    sample, a name or number: the writer, role or domain), it can be split naturally.

    >>> isinstance(TensorPart([[0.0], [1.0]], [0, 1]), Part)
    True
    """

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, index: Tensor) -> tuple[Input, Tensor]:
        """The samples at `index` (int64): x as stored, y as int64 or float32."""
        ...

    def labels(self) -> Tensor:
        """Every y, in order."""
        ...


PartLike: TypeAlias = "Part | tuple[Any, Any] | Dataset[Any] | Mapping[str, Any]"
"""What `Data` and `Share` accept as a part: a `Part`, a pair of arrays, or a map-style `Dataset`."""

Collate: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]
"""Makes a batch, tensors by name, of a list of samples, such as a data collator of transformers."""

LABELS = ("labels", "label")
"""Names under which a batch or a sample holds its targets."""


class TensorPart:
    """A part held in memory as two tensors, which share the memory of the arrays given if possible.

    `uint8` inputs of three or four axes are images and become views of shape (N, C, H, W): (N, H, W) gains a
    channel axis, (N, H, W, C) is permuted. Everything else keeps its shape. A mapping of arrays gives several inputs
    by name.

    >>> part = TensorPart(np.zeros((5, 28, 28), np.uint8), [0, 1, 2, 3, 4])
    >>> x, y = part.batch(torch.tensor([4, 0]))
    >>> tuple(x.shape), x.dtype, y.tolist()
    ((2, 1, 28, 28), torch.uint8, [4, 0])
    """

    def __init__(self, x: Any, y: Any, group: Any = None) -> None:
        self.y = as_targets(as_tensor(y, "y"))
        _refuse_inputs_without_names(x, len(self.y) if self.y.ndim else 0)
        self.x: Input = as_input(x)
        self.group = None if group is None else np.asarray(group)
        problems = list(_length_problems(self.x, self.y, self.group))
        if problems:
            raise DataError("; ".join(problems))

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: Tensor) -> tuple[Input, Tensor]:
        """The samples at `index`: x as stored, y as int64 or float32."""
        y = self.y[index]
        return self.x[index], y if y.is_floating_point() else y.long()

    def labels(self) -> Tensor:
        """Every y, in order, as stored."""
        return self.y

    def __repr__(self) -> str:
        x = ", ".join(_shape(tensor) for tensor in tensors_in(self.x))
        return f"TensorPart({len(self)} samples, x {x}, y {_shape(self.y)})"


class DatasetPart:
    """A part that draws from a map-style `Dataset` of (x, y), and collates only what is drawn.

    An x may be a tensor, an array, a number or an image object (anything numpy can read); images of `uint8`
    become (C, H, W) as in `TensorPart`.

    >>> from torch.utils.data import TensorDataset
    >>> part = DatasetPart(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    >>> len(part), part.labels().tolist()
    (3, [0, 1, 1])
    """

    def __init__(self, dataset: Dataset[Any], group: Any = None) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"a {type(dataset).__name__} has no length or cannot be indexed; "
                "give a map-style Dataset (with __len__ and __getitem__), not an iterable one"
            )
        self.dataset: Any = dataset
        self.group = None if group is None else np.asarray(group)
        self._labels: Tensor | None = None
        if self.group is not None and len(self.group) != len(self):
            raise DataError(f"group has {len(self.group)} entries, the data set {len(self)} samples")

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at `index`, drawn one by one: x as the data set returns it, y as int64 or float32."""
        items = [self._item(i) for i in index.tolist()]
        if not items:
            raise DataError("an empty batch was asked of a Dataset, which cannot say what shape it would have")
        try:
            x, y = default_collate([x for x, _ in items]), default_collate([y for _, y in items])
        except RuntimeError as error:
            raise DataError(f"samples of one batch differ in shape or type: {error}") from error
        y = as_targets(y)
        return as_images(x), y if y.is_floating_point() else y.long()

    def labels(self) -> Tensor:
        """Every y, in order; drawn once and cached, or taken from `dataset.targets` if that holds them."""
        if self._labels is None:
            known = self._declared_labels()
            self._labels = as_targets(self._drawn_labels(range(len(self))) if known is None else known)
        return self._labels

    def _item(self, index: int) -> tuple[Tensor, Tensor]:
        item = self.dataset[index]
        if not isinstance(item, Sequence) or len(item) != 2:
            raise DataError(f"sample {index} of the data set is a {type(item).__name__}; each must be a pair (x, y)")
        return as_tensor(item[0], f"x of sample {index}"), as_tensor(item[1], f"y of sample {index}")

    def _drawn_labels(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self._item(i)[1] for i in indices])

    def _declared_labels(self) -> Tensor | None:
        # Many data sets keep their labels in `targets`, which saves decoding every image. Use it only if it
        # agrees with some drawn samples, since a target transform may change labels.
        targets = getattr(self.dataset, "targets", None)
        if not isinstance(targets, list | tuple | np.ndarray | Tensor) or len(targets) != len(self):
            return None
        known = as_tensor(targets, "targets")
        probe = sorted({0, len(self) // 3, len(self) // 2, len(self) - 1})
        return known if torch.equal(known[probe], self._drawn_labels(probe).to(known.dtype)) else None

    def __repr__(self) -> str:
        return f"DatasetPart({len(self)} samples of {type(self.dataset).__name__})"


class CollatedPart:
    """A part that draws samples, mappings by name, and lets a function make a batch of them, for instance pad texts.

    The target of a sample is its "labels" or "label"; a data set without them is of texts, whose tokens are predicted.

    Args:
        dataset: a map-style data set of mappings: one of the package `datasets`, or a list of dicts.
        collate: makes a batch of a list of samples; by default stacks them. What it draws at random depends only on
            which samples are in the batch.
        group: the data group of each sample.

    >>> rows = [{"ids": [5, 6], "label": 1}, {"ids": [7, 8], "label": 0}]
    >>> x, y = CollatedPart(rows).batch(torch.tensor([1]))
    >>> x["ids"].tolist(), y.tolist()
    ([[7, 8]], [0])
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, group: Any = None) -> None:
        self.dataset = dataset
        self.collate = stacked if collate is None else collate
        self.group = None if group is None else np.asarray(group)
        self._labels: Tensor | None = None
        self._longest: int | None = None
        if self.group is not None and len(self.group) != len(self):
            raise DataError(f"group has {len(self.group)} entries, the data set {len(self)} samples")

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: Tensor) -> tuple[Input, Tensor]:
        """The samples at `index` as the function collates them: inputs by name, y as int64 or float32."""
        places = index.tolist()
        items = [self.dataset[place] for place in places]
        try:
            with seeded(derive("collate", *places)):
                made = self.collate(items)
        except AnysizeError:
            raise
        except Exception as error:  # a collator may raise anything
            raise DataError(f"collate cannot batch samples with {', '.join(items[0])}: {told(error)}") from error
        if not isinstance(made, Mapping):
            raise DataError(f"collate returned a {type(made).__name__}; it must return tensors by name, as a mapping")
        y = next((made[name] for name in LABELS if name in made), None)
        if y is None:
            raise DataError(f"a batch has {', '.join(made)}; its targets must be there too, as 'labels'")
        x = Inputs({name: as_tensor(made[name], name) for name in made if name not in LABELS})
        y = as_targets(as_tensor(y, "labels"))
        return x, y if y.is_floating_point() else y.long()

    def labels(self) -> Tensor:
        """Every target, in order; those of different lengths are filled up with -100."""
        if self._labels is None:
            first = self.dataset[0]
            name = next((name for name in (*LABELS, "input_ids") if name in first), None)
            if name is None:
                raise DataError(f"a sample has {', '.join(first)}; its target must be there too, as 'label'")
            self._labels = as_targets(as_rows(self.column(name)))
        return self._labels

    def column(self, name: str) -> list[Any]:
        """What every sample has under a name."""
        if hasattr(self.dataset, "column_names"):  # one of the package `datasets`, which reads a column at once
            return list(self.dataset[name])
        found = []
        for place in range(len(self)):
            sample = self.dataset[place]
            if name not in sample:
                raise DataError(f"sample {place} has no {name}, which sample 0 has; all samples need the same names")
            found.append(sample[name])
        return found

    @property
    def longest(self) -> int:
        """The sample whose inputs have the most entries."""
        if self._longest is None:
            names = [name for name in self.dataset[0] if name not in LABELS]
            sizes = sum(np.array([np.asarray(value).size for value in self.column(name)]) for name in names)
            self._longest = int(np.argmax(sizes)) if names else 0
        return self._longest

    def __repr__(self) -> str:
        return f"CollatedPart({len(self)} samples of {type(self.dataset).__name__})"


class SubsetPart:
    """The samples of a part at an index, as a view.

    >>> whole = TensorPart([[0.0], [1.0], [2.0]], [0, 1, 2], group=["a", "b", "b"])
    >>> part = SubsetPart(whole, [2, 1])
    >>> part.labels().tolist(), part.group.tolist()
    ([2, 1], ['b', 'b'])
    """

    def __init__(self, part: Part, index: Any) -> None:
        self.part = part
        self.index = torch.as_tensor(index, dtype=torch.int64)
        if self.index.numel() and not 0 <= int(self.index.min()) <= int(self.index.max()) < len(part):
            raise DataError(f"an index lies outside the {len(part)} samples of the part")

    def __len__(self) -> int:
        return len(self.index)

    @property
    def group(self) -> Array | None:
        """The data group of each sample of the view, or None."""
        group = groups_of(self.part)
        return None if group is None else group[self.index.numpy()]

    def batch(self, index: Tensor) -> tuple[Input, Tensor]:
        """The samples at `index` of the view."""
        return self.part.batch(self.index[index])

    def labels(self) -> Tensor:
        """Every y of the view, in its order."""
        return self.part.labels()[self.index]

    def __repr__(self) -> str:
        return f"SubsetPart({len(self)} of {self.part!r})"


@dataclass(frozen=True, init=False, eq=False)
class Data:
    """A whole data set: a part to train on, perhaps one to test on, and facts about them.

    Parts are given as (x, y), as a map-style `Dataset`, or as any `Part`; x may be a mapping of several inputs by name,
    and so may each sample of a data set. They are checked once, here.

    Attributes:
        train: the samples that are split among the clients.
        test: the server's test samples, or None.
        classes: the number of classes, or the size of the vocabulary; derived from integer labels if not given.
        class_names: one name per class, or None.
        mean: the mean of each channel, for inputs in [0, 1]; None means that inputs are not normalised.
        std: the standard deviation of each channel, or None.
        checksum: sha256 of the arrays, the same for the same data wherever it came from; empty for a `Dataset`,
            which would have to be drawn whole.
        source: where the data came from, for people to read.

    >>> data = Data(train=(np.zeros((4, 8, 8), np.uint8), [0, 1, 2, 1]))
    >>> data.classes, data.input_shape, len(data.train)
    (3, (1, 8, 8), 4)
    """

    train: Part
    test: Part | None
    classes: int | None
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    checksum: str
    source: str

    def __init__(
        self,
        train: PartLike,
        test: PartLike | None = None,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        checksum: str = "",
        source: str = "",
        collate: Collate | None = None,
    ) -> None:
        """Take the parts and what is known of them.

        Args:
            train: samples to train on.
            test: samples to test on.
            classes: how many classes there are.
            class_names: one name per class.
            mean: of each channel.
            std: of each channel.
            checksum: of the arrays, if it is known.
            source: where the data came from.
            collate: if samples are mappings, makes a batch of a list of them, such as a data collator of transformers.
        """
        parts = {"train": as_part(train, collate)} | ({} if test is None else {"test": as_part(test, collate)})
        problems = _part_problems(parts)
        if not problems:
            classes = _class_count(parts) if classes is None else classes
            problems = [*_label_problems(parts, classes), *_name_problems(class_names, classes)]
            problems += _statistics_problems(parts["train"], mean, std)
        if problems:
            raise DataError("\n".join(problems))
        values = {
            "train": parts["train"],
            "test": parts.get("test"),
            "classes": classes,
            "class_names": None if class_names is None else tuple(class_names),
            "mean": None if mean is None else tuple(map(float, mean)),
            "std": None if std is None else tuple(map(float, std)),
            "checksum": checksum or checksum_of(*parts.values()),
            "source": source,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample as the network receives it, without the batch axis."""
        return input_shape(self.train)

    @property
    def outputs(self) -> int:
        """How many numbers a network returns per sample or position: one per class, or one per real target.

        >>> Data(train=([[0.0], [1.0]], [[0.5, 0.1, 0.2], [0.1, 0.3, 0.9]])).outputs
        3
        """
        if self.classes is not None:
            return self.classes
        _, y = self.train.batch(torch.zeros(1, dtype=torch.int64))
        return y[0].numel()


@dataclass(frozen=True, init=False, eq=False)
class Share:
    """One device's data: the samples that it trains on, and those that it holds out for evaluation.

    >>> share = Share(train=([[0.0], [1.0]], [0, 1]), held_out=([[2.0]], [1]))
    >>> len(share.train), len(share.held_out)
    (2, 1)
    """

    train: Part
    held_out: Part | None

    def __init__(self, train: PartLike, held_out: PartLike | None = None, collate: Collate | None = None) -> None:
        object.__setattr__(self, "train", as_part(train, collate))
        object.__setattr__(self, "held_out", None if held_out is None else as_part(held_out, collate))
        parts = {"train": self.train} | ({} if self.held_out is None else {"held_out": self.held_out})
        problems = _part_problems(parts)
        if problems:
            raise DataError("\n".join(problems))


def to_input(x: Input) -> Any:
    """What a network receives: `uint8` (images) as float32 in [0, 1], other integers as int64, else float32.

    >>> to_input(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    [0.0, 1.0]
    >>> to_input(torch.tensor([3], dtype=torch.int32)).dtype, to_input(torch.tensor([3.0]).double()).dtype
    (torch.int64, torch.float32)
    """
    if isinstance(x, Inputs):
        return x.map(to_input)
    if x.is_complex():
        raise DataError("complex inputs are not supported; give real and imaginary parts as channels")
    # Use one memory layout, however the samples are stored: the layout changes the last bits of a convolution.
    x = x.contiguous()
    if x.dtype == torch.uint8:
        return x.to(torch.float32).div_(255)
    return x.to(torch.float32 if x.is_floating_point() or x.dtype == torch.bool else torch.int64)


def input_shape(part: Part) -> tuple[int, ...]:
    """The shape of one sample of a part as the network receives it, without the batch axis; () of named inputs."""
    x, _ = part.batch(torch.zeros(1, dtype=torch.int64))
    return () if isinstance(x, Inputs) else tuple(to_input(x).shape[1:])


def largest_token(part: Part) -> int | None:
    """The largest token among the inputs called "input_ids", or in an input of integers; None if there are none.

    >>> largest_token(TensorPart({"input_ids": [[3, 9]], "attention_mask": [[1, 1]]}, [0]))
    9
    """
    if isinstance(part, CollatedPart):
        first = part.dataset[0]
        texts = [np.asarray(text) for text in part.column("input_ids")] if "input_ids" in first else []
        largest = [int(text.max()) for text in texts if text.size]
        return max([*largest, *_added_tokens(part.collate)]) if largest else None
    if not isinstance(part, TensorPart):
        return None
    name = "input_ids" if isinstance(part.x, Inputs) else ""
    tokens = dict(named(part.x)).get(name)
    if tokens is None or tokens.is_floating_point() or tokens.dtype == torch.uint8:
        return None
    return int(tokens.max())


def _added_tokens(collate: Any) -> list[int]:
    """The tokens that a collator of transformers puts into texts: the one that fills up; if it masks words, any."""
    tokenizer = getattr(collate, "tokenizer", None)
    found = [getattr(tokenizer, "pad_token_id", None)]
    if getattr(collate, "mlm", False) and tokenizer is not None:
        found.append(len(tokenizer) - 1)
    return [token for token in found if isinstance(token, int)]


def groups_of(part: Part) -> Array | None:
    """The data group (writer, role, domain) of each sample of a part, or None if it has none."""
    group = getattr(part, "group", None)
    return None if group is None else np.asarray(group)


def has_classes(labels: Tensor) -> bool:
    """Whether labels are one class number per sample."""
    return labels.ndim == 1 and not labels.is_floating_point()


def classes_in(labels: Tensor) -> Tensor:
    """The distinct classes among labels, sorted.

    >>> classes_in(torch.tensor([3, 0, 3])).tolist()
    [0, 3]
    """
    return torch.from_numpy(np.unique(labels.numpy()))


def as_part(value: PartLike, collate: Collate | None = None) -> Part:
    """A part made of a pair of arrays or a map-style `Dataset`; a `Part` is returned as it is."""
    if isinstance(value, Part):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return TensorPart(*value)
    if isinstance(value, Mapping):
        return _mapping_part(value)
    if _gives_mappings(value):
        return CollatedPart(value, collate)
    if isinstance(value, Dataset) or (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
        return DatasetPart(value)
    raise DataError(
        f"a part of the data is a {type(value).__name__}; give a pair (x, y) of arrays or tensors, "
        "a map-style Dataset, or an object with __len__, batch and labels"
    )


def _mapping_part(arrays: Mapping[str, Any]) -> Part:
    """The part of arrays by name, one of which holds the targets."""
    name = next((name for name in LABELS if name in arrays), None)
    if name is None:
        raise DataError(f"a part of the data has {', '.join(arrays)}; its targets must be there too, as 'labels'")
    return TensorPart({key: value for key, value in arrays.items() if key != name}, arrays[name])


def _gives_mappings(value: Any) -> bool:
    """Whether a data set's samples are mappings."""
    try:
        return len(value) > 0 and isinstance(value[0], Mapping)
    except (TypeError, KeyError):  # no length, or no map-style data set
        return False


def stacked(items: list[Any]) -> dict[str, Tensor]:
    """A batch of samples whose tensors of a name all have the same shape."""
    made = {}
    for name in items[0]:
        rows = [as_tensor(item[name], name) for item in items]
        if len({row.shape for row in rows}) > 1:
            raise DataError(
                f"samples of one batch differ in the shape of '{name}'; give a function that makes them equal: "
                "az.Data(collate=transformers.DataCollatorWithPadding(tokenizer))"
            )
        made[name] = torch.stack(rows)
    return made


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python; restore them afterwards."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def as_rows(values: Sequence[Any]) -> Tensor:
    """A tensor with one row per value; rows of different lengths are filled up with -100.

    >>> as_rows([[1, 2], [3]]).tolist()
    [[1, 2], [3, -100]]
    """
    rows = [as_tensor(value, "labels") for value in values]
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def as_input(x: Any) -> Input:
    """Tensors that share the memory of the arrays given if possible: one, or several by name."""
    if not isinstance(x, Mapping | Inputs):
        return as_images(as_tensor(x, "x"))
    if not x:
        raise DataError("x has no inputs; give at least one by name")
    made = Inputs({name: as_images(as_tensor(value, f"x['{name}']")) for name, value in x.items()})
    lengths = {name: len(tensor) for name, tensor in made.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the inputs have different numbers of samples: {lengths}; they must be equally many")
    return made


def as_tensor(value: Any, name: str) -> Tensor:
    """A CPU tensor from a tensor, array, list, number or image object; it shares their memory if possible."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {array.dtype}, which is not a number type; encode it as integers or floats")
    if array.dtype.byteorder not in "=|":
        array = array.astype(array.dtype.newbyteorder("="))
    # torch shares memory only if it may write to it, and does not support negative strides.
    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    tensor = torch.from_numpy(array if shareable else array.copy())
    # A list of Python floats is float64 only because numpy has no other type for it.
    return tensor.float() if tensor.dtype == torch.float64 and isinstance(value, list | tuple) else tensor


def as_images(x: Tensor) -> Tensor:
    """`uint8` images as a view of shape (N, C, H, W); anything else as it is."""
    if x.dtype != torch.uint8 or x.ndim not in (3, 4):
        return x
    if x.ndim == 3:
        return x.unsqueeze(1)
    channels_last = x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS
    return x.permute(0, 3, 1, 2) if channels_last else x


def as_targets(y: Tensor) -> Tensor:
    """Targets in the type that losses need: classes int64, other integers as stored, the rest float32."""
    if y.is_floating_point() or y.dtype == torch.bool:
        return y.to(torch.float32)
    return y.to(torch.int64) if y.ndim <= 1 else y


def channel_statistics(part: Part, samples: int = 10_000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of `uint8` images scaled to [0, 1], over a fixed sample.

    The sums are over integers and thus exact: the result is the same on every machine.

    >>> channel_statistics(TensorPart(np.full((2, 4, 4), 255, np.uint8), [0, 1]))
    ((1.0,), (1.0,))
    """
    order = np.random.Generator(np.random.PCG64(derive("channel statistics", len(part)))).permutation(len(part))
    x, _ = part.batch(torch.from_numpy(np.sort(order[:samples])))
    if isinstance(x, Inputs):
        raise DataError(f"statistics per channel need uint8 images (N, C, H, W), not inputs by name: {', '.join(x)}")
    if x.dtype != torch.uint8 or x.ndim != 4:
        raise DataError(f"statistics per channel need uint8 images (N, C, H, W), not {x.dtype} of shape {_shape(x)}")
    histograms = [torch.bincount(channel.reshape(-1), minlength=256).double() for channel in x.unbind(1)]
    values = torch.arange(256).double() / 255
    means = [float(h @ values / h.sum()) for h in histograms]
    deviations = [float((h @ (values - m) ** 2 / h.sum()).sqrt()) for h, m in zip(histograms, means)]
    # A constant channel needs no scaling; dividing by one leaves it centred.
    return tuple(round(m, 6) for m in means), tuple(round(d, 6) or 1.0 for d in deviations)


def checksum_of(*parts: Part) -> str:
    """The sha256 of the types, shapes and bytes of parts held in memory; empty if any is not.

    >>> checksum_of(TensorPart([[0.0]], [0])) == checksum_of(TensorPart(np.zeros((1, 1), np.float32), [0]))
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        if not isinstance(part, TensorPart):
            return ""
        if isinstance(part.x, Inputs):
            digest.update(f"{part.x.keys()}".encode())
        for array in (*(tensor.numpy() for tensor in tensors_in(part.x)), part.y.numpy(), part.group):
            digest.update(b"none" if array is None else f"{array.dtype}{array.shape}".encode())
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _refuse_inputs_without_names(x: Any, samples: int) -> None:
    """Raise an error if x is a row of several inputs, each with as many samples as there are targets."""
    arrays = isinstance(x, tuple | list) and len(x) != samples and all(np.ndim(one) > 0 for one in x)
    if arrays and len(x) > 1 and all(len(one) == samples for one in x):
        raise DataError(
            f"x is a {type(x).__name__} of {len(x)} arrays; several inputs need the names that the network's forward "
            'gives them: az.Data(train=({"first": ..., "second": ...}, y))'
        )


def _length_problems(x: Input, y: Tensor, group: Array | None) -> Sequence[str]:
    if y.ndim == 0 or any(tensor.ndim == 0 for tensor in tensors_in(x)):
        return ["x and y need a first axis that counts samples"]
    problems = []
    if len(x) != len(y):
        problems.append(f"x has {len(x)} samples, y has {len(y)}; they must be equally many")
    if group is not None and group.shape != (len(x),):
        problems.append(f"group has shape {group.shape}; it needs one entry for each of the {len(x)} samples")
    return problems


def _part_problems(parts: dict[str, Part]) -> list[str]:
    problems = [f"{name}: there are no samples" for name, part in parts.items() if len(part) == 0]
    tensors = {name: part for name, part in parts.items() if isinstance(part, TensorPart)}
    unsound = {name: not all(map(_finite, tensors_in(part.x))) for name, part in tensors.items()}
    problems += [f"{name}: x holds values that are not finite" for name in tensors if unsound[name]]
    problems += [f"{name}: y holds values that are not finite" for name, p in tensors.items() if not _finite(p.y)]
    if problems or len(parts) < 2:
        return problems
    shapes = {name: _sample_shape(part) for name, part in parts.items()}
    if len(set(shapes.values())) > 1:
        problems.append(f"the samples of the parts differ in shape: {shapes}; they must agree")
    return problems


def _sample_shape(part: Part) -> tuple[Any, ...]:
    """What the samples of two parts must have in common: the shape or, since texts differ in length, the names."""
    x, _ = part.batch(torch.zeros(1, dtype=torch.int64))
    return tuple(x) if isinstance(x, Inputs) else tuple(to_input(x).shape[1:])


def _finite(x: Tensor) -> bool:
    # One sum is far cheaper than testing each entry; it can overflow, but it never hides a value that is not finite.
    return not x.is_floating_point() or bool(x.sum().isfinite()) or bool(x.isfinite().all())


def _labels_at_hand(part: Part, classes: int | None) -> Tensor | None:
    # If the number of classes is given, a lazy data set need not be drawn whole for its labels.
    return part.labels() if classes is None or isinstance(part, TensorPart) else None


def _class_count(parts: dict[str, Part]) -> int | None:
    labels = [part.labels() for part in parts.values()]
    if any(y.is_floating_point() for y in labels):
        return None
    # If every token is predicted, the vocabulary covers inputs and targets together.
    whole = [(p.x, p.y) for p in parts.values() if isinstance(p, TensorPart) and isinstance(p.x, Tensor)]
    tokens = [x for x, y in whole if x.shape == y.shape and y.ndim > 1]
    return 1 + max(int(y.max()) for y in [*labels, *tokens])


def _label_problems(parts: dict[str, Part], classes: int | None) -> list[str]:
    if classes is None:
        return []
    if classes < 1:
        low = min(int(part.labels().min()) for part in parts.values())
        given = f"labels begin at {low}; classes count from 0" if low < 0 else f"classes is {classes}"
        return [f"{given}; at least 1 class is needed"]
    problems = []
    for name, part in parts.items():
        y = _labels_at_hand(part, classes)
        if y is None or y.is_floating_point():
            continue
        counted = y[y != IGNORED] if y.ndim > 1 else y
        if not counted.numel():
            continue
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= classes:
            problems.append(
                f"{name}: labels run from {low} to {high}; allowed with {classes} classes: 0 to {classes - 1}"
            )
    return problems


def _name_problems(names: Sequence[str] | None, classes: int | None) -> list[str]:
    if names is None or len(names) == classes:
        return []
    return [f"class_names has {len(names)} entries for {classes} classes"]


def _statistics_problems(train: Part, mean: Sequence[float] | None, std: Sequence[float] | None) -> list[str]:
    if mean is None and std is None:
        return []
    if mean is None or std is None:
        return ["mean and std belong together; give both or neither"]
    channels = (input_shape(train) or (1,))[0]
    problems = [
        f"{name} has {len(values)} entries for {channels} channels"
        for name, values in (("mean", mean), ("std", std))
        if len(values) != channels
    ]
    return problems + [f"std holds {value}; each must be above 0" for value in std if not value > 0]
