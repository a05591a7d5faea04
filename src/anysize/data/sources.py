"""Data sets by name: bundled, from a package, from files or folders, by download, or from a user's function.

A data set is looked for in Debian's package if there is one, then as NAME.npz in $ANYSIZE_DATA and in the
cache; if its public address is known, it is downloaded into the cache. NAME.npz holds `x_train`, `y_train`
and, if there are any, `x_test`, `y_test`, `group_train`, `group_test`, `class_names`. Images are `uint8`,
(N, H, W) or (N, H, W, 3).
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from anysize import interrupts
from anysize.config.options import defaults as defaults_of
from anysize.config.options import option_problems, received, writable
from anysize.config.own_code import by_name
from anysize.data import files, hub
from anysize.data.files import Arrays
from anysize.data.parts import Array, Data, Part, Share, TensorPart, channel_statistics
from anysize.data.pictures import pictures
from anysize.errors import DataError, unknown
from anysize.rng import derive

FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"

IDX_FILES = {
    "x_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "x_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}

# sha256 of the content inside each .gz file, and of the CIFAR archives as they are.
FASHION_SHA256 = {
    "x_train": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "y_train": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "x_test": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "y_test": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
MNIST_SHA256 = {
    "x_train": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "y_train": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "x_test": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "y_test": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
CIFAR_SHA256 = {
    "cifar10": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar100": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
}

FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

DOMAINNET_CLASSES = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)

_HF = "hf:"

DeviceLoader = Callable[..., Share]
"""Returns the share of one device; called with the device."""


def load(name: str, options: Mapping[str, Any] | None = None, folder: Path | None = None) -> Data | DeviceLoader:
    """The data set of that name, or what a user's function returns.

    A function `load(**options)` returns the whole data set, which is then split among the clients. A function
    whose first parameter is `device`, `load(device, **options)`, returns one device's share: it is not called
    here, but returned with its options filled in.

    Args:
        name: a name from `datasets()`, the NAME of a file NAME.npz, "package.module:function", or "hf:..." for a set
            of the package `datasets`.
        options: keyword arguments of the source.
        folder: that of the experiment file, where the path of a set of `datasets` begins.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), data.input_shape, data.classes
    (1438, 359, (1, 8, 8), 10)
    """
    source, options = _source(name), options or {}
    if name.startswith(_HF):
        source = partial(source, folder=folder)
    elif ":" in name:
        return from_function(name, source, options)
    problems = option_problems(f"data set '{name}'", source, options, given=["folder"])
    if problems:
        raise DataError("\n".join(problems))
    data: Data = source(**received(defaults_of(source), options))
    return data


def defaults(name: str) -> dict[str, Any]:
    """What the options of the data set of that name are where a file gives none, as far as a file can hold it.

    >>> defaults("imdb")
    {'vocabulary': 10000, 'length': 200}
    """
    source = _source(name)
    # A file that states the number of classes spares looking for them in the devices' data: an answer of its own.
    given = ("device", "classes") if _per_device(source) else ("folder",)
    return {option: value for option, value in writable(defaults_of(source)).items() if option not in given}


def named() -> Mapping[str, Callable[..., Data]]:
    """The functions of the data sets that have a name here."""
    return _SOURCES


def digits() -> Data:
    """Handwritten digits, 8 x 8, bundled: 1,438 / 359 samples, 10 classes.

    The digits that come with scikit-learn, scaled from 0..16 to 0..255. A fifth of each class, always the
    same samples, is the test part.
    """
    return from_arrays(_bundled_digits(), source="scikit-learn's digits")


def digit_pairs() -> Data:
    """Two handwritten digits side by side, 8 x 16, bundled: 4,000 / 1,000 samples, 100 classes, 00 to 99.

    Both digits of a pair are drawn at random from the set `digits`, always the same pairs: training pairs from its
    training part and test pairs from its test part, so that no digit is in both.
    """
    digits = _bundled_digits()
    arrays = _pairs(digits, "train", 4_000) | _pairs(digits, "test", 1_000)
    names = np.array([f"{number:02d}" for number in range(100)])
    return from_arrays(arrays | {"class_names": names}, source="scikit-learn's digits")


def fashion_mnist(url: str = FASHION_URL, size: int | None = None) -> Data:
    """Fashion-MNIST, 28 x 28: 60,000 / 10,000 samples, 10 classes.

    Args:
        url: the address of the folder from which the four files are fetched if they are not on this machine.
        size: the height and width to which the images are shrunk; absent: as they are.
    """
    if size is not None and not 1 <= size <= 28:
        raise DataError(f"fashion-mnist: size {size}; allowed: 1 to 28, the size of the images")
    debian = files.DEBIAN_FOLDER / "fashion-mnist"
    if all((debian / file).is_file() for file in IDX_FILES.values()):
        arrays, source = _read_idx_files(debian), debian
    else:
        ways = ["install Debian's package dataset-fashion-mnist"]
        fetch = partial(_fetch_idx_files, url, FASHION_SHA256)
        arrays, source = _stored_or_fetched("fashion-mnist", fetch, ways, also_in=[debian])
    if size is not None:
        images = {name: torch.from_numpy(arrays[name])[:, None] for name in ("x_train", "x_test")}
        arrays = arrays | {name: _resized(x, size).numpy() for name, x in images.items()}
    return from_arrays({"class_names": np.array(FASHION_NAMES)} | arrays, source=str(source))


def mnist(url: str = MNIST_URL) -> Data:
    """MNIST digits, 28 x 28: 60,000 / 10,000 samples, 10 classes; by writer where the file says so.

    Args:
        url: the address of the folder from which the four files are fetched if they are not on this machine.
    """
    arrays, source = _stored_or_fetched("mnist", partial(_fetch_idx_files, url, MNIST_SHA256))
    return from_arrays(arrays, source=str(source))


def cifar10(url: str = CIFAR_URL) -> Data:
    """CIFAR-10 photographs, 32 x 32 in colour: 50,000 / 10,000 samples, 10 classes.

    Args:
        url: the address of the folder from which the binary archive is fetched if there is no cifar10.npz.
    """
    arrays, source = _stored_or_fetched("cifar10", partial(_fetch_cifar, f"{url}/cifar-10-binary.tar.gz", "cifar10"))
    return from_arrays(arrays, source=str(source))


def cifar100(url: str = CIFAR_URL) -> Data:
    """CIFAR-100 photographs, 32 x 32 in colour: 50,000 / 10,000 samples, 100 classes.

    Args:
        url: the address of the folder from which the binary archive is fetched if there is no cifar100.npz.
    """
    fetch = partial(_fetch_cifar, f"{url}/cifar-100-binary.tar.gz", "cifar100")
    arrays, source = _stored_or_fetched("cifar100", fetch)
    return from_arrays(arrays, source=str(source))


def usps(held_out: float = 0.0) -> Data:
    """USPS digits, 16 x 16: 7,291 / 2,007 samples, 10 classes; needs usps.npz."""
    return stored("usps", held_out)


def mnist_m(held_out: float = 0.0) -> Data:
    """MNIST-M, digits on photographs, 32 x 32 in colour, 10 classes; needs mnist-m.npz."""
    return stored("mnist-m", held_out)


def svhn(held_out: float = 0.0) -> Data:
    """SVHN, house numbers, 32 x 32 in colour: 73,257 / 26,032 samples, 10 classes; needs svhn.npz."""
    return stored("svhn", held_out)


def synth_digits(held_out: float = 0.0) -> Data:
    """SynthDigits, printed digits on photographs, 32 x 32 in colour, 10 classes; needs synth-digits.npz."""
    return stored("synth-digits", held_out)


def emnist(held_out: float = 0.0) -> Data:
    """EMNIST by class, letters and digits, 28 x 28, 62 classes; needs emnist.npz."""
    return stored("emnist", held_out)


def femnist(held_out: float = 0.0) -> Data:
    """FEMNIST, letters and digits by writer, 28 x 28, 62 classes; needs femnist.npz."""
    return stored("femnist", held_out)


def digits_domains(
    domains: Sequence[str] = ("mnist", "usps", "mnist-m"),
    size: int = 28,
    per_domain: int | None = None,
    test_per_domain: int | None = None,
) -> Data:
    """Digits of several domains (MNIST, USPS, MNIST-M) in one size and in colour, grouped by domain.

    Args:
        domains: names of data sets of images, all with the same classes.
        size: the height and width to which all images are resampled.
        per_domain: at most so many training samples of each domain, the same in every run.
        test_per_domain: at most so many test samples of each domain.
    """
    numbers = [number for number in (size, per_domain, test_per_domain) if number is not None]
    if min(numbers) < 1 or len(set(domains)) != len(domains) or not domains:
        raise DataError(
            f"digits-domains: size {size}, per_domain {per_domain}, test_per_domain {test_per_domain}, domains "
            f"{list(domains)}; allowed: numbers of at least 1, and distinct names"
        )
    sets = {name: load(name) for name in domains}
    train, test = [], []
    for name, data in sets.items():
        if not isinstance(data, Data) or data.test is None:
            raise DataError(f"digits-domains: '{name}' has no test part")
        train.append(_domain(name, data.train, size, per_domain))
        test.append(_domain(name, data.test, size, test_per_domain))
    arrays = {f"{key}_train": np.concatenate([part[key] for part in train]) for key in ("x", "y", "group")}
    arrays |= {f"{key}_test": np.concatenate([part[key] for part in test]) for key in ("x", "y", "group")}
    return from_arrays(arrays, source=", ".join(domains))


def domainnet(
    domains: Sequence[str] = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    classes: Sequence[str] = DOMAINNET_CLASSES,
    size: int = 256,
    test_fraction: float = 0.3,
) -> Data:
    """DomainNet, pictures of six domains in colour, grouped by domain; needs a folder domainnet and Pillow.

    The folder has its usual layout, DOMAIN/CLASS/image files. An image is decoded and resampled when it is drawn. In
    every domain and class the same images are always held out for testing.

    Args:
        domains: names of folders.
        classes: names of folders in every domain; absent: the ten classes of FedBN, which Split-Mix uses too.
        size: the height and width to which all images are resampled.
        test_fraction: the fraction of the images that is for testing.
    """
    return pictures("domainnet", domains, classes, size, test_fraction)


def shakespeare(sequence_length: int = 80, minimum_samples: int = 1, test_fraction: float = 0.2) -> Data:
    """Shakespeare's plays by speaking role: the next character at every position; needs shakespeare.jsonl.gz.

    A sample is `sequence_length` characters and, as its target, the same text shifted by one character. Samples
    of a role follow each other without overlap; the last part of each role's text is for testing. The
    vocabulary is every character of the corpus, whichever roles are used.

    Args:
        sequence_length: characters per sample.
        minimum_samples: roles with fewer training samples are left out.
        test_fraction: the fraction of each role's text that is for testing.
    """
    if sequence_length < 1 or minimum_samples < 1 or not 0 <= test_fraction < 1:
        raise DataError(
            f"shakespeare: sequence_length {sequence_length}, minimum_samples {minimum_samples}, "
            f"test_fraction {test_fraction}; allowed: numbers of at least 1, and a fraction below 1"
        )
    path = _located("shakespeare", "shakespeare.jsonl.gz", 'one JSON object a line with "user" and "text"')
    roles = {str(row["user"]): str(row["text"]) for row in files.read_json_lines(path, ["user", "text"])}
    symbols = sorted(set().union(*roles.values()))
    codes = np.array([ord(symbol) for symbol in symbols], dtype=np.uint32)
    train: list[tuple[str, Array]] = []
    test: list[tuple[str, Array]] = []
    for role, text in sorted(roles.items()):
        tokens = np.searchsorted(codes, np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)).astype(np.int32)
        cut = len(tokens) - int(test_fraction * len(tokens))
        windows = _windows(tokens[:cut], sequence_length)
        if len(windows) >= minimum_samples:
            train.append((role, windows))
            test.append((role, _windows(tokens[cut:], sequence_length)))
    if not train:
        raise DataError(f"no role has {minimum_samples} samples of {sequence_length} characters; ask for fewer")
    return Data(
        train=_sequences(train),
        test=_sequences(test) if any(len(windows) for _, windows in test) else None,
        classes=len(symbols),
        class_names=symbols,
        source=str(path),
    )


def imdb(vocabulary: int = 10_000, length: int = 200) -> Data:
    """Film reviews, positive or negative: words as tokens, 2 classes; needs imdb.jsonl.xz.

    Token 0 pads at the front, 1 is any word outside the vocabulary, the others are the words of the
    training part, the most frequent first.

    Args:
        vocabulary: how many tokens there are, including the two special ones.
        length: words per review; longer ones are cut.
    """
    if vocabulary < 3 or length < 1:
        raise DataError(f"imdb: vocabulary {vocabulary}, length {length}; at least 3 and 1 are needed")
    path = _located("imdb", "imdb.jsonl.xz", 'one JSON object a line with "text", "label" and "split"')
    rows = files.read_json_lines(path, ["text", "label", "split"])
    words = {part: [_words(row["text"]) for row in rows if row["split"] == part] for part in ("train", "test")}
    labels = {part: [int(row["label"]) for row in rows if row["split"] == part] for part in ("train", "test")}
    counts = Counter(word for review in words["train"] for word in review)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    token = {word: number for number, word in enumerate(ranked, start=2)}
    parts = {part: TensorPart(_padded(words[part], token, length), labels[part]) for part in words}
    test = parts["test"] if len(parts["test"]) else None
    return Data(train=parts["train"], test=test, classes=2, class_names=("negative", "positive"), source=str(path))


def stored(name: str, held_out: float = 0.0) -> Data:
    """The data set that is stored as NAME.npz in one of the search folders.

    Args:
        name: the name of the file, without its ending.
        held_out: if the file has no test part, the fraction of each writer's samples (or, without writers, of
            each class) that becomes the test part.
    """
    path = files.locate(f"{name}.npz")
    if path is None:
        content = "numpy arrays x_train, y_train, and if there are any x_test, y_test, group_train"
        raise files.missing(name, f"{name}.npz", [f"make {name}.npz ({content})"])
    return from_arrays(files.read_npz(path), source=str(path), held_out=held_out)


def from_arrays(arrays: Arrays, source: str, held_out: float = 0.0) -> Data:
    """The data set in arrays named as in an .npz file; for images, with their statistics per channel."""
    problems = [f"there is no {key}" for key in ("x_train", "y_train") if key not in arrays]
    if ("x_test" in arrays) != ("y_test" in arrays):
        problems.append("x_test and y_test belong together; there is only one of them")
    if not 0 <= held_out < 1:
        problems.append(f"held_out is {held_out}; allowed: a fraction from 0 to below 1")
    elif held_out and "x_test" in arrays:
        problems.append("held_out is for data sets without a test part; this one has a test part")
    elif held_out and not problems:
        lengths = {key: np.shape(arrays[key])[:1] for key in ("x_train", "y_train", "group_train") if key in arrays}
        if len(set(lengths.values())) > 1 or () in lengths.values():
            problems.append(f"{', '.join(lengths)} do not have one row for each sample")
        if np.ndim(arrays.get("group_train", [])) != 1:
            problems.append(
                f"group_train has shape {np.shape(arrays['group_train'])}; expected one name for each sample"
            )
    if problems:
        raise DataError(f"{source}: {'; '.join(problems)}")
    if held_out:
        arrays = _with_test(arrays, held_out)
    names = arrays.get("class_names")
    try:
        train = _part(arrays, "train")
        mean, std = channel_statistics(train) if _is_image(train) else (None, None)
        return Data(
            train=train,
            test=_part(arrays, "test") if "x_test" in arrays else None,
            class_names=None if names is None else [str(name) for name in names],
            mean=mean,
            std=std,
            source=source,
        )
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def from_function(name: str, function: Any, options: Mapping[str, Any]) -> Data | DeviceLoader:
    """What a user's function returns, as in `load`; `name` is for error messages."""
    function = _function(name, function)
    per_device = _per_device(function)
    problems = option_problems(f"data set '{name}'", function, options, given=["device"] if per_device else [])
    if problems:
        raise DataError("\n".join(problems))
    options = received(defaults_of(function), options)
    if per_device:
        return partial(_share_of, name, function, options)
    data = function(**options)
    if not isinstance(data, Data):
        raise DataError(f"data set '{name}' returned a {type(data).__name__}; it must return an anysize.Data")
    return data


