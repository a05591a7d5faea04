"""What is known of a named data set before it is on this machine: the shape of a sample, classes and counts.

With these facts an experiment can be planned and its network inspected on a machine that has no data at all. Sets that
come in files of your own (FEMNIST, MNIST-M, SynthDigits, DomainNet) have the counts of the public sets, text has those
of the corpus that the papers use: about right, which is enough for a plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from anysize.config.options import defaults, received
from anysize.data import files, sources
from anysize.data.parts import Data, TensorPart


@dataclass(frozen=True)
class Facts:
    """What is known of a data set without its samples.

    Attributes:
        shape: of one sample as a network receives it: (C, H, W) of images, (T,) of tokens.
        classes: how many, or symbols of a vocabulary.
        train: training samples.
        test: test samples.
        groups: names of data groups (writers, roles, domains); empty where the set has none.
        files: files and folders that are all needed in one of the search folders.
        next_token: whether a target has the shape of its sample.
    """

    shape: tuple[int, ...]
    classes: int
    train: int
    test: int
    groups: Sequence[str] = ()
    files: tuple[str, ...] = ()
    next_token: bool = False

    @property
    def here(self) -> bool:
        """Whether the data is on this machine."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Those of its files and folders that are not on this machine."""
        return [file for file in self.files if (files.locate(file) or files.locate_folder(file)) is None]


def facts(name: str, options: Mapping[str, Any] | None = None) -> Facts | None:
    """What is known of the data set of that name with these options; None of one that is not public.

    >>> facts("cifar100").shape, facts("cifar100").classes, facts("imdb", {"length": 50}).shape
    ((3, 32, 32), 100, (50,))
    """
    if name not in _FACTS:
        return None
    source = sources.named()[name]
    known = defaults(source)
    return _FACTS[name](**received(known, known | dict(options or {})))


def datasets() -> list[tuple[str, str]]:
    """The name of every data set that can be loaded, and one line on it.

    Those without a name of ours, found as files, come after the others.

    >>> dict(datasets())["digits"]
    'Handwritten digits, 8 x 8, bundled: 1,438 / 359 samples, 10 classes.'
    """
    missing = without_files()
    known = [(name, source) for name, source in sorted(sources.named().items()) if name not in missing]
    told = [(name, (inspect.getdoc(source) or "").splitlines()[0] + _when(name, source)) for name, source in known]
    found = [(name, f"Found as {path}.") for name, path in files.stored_sets().items() if name not in sources.named()]
    return told + sorted(found)


def _when(name: str, source: Callable[..., Any]) -> str:
    """What to add to the line of a data set that is not on this machine, and comes when it is asked for."""
    known = facts(name)
    fetched = known is not None and known.missing and "url" in inspect.signature(source).parameters
    return " Not here yet: downloaded when it is first used." if fetched else ""


def without_files() -> dict[str, list[str]]:
    """The named data sets that cannot be loaded, each with the files that are missing and that nothing downloads."""
    found = {}
    for name, source in sorted(sources.named().items()):
        known = facts(name)
        needed = [] if known is None or "url" in inspect.signature(source).parameters else known.missing
        # A set of several domains needs the files of each; some of these can be downloaded.
        fetched = {f"{other}.npz" for other, maker in sources.named().items() if "url" in defaults(maker)}
        if left := [file for file in needed if file not in fetched]:
            found[name] = left
    return found


def stand_in(name: str, options: Mapping[str, Any] | None = None) -> Data | None:
    """A data set of black images or zeros with the facts of the one of that name; None if that is here or unknown.

    It takes no memory, its classes come in turn, and its data groups are equally large.

    >>> stand_in("digits") is None
    True
    """
    known = facts(name, options)
    if known is None or known.here:
        return None
    image = len(known.shape) == 3
    return Data(
        train=_blank(known, known.train),
        test=_blank(known, known.test),
        classes=known.classes,
        # The values do not matter to a plan, only that there is a layer which normalises.
        mean=(0.5,) * known.shape[0] if image else None,
        std=(0.25,) * known.shape[0] if image else None,
        checksum="none",
        source=f"nothing: '{name}' is not on this machine",
    )


