"""Data: parts, sources, files that are missing or damaged, downloads, augmentation."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import json
import lzma
import os
import struct
import sys
import tarfile
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

from anysize.cli.commands import app
from anysize.data import (
    Data,
    DatasetPart,
    Share,
    SubsetPart,
    TensorPart,
    augment,
    channel_statistics,
    datasets,
    facts,
    files,
    groups_of,
    load,
    sources,
    split,
    stand_in,
    to_input,
    without_files,
)
from anysize.errors import ConfigError, DataError
from anysize.rng import generator

SHARED = os.environ.get("ANYSIZE_DATA", "")
needs_files = pytest.mark.skipif(
    not (Path(SHARED) / "mnist.npz").is_file(),
    reason="ANYSIZE_DATA does not name a folder with the real sets",
)
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder and cache, and no Debian packages, whatever this machine has."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv("ANYSIZE_DATA", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN_FOLDER", tmp_path / "debian")
    return own


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.integers(0, 256, (30, 6, 6)), "x_test": rng.integers(0, 256, (10, 6, 6))}
    arrays |= {"y_train": np.arange(30) % 3, "y_test": np.arange(10) % 3}
    return {key: value.astype(np.uint8) for key, value in arrays.items()}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">I", 0x800 + array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx_files(place: Path, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    place.mkdir(parents=True, exist_ok=True)
    for key, name in sources.IDX_FILES.items():
        (place / name).write_bytes(gzip.compress(idx(arrays[key])))
    return {key: hashlib.sha256(idx(arrays[key])).hexdigest() for key in sources.IDX_FILES}


@pytest.fixture
def served(tmp_path):
    """A folder and the address under which it is served on this machine."""
    place = tmp_path / "served"
    place.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(place)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield place, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


class Pairs(Dataset):
    """Images and labels that count how often they are drawn."""

    def __init__(self, size: int = 6, targets: list[int] | None = None):
        self.size = size
        self.drawn = 0
        if targets is not None:
            self.targets = targets

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.drawn += 1
        return np.full((4, 4), index % 256, np.uint8), index % 3


# Parts


def test_a_tensor_part_shares_the_memory_of_an_array():
    x = np.zeros((3, 4, 4), np.uint8)
    part = TensorPart(x, [0, 1, 2])
    x[1, 2, 3] = 7
    assert int(part.x[1, 0, 2, 3]) == 7


@pytest.mark.parametrize(
    "given, seen",
    [((5, 9, 8), (5, 1, 9, 8)), ((5, 9, 8, 3), (5, 3, 9, 8)), ((5, 3, 9, 8), (5, 3, 9, 8)), ((5, 9), (5, 9))],
)
def test_images_are_seen_with_channels_first(given, seen):
    x = np.arange(np.prod(given)).reshape(given).astype(np.uint8)
    part = TensorPart(x, np.zeros(5, int))
    assert part.x.shape == seen
    if given == (5, 9, 8, 3):
        assert np.array_equal(part.x.numpy(), x.transpose(0, 3, 1, 2))


def test_targets_are_int64_or_float32_in_every_batch():
    index = torch.tensor([1, 0])
    for y, dtype in [
        (np.array([1, 2], np.uint8), torch.int64),
        (np.array([[1, 2], [3, 4]], np.int32), torch.int64),
        (np.array([1.0, 2.0]), torch.float32),
        (np.array([[True, False], [False, True]]), torch.float32),
    ]:
        drawn = TensorPart(np.zeros((2, 1)), y).batch(index)[1]
        assert drawn.dtype == dtype
        assert np.array_equal(drawn.numpy(), y[[1, 0]].astype(drawn.numpy().dtype))


def test_inputs_are_what_a_network_receives_whatever_their_layout():
    stored = torch.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3).to(torch.uint8).permute(0, 3, 1, 2)
    out = to_input(stored)
    assert out.is_contiguous()
    np.testing.assert_allclose(out.numpy(), stored.numpy().astype(np.float64) / 255, rtol=1e-6)
    assert to_input(torch.tensor([1], dtype=torch.int16)).dtype == torch.int64
    assert to_input(torch.tensor([True])).dtype == torch.float32
    with pytest.raises(DataError, match="complex"):
        to_input(torch.zeros(1, dtype=torch.complex64))


def test_a_dataset_is_drawn_only_where_asked_and_its_labels_once():
    dataset = Pairs()
    part = DatasetPart(dataset)
    assert dataset.drawn == 0
    x, y = part.batch(torch.tensor([5, 0]))
    assert (tuple(x.shape), x[:, 0, 0, 0].tolist(), y.tolist()) == ((2, 1, 4, 4), [5, 0], [2, 0])
    assert dataset.drawn == 2
    assert part.labels().tolist() == part.labels().tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.drawn == 8


def test_declared_targets_are_used_if_they_are_true_and_not_otherwise():
    honest, wrong = Pairs(600, [i % 3 for i in range(600)]), Pairs(600, [2 - i % 3 for i in range(600)])
    expected = [i % 3 for i in range(600)]
    assert DatasetPart(honest).labels().tolist() == expected
    assert honest.drawn < 10
    assert DatasetPart(wrong).labels().tolist() == expected


def test_a_subset_is_a_view_of_samples_labels_and_groups():
    whole = TensorPart(np.arange(5.0)[:, None], [0, 1, 2, 3, 4], group=list("aabbc"))
    inner = SubsetPart(SubsetPart(whole, [4, 2, 0]), np.array([2, 0]))
    x, y = inner.batch(torch.tensor([1, 0]))
    assert (x.flatten().tolist(), y.tolist()) == ([4.0, 0.0], [4, 0])
    assert (inner.labels().tolist(), inner.group.tolist()) == ([0, 4], ["a", "c"])
    with pytest.raises(DataError, match="outside the 5 samples"):
        SubsetPart(whole, [5])


@pytest.mark.parametrize(
    "train",
    [
        (np.zeros((6, 4, 4), np.uint8), np.arange(6) % 3),
        (torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 3),
        TensorDataset(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.arange(6) % 3),
        TensorPart(np.zeros((6, 4, 4), np.uint8), np.arange(6) % 3),
        Pairs(),
    ],
)
def test_data_and_shares_accept_arrays_tensors_datasets_and_parts(train):
    data = Data(train=train, test=train)
    assert (data.classes, data.outputs, data.input_shape, len(data.train)) == (3, 3, (1, 4, 4), 6)
    share = Share(train=train, held_out=train)
    assert len(share.train) == len(share.held_out) == 6


def test_the_vocabulary_of_token_data_covers_inputs_and_targets():
    windows = np.array([[9, 1, 2], [0, 3, 4]], np.int32)
    assert Data(train=(windows[:, :-1], windows[:, 1:])).classes == 10


def test_real_targets_have_no_classes_but_outputs():
    data = Data(train=(np.zeros((3, 2)), np.ones((3, 4))))
    assert (data.classes, data.outputs) == (None, 4)


def test_the_same_arrays_have_the_same_checksum_and_others_another(images):
    x, y = images["x_train"], images["y_train"]
    first, again = Data(train=(x, y)), Data(train=(torch.from_numpy(x.copy()), y.astype(np.int64)))
    changed = x.copy()
    changed[0, 0, 0] ^= 1
    assert len(first.checksum) == 64
    assert first.checksum == again.checksum != Data(train=(changed, y)).checksum
    assert Data(train=Pairs()).checksum == ""


@pytest.mark.parametrize(
    "match, arguments",
    [
        ("x has 3 samples, y has 2", {"train": (np.zeros((3, 1)), [0, 1])}),
        ("train: there are no samples", {"train": (np.zeros((0, 1)), np.zeros(0, int))}),
        (
            "labels run from 0 to 5; allowed with 3 classes: 0 to 2",
            {"train": (np.zeros((2, 1)), [0, 5]), "classes": 3},
        ),
        ("labels run from -1", {"train": (np.zeros((2, 1)), [0, -1])}),
        ("x holds values that are not finite", {"train": (np.array([[1.0], [np.nan]]), [0, 1])}),
        ("y holds values that are not finite", {"train": (np.zeros((2, 1)), [0.0, np.inf])}),
        ("differ in shape", {"train": (np.zeros((2, 1)), [0, 1]), "test": (np.zeros((2, 2)), [0, 1])}),
        ("is not a number type", {"train": (np.array(["a", "b"]), [0, 1])}),
        ("class_names has 1 entries for 2", {"train": (np.zeros((2, 1)), [0, 1]), "class_names": ["a"]}),
        ("give both or neither", {"train": (np.zeros((2, 1)), [0, 1]), "mean": [0.5]}),
        ("mean has 2 entries for 1", {"train": (np.zeros((2, 1)), [0, 1]), "mean": [0, 0], "std": [1]}),
        ("each must be above 0", {"train": (np.zeros((2, 1)), [0, 1]), "mean": [0], "std": [0]}),
        ("part of the data is a int", {"train": 3}),
    ],
)
def test_bad_data_are_refused_with_what_is_wrong(match, arguments):
    with pytest.raises(DataError, match=match):
        Data(**arguments)


def test_all_problems_of_the_data_are_told_at_once():
    bad = (np.array([[np.nan]]), [0])
    with pytest.raises(DataError) as caught:
        Data(train=bad, test=bad)
    assert len(str(caught.value).splitlines()) == 2


def test_an_iterable_dataset_and_a_dataset_of_no_pairs_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(DataError, match="map-style"):
        Data(train=Stream())
    with pytest.raises(DataError, match=r"must be a pair \(x, y\)"):
        Data(train=TensorDataset(torch.zeros(3, 2)))


def test_statistics_are_the_mean_and_deviation_of_each_channel():
    x = np.random.default_rng(0).integers(0, 256, (50, 7, 5, 3)).astype(np.uint8)
    mean, std = channel_statistics(TensorPart(x, np.zeros(50, int)))
    np.testing.assert_allclose(mean, (x / 255).mean(axis=(0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(std, (x / 255).std(axis=(0, 1, 2)), atol=1e-6)


# Sources


def test_digits_are_the_bundled_ones_split_by_class():
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits")
    x = torch.cat([data.train.x, data.test.x])[:, 0].numpy()
    bundle = load_digits()
    ours = sorted(np.rint(image / 255 * 16).astype(int).tobytes() for image in x)
    theirs = sorted(image.astype(int).tobytes() for image in bundle.images)
    assert ours == theirs
    fractions = np.bincount(data.test.labels()) / np.bincount(bundle.target)
    assert np.abs(fractions - 0.2).max() < 0.01
    assert data.checksum == again.checksum
    assert (data.train.x.max(), data.train.x.dtype) == (255, torch.uint8)


def test_digit_pairs_are_two_digits_of_one_part_side_by_side():
    """Oracle: both halves are looked up among the digits, which say the number; no test digit is in a training pair."""
    digits, pairs, again = load("digits"), load("digit-pairs"), load("digit-pairs")
    for mine, theirs in ((pairs.train, digits.train), (pairs.test, digits.test)):
        number_of = {image.numpy().tobytes(): int(y) for image, y in zip(theirs.x[:, 0], theirs.labels())}
        halves = [mine.x[:, 0, :, :8].contiguous(), mine.x[:, 0, :, 8:].contiguous()]
        left, right = ([number_of[image.numpy().tobytes()] for image in half] for half in halves)
        shown = [f"{a}{b}" for a, b in zip(left, right)]
        assert shown == [pairs.class_names[y] for y in mine.labels()]
    assert np.bincount(pairs.train.labels(), minlength=100).min() > 10
    assert pairs.checksum == again.checksum


def test_any_file_of_that_format_loads_by_its_name(folder, images):
    np.savez(folder / "my-set.npz", **images, class_names=np.array(["a", "b", "c"]))
    data = load("my-set")
    assert (len(data.train), len(data.test), data.class_names) == (30, 10, ("a", "b", "c"))
    assert np.array_equal(data.train.x[:, 0].numpy(), images["x_train"])
    assert data.source == str(folder / "my-set.npz")
    assert ("my-set", f"Found as {folder / 'my-set.npz'}.") in datasets()


def test_the_cache_is_searched_after_the_own_folder(folder, images, tmp_path):
    cached = tmp_path / "cache" / "anysize" / "usps.npz"
    cached.parent.mkdir(parents=True)
    np.savez(cached, **images)
    assert load("usps").source == str(cached)
    np.savez(folder / "usps.npz", **images)
    assert load("usps").source == str(folder / "usps.npz")


def test_a_set_without_a_test_part_has_none_unless_asked(folder, images):
    group = np.repeat(["anna", "bert", "cleo"], 10)
    np.savez(folder / "few.npz", x_train=images["x_train"], y_train=images["y_train"], group_train=group)
    assert load("few").test is None
    held = load("few", {"held_out": 0.3})
    assert sorted(held.test.group.tolist()) == ["anna"] * 3 + ["bert"] * 3 + ["cleo"] * 3
    assert (len(held.train), len(held.test)) == (21, 9)
    assert len(split(held, None, "natural")) == 3


def test_labels_in_a_column_are_one_per_sample(folder, images):
    np.savez(folder / "column.npz", x_train=images["x_train"], y_train=images["y_train"][:, None])
    assert load("column").train.labels().shape == (30,)


def test_fashion_mnist_comes_from_debians_package_first(folder, images, tmp_path):
    write_idx_files(tmp_path / "debian" / "fashion-mnist", images | {"y_train": np.arange(30).astype(np.uint8) % 10})
    data = load("fashion-mnist")
    assert data.source == str(tmp_path / "debian" / "fashion-mnist")
    assert data.class_names[9] == "Ankle boot"
    assert np.array_equal(data.test.x[:, 0].numpy(), images["x_test"])


def test_fashion_mnist_can_be_shrunk(folder, images):
    np.savez(folder / "fashion-mnist.npz", **images | {"y_train": np.arange(30).astype(np.uint8) % 10})
    data = load("fashion-mnist", {"size": 3})
    assert data.train.x.shape == (30, 1, 3, 3)
    # Half the size with a triangle filter: each pixel weighs its four neighbours along an axis 1, 3, 3, 1.
    rows = np.array([[3, 3, 1, 0, 0, 0], [0, 1, 3, 3, 1, 0], [0, 0, 0, 1, 3, 3]], dtype=float)
    rows /= rows.sum(1, keepdims=True)
    expected = np.round(rows @ images["x_test"].astype(float) @ rows.T)
    assert np.abs(data.test.x[:, 0].numpy() - expected).max() <= 1
    for size in (0, 29):
        with pytest.raises(DataError, match="1 to 28"):
            load("fashion-mnist", {"size": size})


def test_the_same_set_has_the_same_checksum_wherever_it_came_from(folder, images, tmp_path):
    images |= {"y_train": np.arange(30).astype(np.uint8) % 10}
    np.savez(folder / "fashion-mnist.npz", **images)
    from_file = load("fashion-mnist")
    write_idx_files(tmp_path / "debian" / "fashion-mnist", images)
    from_package = load("fashion-mnist")
    assert from_file.source != from_package.source
    assert from_file.checksum == from_package.checksum


def test_a_download_is_checked_kept_and_not_repeated(folder, images, served, monkeypatch, tmp_path):
    place, url = served
    monkeypatch.setattr(sources, "MNIST_SHA256", write_idx_files(place, images))
    data = load("mnist", {"url": url})
    assert np.array_equal(data.train.x[:, 0].numpy(), images["x_train"])
    assert [path.name for path in (tmp_path / "cache" / "anysize").iterdir()] == ["mnist.npz"]
    assert load("mnist", {"url": NOWHERE}).checksum == data.checksum


def test_a_download_with_other_content_is_refused_and_leaves_nothing(folder, images, served, monkeypatch, tmp_path):
    place, url = served
    expected = write_idx_files(place, images)
    monkeypatch.setattr(sources, "FASHION_SHA256", expected | {"y_test": "0" * 64})
    with pytest.raises(DataError, match="gave unexpected content"):
        load("fashion-mnist", {"url": url})
    assert list((tmp_path / "cache" / "anysize").iterdir()) == []


def test_a_download_that_ends_early_is_refused(folder, images, served, tmp_path):
    place, url = served
    (place / sources.IDX_FILES["x_train"]).write_bytes(gzip.compress(idx(images["x_train"]))[:-20])
    with pytest.raises(DataError, match=r"damaged, truncated"):
        load("mnist", {"url": url})
    assert list((tmp_path / "cache" / "anysize").iterdir()) == []


@pytest.mark.parametrize("name, labels", [("cifar10", 1), ("cifar100", 2)])
def test_cifar_archives_are_read_from_their_binary_version(folder, served, monkeypatch, name, labels):
    place, url = served
    rng = np.random.default_rng(0)
    classes = 10 if name == "cifar10" else 100
    records = rng.integers(0, 256, (8, labels + 3072)).astype(np.uint8)
    records[:, labels - 1] = [0, 1, classes - 1, 3, 4, 5, 6, 7]
    names = "\n".join(f"class{number}" for number in range(classes)).encode()
    members = {
        "cifar10": {"data_batch_1.bin": 3, "data_batch_2.bin": 2, "test_batch.bin": 3},
        "cifar100": {"train.bin": 5, "test.bin": 3},
    }[name]
    archive = place / ("cifar-10-binary.tar.gz" if name == "cifar10" else "cifar-100-binary.tar.gz")
    start = 0
    with tarfile.open(archive, "w:gz") as tar:
        for member, count in members.items():
            add_member(tar, member, records[start : start + count].tobytes())
            start += count
        add_member(tar, "batches.meta.txt" if name == "cifar10" else "fine_label_names.txt", names)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(sources.CIFAR_SHA256, name, digest)
    data = load(name, {"url": url})
    assert data.classes == classes
    assert data.train.labels().tolist() == records[:5, labels - 1].tolist()
    assert np.array_equal(data.test.x.numpy().reshape(3, -1), records[5:, labels:])


def add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(f"folder/{name}")
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def test_missing_data_say_once_where_it_was_looked_for_and_how_to_get_it(folder, tmp_path):
    with pytest.raises(DataError) as caught:
        load("fashion-mnist", {"url": NOWHERE})
    message = str(caught.value)
    for part in [
        "dataset-fashion-mnist",
        "ANYSIZE_DATA",
        str(folder / "fashion-mnist.npz"),
        str(tmp_path / "cache" / "anysize" / "fashion-mnist.npz"),
        str(tmp_path / "debian"),
        NOWHERE,
    ]:
        assert part in message
    for name in ("femnist", "shakespeare", "imdb", "digits-domains"):
        with pytest.raises(DataError, match=r"is not on this machine|ANYSIZE_DATA"):
            load(name, {"domains": ["usps"]} if name == "digits-domains" else {})


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-40], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\x80\x04junk"]
)
def test_a_damaged_npz_is_one_error_that_names_the_file(folder, images, damage):
    path = folder / "usps.npz"
    np.savez_compressed(path, **images)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"usps\.npz cannot be read"):
        load("usps")


def test_a_flipped_bit_in_an_npz_is_found(folder, images):
    path = folder / "usps.npz"
    np.savez(path, **images)
    content = bytearray(path.read_bytes())
    content[500] ^= 0xFF  # inside the pixels of x_train
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"usps\.npz cannot be read"):
        load("usps")


@pytest.mark.parametrize("packed", [False, True])
def test_wherever_an_npz_is_damaged_it_loads_unchanged_or_is_refused(folder, images, packed):
    path = folder / "usps.npz"
    (np.savez_compressed if packed else np.savez)(path, **images)
    whole, expected = path.read_bytes(), load("usps").checksum
    rng = np.random.default_rng(0)
    outcomes = []
    for place in rng.integers(0, len(whole), 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ int(rng.integers(1, 256))]) + whole[place + 1 :])
        outcomes.append(checksum_or_error("usps"))
    assert all(outcome == expected or "usps.npz" in outcome for outcome in outcomes)
    assert sum(outcome != expected for outcome in outcomes) > 50


def checksum_or_error(name: str) -> str:
    try:
        return load(name).checksum
    except DataError as error:
        return str(error)


def test_pickled_objects_in_a_file_are_never_loaded(folder, images):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    trap = np.empty(1, dtype=object)
    trap[0] = Trap()
    np.savez(folder / "usps.npz", **images, extra=trap)
    with pytest.raises(DataError, match=r"usps\.npz cannot be read"):
        load("usps")


def test_a_file_without_the_needed_arrays_says_which(folder, images):
    np.savez(folder / "usps.npz", x_train=images["x_train"], x_test=images["x_test"])
    with pytest.raises(DataError, match=r"usps\.npz: there is no y_train; x_test and y_test belong together"):
        load("usps")


@pytest.mark.parametrize("cut", [10, 200])
def test_a_damaged_package_file_is_one_error_that_names_it(folder, images, tmp_path, cut):
    place = tmp_path / "debian" / "fashion-mnist"
    write_idx_files(place, images)
    file = place / sources.IDX_FILES["x_test"]
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        load("fashion-mnist")


def test_an_idx_file_that_lies_about_its_shape_is_refused(tmp_path):
    path = tmp_path / "lie.gz"
    path.write_bytes(gzip.compress(struct.pack(">II", 0x801, 1000) + b"\x00" * 10))
    with pytest.raises(DataError, match="do not hold the shape"):
        files.read_idx(path)


def test_shakespeare_is_cut_into_sequences_by_role(folder):
    romeo, nurse = "abcdefghij" * 10, "zyx " * 5
    rows = [
        {"user": "b_ROMEO", "text": romeo},
        {"user": "a_NURSE", "text": nurse},
        {"user": "c", "text": "!"},
    ]
    (folder / "shakespeare.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data = load("shakespeare", {"sequence_length": 5})
    assert data.class_names == tuple(sorted(set(romeo + nurse + "!")))
    x, y = data.train.batch(torch.arange(len(data.train)))
    decoded = ["".join(data.class_names[token] for token in row) for row in x]
    following = ["".join(data.class_names[token] for token in row) for row in y]
    # 80 % of each text: 16 characters give 3 sequences of 5 and their next character, 80 characters give 15.
    assert decoded[:4] == ["zyx z", "yx zy", "x zyx", "abcde"]
    assert following[3] == "bcdef"
    assert data.train.group.tolist() == ["a_NURSE"] * 3 + ["b_ROMEO"] * 15
    assert data.test.group.tolist() == ["b_ROMEO"] * 3
    assert len(split(data, None, "natural")) == 2
    assert set(load("shakespeare", {"sequence_length": 5, "minimum_samples": 10}).train.group) == {"b_ROMEO"}


def test_imdb_words_are_numbered_by_frequency_in_the_training_part(folder):
    rows = [
        {"text": "good good film<br />film film", "label": 1, "split": "train"},
        {"text": "Bad, bad film!", "label": 0, "split": "train"},
        {"text": "rare good", "label": 1, "split": "test"},
    ]
    (folder / "imdb.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    data = load("imdb", {"vocabulary": 4, "length": 4})
    # film 4 times, then bad before good by the alphabet; 4 tokens leave room for two words.
    assert data.train.x.tolist() == [[1, 1, 2, 2], [0, 3, 3, 2]]
    assert data.test.x.tolist() == [[0, 0, 1, 1]]
    assert (data.train.labels().tolist(), data.classes) == ([1, 0], 2)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b'{"user": "a"}'), gzip.compress(b"nonsense"), b"plain", b""],
    ids=["without text", "no JSON", "no gzip", "empty"],
)
def test_a_damaged_text_file_is_one_error_that_names_it(folder, content):
    (folder / "shakespeare.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"shakespeare\.jsonl\.gz cannot be read"):
        load("shakespeare")


def test_domains_are_brought_to_one_size_and_colour(folder, images):
    colour = np.random.default_rng(1).integers(0, 256, (12, 10, 10, 3)).astype(np.uint8)
    flat = np.full((30, 6, 6), 200, np.uint8)
    np.savez(folder / "usps.npz", **(images | {"x_train": flat}))
    np.savez(
        folder / "mnist-m.npz",
        x_train=colour,
        y_train=np.arange(12) % 3,
        x_test=colour[:5],
        y_test=np.arange(5) % 3,
    )
    data = load("digits-domains", {"domains": ["usps", "mnist-m"], "size": 10, "per_domain": 20})
    assert data.input_shape == (3, 10, 10)
    assert np.unique(data.train.group, return_counts=True)[1].tolist() == [12, 20]
    usps = data.train.x[torch.from_numpy(data.train.group == "usps")]
    assert (usps == 200).all()
    kept = data.train.x[torch.from_numpy(data.train.group == "mnist-m")]
    assert np.array_equal(kept.numpy(), colour.transpose(0, 3, 1, 2))
    shares = split(data, 4, "natural")
    assert [shares.group_of(client) for client in range(4)] == ["mnist-m", "mnist-m", "usps", "usps"]


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_data")
    monkeypatch.setitem(sys.modules, "own_data", module)
    return module


def test_the_users_function_gives_the_whole_set(own_module):
    own_module.load = lambda samples=3: Data(train=(np.zeros((samples, 2)), np.zeros(samples, int)))
    assert len(load("own_data:load", {"samples": 5}).train) == 5
    with pytest.raises(DataError, match="did you mean 'samples'"):
        load("own_data:load", {"sample": 5})


def test_the_users_function_of_a_device_is_called_only_with_a_device(own_module):
    asked = []

    def loader(device, scale=1.0):
        asked.append(device)
        return Share(train=(np.full((2, 1), device * scale), [0, 1]))

    own_module.load = loader
    given = load("own_data:load", {"scale": 0.5})
    assert callable(given)
    assert asked == []
    assert given(4).train.batch(torch.tensor([0]))[0].item() == 2.0


def test_what_the_users_function_gives_is_checked(own_module):
    own_module.number = 3
    own_module.load = lambda: 3
    own_module.share = lambda device: 3
    for name, match in [("number", "must be a function"), ("load", r"anysize\.Data")]:
        with pytest.raises(DataError, match=match):
            load(f"own_data:{name}")
    with pytest.raises(DataError, match=r"anysize\.Share"):
        load("own_data:share")(0)
    with pytest.raises(ConfigError, match="cannot import"):
        load("no_such_module:load")


def test_unknown_names_and_options_get_the_nearest_match(folder):
    with pytest.raises(DataError, match="did you mean 'fashion-mnist'"):
        load("fashion-mist")
    with pytest.raises(DataError, match=r"unknown data set '\.\./own/usps'"):
        load("../own/usps")
    with pytest.raises(DataError, match="did you mean 'sequence_length'"):
        load("shakespeare", {"sequence_lenght": 3})


def test_only_sets_that_can_be_loaded_are_listed_each_with_a_summary(folder):
    names = [name for name, _ in datasets()]
    assert names == sorted(names) == ["cifar10", "cifar100", "digit-pairs", "digits", "fashion-mnist", "mnist"]
    assert all(summary.endswith(".") for _, summary in datasets())
    missing = without_files()
    assert missing["imdb"] == ["imdb.jsonl.xz"]
    assert missing["digits-domains"] == ["usps.npz", "mnist-m.npz"], "mnist is downloaded"
    (folder / "imdb.jsonl.xz").write_bytes(b"")
    assert "imdb" in dict(datasets())
    fetched = [
        name for name, summary in datasets() if summary.endswith("Not here yet: downloaded when it is first used.")
    ]
    assert fetched == ["cifar10", "cifar100", "fashion-mnist", "mnist"]
    (folder / "mnist.npz").write_bytes(b"")
    assert "downloaded" not in dict(datasets())["mnist"]


@needs_files
@pytest.mark.parametrize(
    "name, samples, tested, shape, classes",
    [
        ("fashion-mnist", 60_000, 10_000, (1, 28, 28), 10),
        ("usps", 7_291, 2_007, (1, 16, 16), 10),
        ("mnist-m", 7_438, 1_862, (3, 32, 32), 10),
        ("cifar10-16", 25_000, 5_000, (3, 16, 16), 10),
        ("emnist-part", 40_000, 8_000, (1, 28, 28), 62),
        ("femnist-sample", 1_761, None, (1, 28, 28), 62),
    ],
)
def test_the_real_sets_are_complete(name, samples, tested, shape, classes):
    data = load(name)
    assert (len(data.train), data.input_shape, data.classes) == (samples, shape, classes)
    assert (None if data.test is None else len(data.test)) == tested
    assert all(0.05 < value < 1 for value in data.mean)
    assert all(0.05 < value < 0.5 for value in data.std)


@needs_files
def test_mnist_splits_by_its_writers():
    data = load("mnist")
    shares = split(data, None, "natural")
    sizes = [shares.samples(client) for client in range(len(shares))]
    assert (len(shares), sum(sizes)) == (539, 60_000)
    # Every writer wrote digits of many classes: none is a placeholder for unknown ones.
    assert max(sizes) < 140
    assert len(shares.share(0).train.labels().unique()) == 10


@needs_files
def test_shakespeares_roles_are_real_text():
    data = load("shakespeare", {"minimum_samples": 10})
    x, y = data.train.batch(torch.tensor([0]))
    assert torch.equal(x[0, 1:].long(), y[0, :-1])
    assert " the " in "".join(data.class_names[token] for token in data.train.x[:200].flatten())
    assert len(np.unique(data.train.group)) > 500


# Augmentation


def test_a_crop_is_a_cut_of_the_padded_image_at_one_of_81_places():
    x = torch.rand(40, 2, 6, 5, generator=generator(0, "images"))
    out = augment(x, ["crop"], generator(1, "crop"))
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    places = set()
    for image, cut in zip(padded, out.numpy()):
        found = [(r, c) for r in range(9) for c in range(9) if np.array_equal(image[:, r : r + 6, c : c + 5], cut)]
        assert found
        places.add(found[0])
    assert len(places) > 15


def test_a_flip_mirrors_about_half_of_the_images():
    x = torch.rand(200, 1, 3, 4, generator=generator(0, "images"))
    out = augment(x, ["flip"], generator(1, "flip"))
    mirrored = [np.array_equal(a[:, :, ::-1], b) for a, b in zip(x.numpy(), out.numpy())]
    kept = [np.array_equal(a, b) for a, b in zip(x.numpy(), out.numpy())]
    assert all(m != k for m, k in zip(mirrored, kept))
    assert 70 < sum(mirrored) < 130


def test_augmentation_follows_its_generator_and_leaves_its_input():
    x = torch.rand(8, 3, 8, 8)
    before = x.clone()
    first, again, other = (augment(x, ["crop", "flip"], generator(seed, "a")) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(x, before)
    assert augment(x, [], generator(0)) is x


def test_augmentation_refuses_unknown_names_and_what_is_no_image():
    with pytest.raises(ConfigError, match="did you mean 'flip'"):
        augment(torch.rand(2, 1, 8, 8), ["flipp"], generator(0))
    with pytest.raises(DataError, match=r"set data\.augment"):
        augment(torch.zeros(2, 80, dtype=torch.int64), ["crop"], generator(0))


# What is known without the data


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any data set and without a network."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was downloaded")

    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(files, "download", refuse)
    return tmp_path


def test_every_named_set_has_facts() -> None:
    assert {name for name in sources.named() if facts(name) is None} == set()


@pytest.mark.parametrize("name", ["digits", "digit-pairs", "fashion-mnist", "mnist", "usps", "digits-domains"])
def test_the_facts_are_those_of_the_set_itself(name: str) -> None:
    options = {"domains": ["usps", "mnist"], "size": 8, "per_domain": 300} if name == "digits-domains" else {}
    known = facts(name, options)
    assert known is not None
    if not known.here:
        pytest.skip(f"{', '.join(known.files)} is not at hand")
    data = load(name, options)
    assert isinstance(data, Data)
    assert data.test is not None
    assert (data.input_shape, data.classes) == (known.shape, known.classes)
    assert (len(data.train), len(data.test)) == (known.train, known.test)
    if name in ("mnist", "digits-domains"):
        assert len(np.unique(groups_of(data.train))) == len(known.groups)


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "groups"),
    [
        ("cifar100", {}, (3, 32, 32), 100, 0),
        ("femnist", {}, (1, 28, 28), 62, 3_550),
        ("digits-domains", {"size": 14, "per_domain": 50}, (3, 14, 14), 10, 3),
        ("shakespeare", {"sequence_length": 20}, (20,), 75, 1_099),
        ("imdb", {"length": 30}, (30,), 2, 0),
        ("domainnet", {"size": 64, "classes": ["bird", "zebra"]}, (3, 64, 64), 2, 6),
    ],
)
def test_a_set_that_is_not_here_has_a_stand_in_of_its_shape(
    bare_machine: Path, name: str, options: dict[str, Any], shape: tuple[int, ...], classes: int, groups: int
) -> None:
    data = stand_in(name, options)
    assert data is not None
    assert (data.input_shape, data.classes) == (shape, classes)
    found = groups_of(data.train)
    assert (0 if found is None else len(np.unique(found))) == groups
    x, y = data.train.batch(torch.tensor([0, 1]))
    assert y.shape == (x.shape if name == "shakespeare" else (2,))
    with pytest.raises((DataError, AssertionError)):
        load(name, options)


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_plan_and_inspect_need_no_data(bare_machine: Path, command: str) -> None:
    file = bare_machine / "first.toml"
    file.write_text(
        'data = { name = "cifar100", clients = 100, split = "classes", classes_per_client = 30 }\n'
        'model = { name = "mlp", options = { hidden = [8, 4] } }\nmethod.name = "heterofl"\n'
    )
    shown = CliRunner().invoke(app, [command, str(file), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    if command == "plan":
        assert [group["clients"] for group in found["groups"]] == [25] * 4
        assert found["groups"][-1]["parameters"] == (3 * 32 * 32 + 1) * 8 + (8 + 1) * 4 + (4 + 1) * 100
        assert any("'cifar100' is not on this machine" in notice for notice in found["notices"])
    else:
        assert {method["name"] for method in found["methods"] if method["can"]} >= {"fedavg", "heterofl"}


def picture_folder(folder: Path, each: int = 4) -> None:
    """Two domains of two classes in DomainNet's layout, every image of one colour that says where it belongs."""
    image = pytest.importorskip("PIL.Image")
    for d, domain in enumerate(("clipart", "real")):
        for k, kind in enumerate(("bird", "zebra")):
            place = folder / "domainnet" / domain / kind
            place.mkdir(parents=True)
            (place / "notes.txt").write_text("no image")
            for number in range(each):
                shade = (100 * d, 100 * k, 50 * number)
                image.new("RGB", (10 + number, 7), shade).save(place / f"{number}.{'png' if number else 'PNG'}")