def _installed(package: str) -> Path:
    """The folder of an installed package, which is not imported: scikit-learn takes a second and a half."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise DataError(f"the package '{package}' is not installed; install scikit-learn")
    return Path(spec.origin).parent


def _bundled_digits() -> Arrays:
    rows = np.loadtxt(_installed("sklearn") / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x: Array = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    y: Array = rows[:, -1].astype(np.int64)
    test = _held_out(y, 0.2, "digits")
    return {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}


def _pairs(digits: Arrays, which: str, count: int) -> Arrays:
    """So many pairs of the digits of one part: the images side by side, and the number that they show."""
    x, y = digits[f"x_{which}"], digits[f"y_{which}"]
    rng = np.random.Generator(np.random.PCG64(derive("digit-pairs", which)))
    left, right = rng.integers(len(x), size=(2, count))
    return {f"x_{which}": np.concatenate([x[left], x[right]], axis=2), f"y_{which}": 10 * y[left] + y[right]}


def _source(name: str) -> Callable[..., Any]:
    """The function that gives the data set of that name."""
    if name.startswith(_HF):
        return partial(hub.hf, name.removeprefix(_HF))
    if ":" in name:
        return _function(name, by_name(name, "data set", _SOURCES))
    if name in _SOURCES:
        return _SOURCES[name]
    if files.is_set_name(name) and files.locate(f"{name}.npz"):
        return partial(stored, name)
    folders = " or ".join(map(str, files.search_folders()))
    known = {*_SOURCES, *files.stored_sets()}
    raise DataError(f"{unknown('data set', name, known)}; any other is a file NAME.npz in {folders}")


def _function(name: str, found: Any) -> Callable[..., Any]:
    """What was found under a name of the user's own, which can be called."""
    if not callable(found):
        raise DataError(f"data set '{name}' is a {type(found).__name__}; it must be a function")
    function: Callable[..., Any] = found
    return function