def _blank(known: Facts, count: int) -> TensorPart:
    kind = torch.uint8 if len(known.shape) == 3 else torch.int32
    x = torch.zeros(1, *known.shape, dtype=kind).expand(count, *known.shape)
    order = np.arange(count)
    y = x if known.next_token else torch.from_numpy(order % known.classes)
    # Groups change more slowly than classes, so that every group has all classes.
    group = np.asarray(known.groups)[order // known.classes % len(known.groups)] if known.groups else None
    return TensorPart(x, y, group)


def _images(
    file: str,
    channels: int,
    side: int,
    classes: int,
    train: int,
    test: int,
    groups: int = 0,
    **options: Any,
) -> Facts:
    writers = [f"{writer:04d}" for writer in range(groups)]
    return Facts((channels, side, side), classes, train, test, writers, (f"{file}.npz",))


def _fashion_mnist(url: str, size: int | None) -> Facts:
    folder = files.DEBIAN_FOLDER / "fashion-mnist"
    packaged = all((folder / file).is_file() for file in sources.IDX_FILES.values())
    side = size or 28
    return Facts((1, side, side), 10, 60_000, 10_000, files=() if packaged else ("fashion-mnist.npz",))


def _digits_domains(
    domains: Sequence[str], size: int, per_domain: int | None, test_per_domain: int | None
) -> Facts | None:
    known = {name: facts(name) for name in domains}
    parts = [part for part in known.values() if part is not None]
    if len(parts) < len(known):  # one of them is a file of the user's own
        return None
    return Facts(
        (3, size, size),
        max(part.classes for part in parts),
        sum(min(part.train, per_domain or part.train) for part in parts),
        sum(min(part.test, test_per_domain or part.test) for part in parts),
        tuple(domains),
        tuple(file for part in parts for file in part.files),
    )


def _domainnet(domains: Sequence[str], classes: Sequence[str], size: int, test_fraction: float) -> Facts:
    images = 586_575 * len(classes) // 345  # an even part of all images
    test = int(images * test_fraction)
    return Facts((3, size, size), len(classes), images - test, test, tuple(domains), ("domainnet",))


def _shakespeare(sequence_length: int, minimum_samples: int, test_fraction: float) -> Facts:
    characters = 4_200_000
    roles = 1_099 if minimum_samples < 10 else 626
    test = int(characters * test_fraction) // sequence_length
    groups = [f"{role:04d}" for role in range(roles)]
    train = characters // sequence_length - test
    return Facts((sequence_length,), 75, train, max(1, test), groups, ("shakespeare.jsonl.gz",), next_token=True)


def _imdb(vocabulary: int, length: int) -> Facts:
    return Facts((length,), 2, 25_000, 25_000, files=("imdb.jsonl.xz",))


_FACTS: dict[str, Callable[..., Facts | None]] = {
    "cifar10": partial(_images, "cifar10", 3, 32, 10, 50_000, 10_000),
    "cifar100": partial(_images, "cifar100", 3, 32, 100, 50_000, 10_000),
    "digit-pairs": lambda: Facts((1, 8, 16), 100, 4_000, 1_000),
    "digits": lambda: Facts((1, 8, 8), 10, 1_438, 359),
    "digits-domains": _digits_domains,
    "domainnet": _domainnet,
    "emnist": partial(_images, "emnist", 1, 28, 62, 697_932, 116_323),
    "fashion-mnist": _fashion_mnist,
    "femnist": partial(_images, "femnist", 1, 28, 62, 724_737, 80_526, 3_550),
    "imdb": _imdb,
    "mnist": partial(_images, "mnist", 1, 28, 10, 60_000, 10_000, 539),
    "mnist-m": partial(_images, "mnist-m", 3, 32, 10, 60_000, 10_000),
    "shakespeare": _shakespeare,
    "svhn": partial(_images, "svhn", 3, 32, 10, 73_257, 26_032),
    "synth-digits": partial(_images, "synth-digits", 3, 32, 10, 479_400, 9_553),
    "usps": partial(_images, "usps", 1, 16, 10, 7_291, 2_007),
}