PICTURES = {"domains": ["real", "clipart"], "classes": ["zebra", "bird"], "size": 6, "test_fraction": 0.25}


def test_domainnet_is_read_from_its_folders(bare_machine: Path) -> None:
    picture_folder(bare_machine)
    data = load("domainnet", PICTURES)
    assert isinstance(data, Data)
    assert data.test is not None
    assert (len(data.train), len(data.test), data.input_shape, data.classes) == (12, 4, (3, 6, 6), 2)
    assert data.class_names == ("zebra", "bird")
    seen = set()
    for part in (data.train, data.test):
        x, y = part.batch(torch.arange(len(part)))
        assert x.dtype == torch.uint8
        for pixels, label, domain in zip(x, y.tolist(), groups_of(part)):
            red, green, blue = (int(channel.unique().item()) for channel in pixels)
            assert (domain == "real", label == 0) == (red == 100, green == 100)
            seen.add((red, green, blue))
    assert len(seen) == 16  # every image once
    assert torch.equal(load("domainnet", PICTURES).test.labels(), data.test.labels())


def test_domainnet_trains_by_domain(bare_machine: Path) -> None:
    picture_folder(bare_machine)
    data = load("domainnet", PICTURES)
    shares = split(data, 4, "natural", domains=["real", "clipart"])
    assert [shares.group_of(client) for client in range(4)] == ["real", "real", "clipart", "clipart"]
    x, _ = shares.share(3).train.batch(torch.arange(3))
    assert set(x[:, 0].flatten().tolist()) == {0}


def test_domainnet_says_what_is_missing(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="a folder domainnet"):
        load("domainnet")
    picture_folder(bare_machine)
    with pytest.raises(DataError, match=r"needs two images or more .*quickdraw"):
        load("domainnet", PICTURES | {"domains": ["quickdraw"]})
    monkeypatch.setattr("anysize.config.extras.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"needs PIL, not installed: pip install .*images"):
        load("domainnet", PICTURES)