def _per_device(function: Callable[..., Any]) -> bool:
    """Whether a function gives one device's share: its first parameter is `device`."""
    return next(iter(inspect.signature(function).parameters), None) == "device"


def _share_of(name: str, function: Callable[..., Any], options: dict[str, Any], device: Any) -> Share:
    share = function(device, **options)
    if not isinstance(share, Share):
        kind = type(share).__name__
        raise DataError(f"data set '{name}' returned a {kind}; for a device it must return an anysize.Share")
    return share


def _stored_or_fetched(
    name: str, fetch: Callable[[Path], Arrays], ways: Sequence[str] = (), also_in: Sequence[Path] = ()
) -> tuple[Arrays, Path]:
    path = files.locate(f"{name}.npz")
    if path is not None:
        return files.read_npz(path), path
    path = files.cache_folder() / f"{name}.npz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with interrupts.deferred(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            arrays = fetch(Path(folder))
            files.write_npz(path, arrays)
    except (DataError, OSError) as error:
        why = files.missing(name, f"{name}.npz", ways, also_in)
        raise DataError(f"{why}\nA download was tried: {error}.") from error
    return arrays, path


def _fetch_idx_files(url: str, sha256: Mapping[str, str], folder: Path) -> Arrays:
    for key, file in IDX_FILES.items():
        files.download(f"{url.rstrip('/')}/{file}", folder / file, sha256[key])
    return _read_idx_files(folder)


def _read_idx_files(folder: Path) -> Arrays:
    return {key: files.read_idx(folder / file) for key, file in IDX_FILES.items()}


def _fetch_cifar(url: str, name: str, folder: Path) -> Arrays:
    path = folder / url.rsplit("/")[-1]
    files.download(url, path, CIFAR_SHA256[name])
    return files.read_cifar(path, name)


def _located(name: str, file: str, format: str) -> Path:
    path = files.locate(file)
    if path is None:
        raise files.missing(name, file, [f"make {file} ({format})"])
    return path


def _part(arrays: Arrays, which: str) -> TensorPart:
    return TensorPart(arrays[f"x_{which}"], _targets(arrays[f"y_{which}"]), arrays.get(f"group_{which}"))


def _targets(y: Array) -> Array:
    """The targets; some files keep one label per row as a column."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _is_image(part: TensorPart) -> bool:
    return isinstance(part.x, torch.Tensor) and part.x.dtype == torch.uint8 and part.x.ndim == 4 and len(part) > 0


def _with_test(arrays: Arrays, fraction: float) -> Arrays:
    per_sample = [key for key in ("x", "y", "group") if f"{key}_train" in arrays]
    strata = arrays.get("group_train", _targets(arrays["y_train"]))
    test = _held_out(strata if strata.ndim == 1 else np.zeros(len(strata)), fraction, "held out")
    split = {f"{key}_train": arrays[f"{key}_train"][~test] for key in per_sample}
    return arrays | split | {f"{key}_test": arrays[f"{key}_train"][test] for key in per_sample}


def _held_out(strata: Array, fraction: float, purpose: str) -> Array:
    """Which samples are held out: the fraction of every stratum, always the same samples."""
    order = np.random.Generator(np.random.PCG64(derive(purpose, len(strata)))).permutation(len(strata))
    _, code, counts = np.unique(strata, return_inverse=True, return_counts=True)
    by_stratum = order[np.argsort(code[order], kind="stable")]
    rank = np.arange(len(strata)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = np.zeros(len(strata), dtype=bool)
    held[by_stratum] = rank < np.rint(fraction * np.repeat(counts, counts))
    return held


def _domain(name: str, part: Part, size: int, limit: int | None) -> Arrays:
    index = np.arange(len(part))
    if limit is not None and limit < len(part):
        rng = np.random.Generator(np.random.PCG64(derive("domain", name, len(part))))
        index = np.sort(rng.permutation(len(part))[:limit])
    x, y = part.batch(torch.from_numpy(index))
    if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8 or x.ndim != 4:
        raise DataError(f"digits-domains: '{name}' does not hold uint8 images")
    resized = _resized(x, size)
    colour = resized.expand(-1, 3, -1, -1) if resized.shape[1] == 1 else resized
    return {"x": colour.numpy(), "y": y.numpy(), "group": np.full(len(index), name)}


def _resized(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[2:] == (size, size):
        return x
    # With a filter, so that shrinking averages pixels rather than drops them.
    blocks = (
        functional.interpolate(block.float(), (size, size), mode="bilinear", antialias=True)
        for block in torch.split(x, 4096)
    )
    return torch.cat([block.round().clamp(0, 255).to(torch.uint8) for block in blocks])


def _windows(tokens: Array, length: int) -> Array:
    count = max(0, (len(tokens) - 1) // length)
    starts = np.arange(count)[:, None] * length
    windows: Array = tokens[starts + np.arange(length + 1)]  # (count, length + 1): with the next character
    return windows


def _sequences(roles: Sequence[tuple[str, Array]]) -> TensorPart:
    windows = torch.from_numpy(np.concatenate([own for _, own in roles]))
    group = np.repeat([role for role, _ in roles], [len(own) for _, own in roles])
    return TensorPart(windows[:, :-1], windows[:, 1:], group)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower().replace("<br />", " "))


def _padded(reviews: Sequence[Sequence[str]], token: Mapping[str, int], length: int) -> Array:
    out: Array = np.zeros((len(reviews), length), dtype=np.int32)
    for row, review in zip(out, reviews):
        tokens = [token.get(word, 1) for word in review[:length]]
        row[length - len(tokens) :] = tokens
    return out


_SOURCES: dict[str, Callable[..., Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digit-pairs": digit_pairs,
    "digits": digits,
    "digits-domains": digits_domains,
    "domainnet": domainnet,
    "emnist": emnist,
    "fashion-mnist": fashion_mnist,
    "femnist": femnist,
    "imdb": imdb,
    "mnist": mnist,
    "mnist-m": mnist_m,
    "shakespeare": shakespeare,
    "svhn": svhn,
    "synth-digits": synth_digits,
    "usps": usps,
}
