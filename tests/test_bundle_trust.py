"""Bundles that somebody changed: refused, or accepted and then equal to what their bytes say."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from anysize import onnx_runtime, runtime
from anysize.errors import ModelError
from anysize.exports import packing
from bundles import about, assembled, parts_of

FIXTURES = Path(__file__).parent / "fixtures" / "bundles"
X = torch.arange(2 * 64).reshape(2, 1, 8, 8) % 17 / 16
LOADERS: dict[str, Callable[..., Any]] = {
    "heterofl": runtime.load,
    "heterofl-onnx": onnx_runtime.load,
    "heterofl-packed": runtime.load,
    "heterofl-onnx-packed": onnx_runtime.load,
}
ERRORS = (runtime.BundleError, onnx_runtime.BundleError)


def outputs_of(load: Callable[..., Any], path: Path, **options: Any) -> dict[str, np.ndarray]:
    """The outputs of every size, after everything that a device might do with a bundle."""
    network = load(path, **options)
    x = X if load is runtime.load else X.numpy()
    found = {}
    for size in network.sizes:
        found[size] = np.asarray(network.switch(size)(x))
        network.predict(x)
    _ = network.choices
    network.forget()
    return found


def said(content: bytes) -> np.ndarray:
    """What the bytes of the fixture's largest network say, computed without the runtime."""
    header, note, data = parts_of(content)
    begin = header["small"]["data_offsets"][0]
    row = torch.from_numpy(np.frombuffer(data, "<f4", sum(map(np.prod, note["small"])), begin).copy())
    shapes = note["small"]
    w = [piece.reshape(shape) for piece, shape in zip(row.split([int(np.prod(s)) for s in shapes]), shapes)]
    if "graphs" in header:  # ONNX's graph has parameters before buffers
        w = [w[place] for place in (12, 13, 0, 1, 2, 8, 9, 3, 4, 5, 10, 11, 6, 7)]
    mean, std, conv1, g1, b1, m1, v1, conv2, g2, b2, m2, v2, weight, bias = w[:14]
    x = (X - mean) / std
    for conv, g, b, m, v in ((conv1, g1, b1, m1, v1), (conv2, g2, b2, m2, v2)):
        x = F.max_pool2d(F.relu(F.batch_norm(F.conv2d(x, conv, padding=1), m, v, g, b)), 2)
    return F.linear(x.flatten(1), weight, bias).numpy()


def weights_changed(content: bytes, dice: random.Random) -> bytes:
    header, note, data = parts_of(content)
    begin, end = header["small"]["data_offsets"]
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 5])):
        changed[dice.randrange(begin, end)] ^= 1 << dice.randrange(8)
    return assembled(header, note, bytes(changed))


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 63, -(1 << 70), 0.5, -1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "#0", "#99", "$0", "$99", "@float32", "=", "aten.relu.default", [], [1], [[0, 1]], [-1], {}, {"a": 1}),
    *({"product": [-1, -2]}, "1.0", [10], [1, 8, 8], [1 << 40]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def note_changed(content: bytes, dice: random.Random) -> bytes:
    header, note, data = parts_of(content)
    whole = {"note": note, "header": header}
    *way, last = dice.choice([place for place in places(whole) if len(place) > 1])
    target: Any = whole
    for key in way:
        target = target[key]
    act = dice.choice(["odd", "odd", "odd", "drop", "twice", "near"])
    if act == "odd":
        target[last] = dice.choice(ODD)
    elif act == "drop":
        del target[last]
    elif act == "twice" and isinstance(target, list):
        target.insert(last, target[last])
    elif isinstance(target[last], int | float):
        target[last] = dice.choice([target[last] + 1, target[last] - 1, -target[last], 2 * target[last]])
    return assembled(whole["header"], whole["note"], data)


def bytes_changed(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 4])):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed) if dice.random() < 0.8 else bytes(changed[: dice.randrange(len(changed))])


PACKED = {
    "no end": (zlib.compress(b"{" + b" " * (1 << 27)), "too long"),
    "half": (zlib.compress(b'{"a": 1}')[:-2], "not whole"),
    "more behind it": (zlib.compress(b"{}") + b"more", "not whole"),
    "no compression": (b"{}", "damaged"),
    "a list": (zlib.compress(b"[]"), "not an object"),
    "a key twice": (zlib.compress(b'{"whole": [], "whole": []}'), "comes twice"),
    "nothing in it": (zlib.compress(b"{}"), "has no 'whole'"),
}


@pytest.mark.parametrize("name", ["heterofl-packed", "heterofl-onnx-packed"])
@pytest.mark.parametrize("case", PACKED)
def test_a_note_that_does_not_unpack_to_an_object_is_refused(tmp_path: Path, name: str, case: str) -> None:
    held, words = PACKED[case]
    seal = {"format": "anysize-onnx-3" if "onnx" in name else "anysize-bundle-3"}
    data = parts_of((FIXTURES / f"{name}.anysize").read_bytes())[2]
    header = {"x": about(0, len(data)), "note": about(len(data), len(data) + len(held))}
    text = json.dumps({"__metadata__": {"anysize": json.dumps(seal)}, **header}).encode()
    path = tmp_path / "net.anysize"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + held)
    for verify in (True, False):
        with pytest.raises(ERRORS, match=words):
            LOADERS[name](path, verify=verify)


HUGE = 1e37
"""Near the largest number of single precision the order of a sum decides whether it is infinite."""


def finite(content: bytes) -> bool:
    header, _, data = parts_of(content)
    begin, end = header["small"]["data_offsets"]
    return bool(np.isfinite(np.frombuffer(data[begin:end], "<f4")).all())


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_other_weights_are_what_the_bytes_say_or_refused_if_they_are_not_finite(
    tmp_path: Path, name: str, count: int
) -> None:
    content, path = (FIXTURES / f"{name}.anysize").read_bytes(), tmp_path / "net.anysize"
    assert np.allclose(outputs_of(LOADERS[name], FIXTURES / f"{name}.anysize")["1.0"], said(content), atol=1e-5)
    dice = random.Random(0)
    for _ in range(count):
        blob = weights_changed(content, dice)
        path.write_bytes(blob)
        try:
            outputs = outputs_of(LOADERS[name], path)["1.0"]
        except ERRORS:
            assert not finite(blob)
            continue
        assert finite(blob)
        expected = said(blob)
        huge = ~((np.abs(outputs) < HUGE) & (np.abs(expected) < HUGE))  # numbers that are none are here too
        np.testing.assert_allclose(outputs[~huge], expected[~huge], rtol=1e-3, atol=1e-4)
        assert not any((np.abs(found[huge]) < HUGE / 10).any() for found in (outputs, expected))
    header, note, data = parts_of(content)
    begin = header["small"]["data_offsets"][0]
    for bad in (float("nan"), float("inf"), -float("inf")):
        changed = data[: begin + 80] + struct.pack("<f", bad) + data[begin + 84 :]
        path.write_bytes(assembled(header, note, changed))
        for options in ({}, {"verify": False}):
            with pytest.raises(ERRORS, match="not finite"):
                outputs_of(LOADERS[name], path, **options)


def survives(name: str, path: Path, blob: bytes) -> bool:
    """Whether a changed bundle is accepted; any error but a refusal fails the test."""
    path.write_bytes(blob)
    try:
        outputs = outputs_of(LOADERS[name], path)
    except ERRORS:
        return False
    _, note, _ = parts_of(blob)
    assert all(list(one.shape) == [2, *note["output_shape"]] for one in outputs.values())
    return True


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_changed_note_is_refused_or_gives_what_it_says(tmp_path: Path, name: str, count: int) -> None:
    content, dice = (FIXTURES / f"{name}.anysize").read_bytes(), random.Random(1)
    accepted = sum(survives(name, tmp_path / "net.anysize", note_changed(content, dice)) for _ in range(count))
    assert accepted < count


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage_is_refused(tmp_path: Path, name: str, count: int) -> None:
    content, dice = (FIXTURES / f"{name}.anysize").read_bytes(), random.Random(2)
    for _ in range(count):
        blob = bytes_changed(content, dice)
        if survives(name, tmp_path / "net.anysize", blob):  # the header's padding, or a letter's JSON escape
            assert parts_of(blob) == parts_of(content)


# Signatures -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of keys, and one of another kind."""
    folder = tmp_path_factory.mktemp("keys")
    made = {"own": Ed25519PrivateKey.generate(), "other": Ed25519PrivateKey.generate()}
    for name, key in (*made.items(), ("curve", generate_private_key(SECP256R1()))):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.pem").write_bytes(private)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


def signed(content: bytes, key: Path) -> bytes:
    """The file with a signature, made by what the page says, not by the package."""
    header, note, data = parts_of(content)
    blob = assembled(header, note | {"signature": "0" * 128}, data)
    private = load_pem_private_key(key.read_bytes(), None)
    assert isinstance(private, Ed25519PrivateKey)
    signature = private.sign(b"anysize bundle\0" + hashlib.sha256(blob).digest()).hex()
    return blob.replace(b"0" * 128, signature.encode(), 1)


@pytest.mark.parametrize("name", LOADERS)
def test_a_signed_bundle_is_read_and_no_other(tmp_path: Path, keys: Path, name: str) -> None:
    load, content = LOADERS[name], (FIXTURES / f"{name}.anysize").read_bytes()
    path = tmp_path / "net.anysize"
    path.write_bytes(signed(content, keys / "own.pem"))
    expected = outputs_of(load, FIXTURES / f"{name}.anysize")
    for options in ({}, {"key": keys / "own.pub"}, {"key": keys / "own.pub", "verify": False}):
        assert np.array_equal(outputs_of(load, path, **options)["0.5"], expected["0.5"])
    with pytest.raises(ERRORS, match="another key"):
        load(path, key=keys / "other.pub")
    with pytest.raises(ERRORS, match="is not signed"):
        load(FIXTURES / f"{name}.anysize", key=keys / "own.pub")
    with pytest.raises(ERRORS, match="not an ed25519 key"):
        load(path, key=keys / "curve.pub")
    for wrong in (keys / "own.pem", keys / "none.pub", path):
        with pytest.raises(ERRORS, match="public key in PEM"):
            load(path, key=wrong)


def test_the_package_signs_as_the_page_says_and_refuses_other_keys(tmp_path: Path, keys: Path) -> None:
    _, note, data = parts_of((FIXTURES / "heterofl.anysize").read_bytes())
    row = torch.from_numpy(np.frombuffer(data, "<f4").copy())
    tensors = [
        one.reshape(shape) for one, shape in zip(row.split([int(np.prod(s)) for s in note["small"]]), note["small"])
    ]
    path = tmp_path / "net.anysize"
    bundle = packing.Packed(runtime.FORMAT, note, {}, tensors, b"")
    path.write_bytes(packing.sealed(bundle, packing._private(keys / "own.pem")))
    runtime.load(path, key=keys / "own.pub")
    with pytest.raises(ERRORS, match="another key"):
        runtime.load(path, key=keys / "other.pub")
    own, (head, body) = parts_of(path.read_bytes())[1]["signature"], (path.read_bytes().split(b"signature", 1))
    private = load_pem_private_key((keys / "own.pem").read_bytes(), None)
    assert isinstance(private, Ed25519PrivateKey)
    blank = head + b"signature" + body.replace(own.encode(), b"0" * 128)
    assert private.sign(b"anysize bundle\0" + hashlib.sha256(blank).digest()).hex() == own
    for wrong, words in (("curve.pem", "not an ed25519 key"), ("own.pub", "private key"), ("none.pem", "private key")):
        with pytest.raises(ModelError, match=words):
            packing._private(keys / wrong)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_change_of_a_signed_bundle_is_accepted(tmp_path: Path, keys: Path, name: str, count: int) -> None:
    content = signed((FIXTURES / f"{name}.anysize").read_bytes(), keys / "own.pem")
    path, dice = tmp_path / "net.anysize", random.Random(3)
    signature = parts_of(content)[1]["signature"]
    upper = content.replace(signature.encode(), signature.upper().encode())
    changes = [dice.choice([bytes_changed, note_changed, weights_changed])(content, dice) for _ in range(count)]
    for blob in [upper, *changes]:
        if blob == content:
            continue
        path.write_bytes(blob)
        for verify in (True, False):
            with pytest.raises(ERRORS):
                LOADERS[name](path, key=keys / "own.pub", verify=verify)


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read_later_is_of_the_file_that_was_checked(tmp_path: Path, keys: Path, name: str) -> None:
    """Somebody puts another file in its place while a device uses one of its sizes."""
    original = (FIXTURES / f"{name}.anysize").read_bytes()
    header, note, data = parts_of(original)
    path, other, x = tmp_path / "net.anysize", tmp_path / "other", X if LOADERS[name] is runtime.load else X.numpy()
    path.write_bytes(signed(original, keys / "own.pem"))
    signature = parts_of(path.read_bytes())[1]["signature"]
    expected = outputs_of(LOADERS[name], path)
    network = LOADERS[name](path, "0.5", key=keys / "own.pub")
    begin, end = header["small"]["data_offsets"]
    changed = data[:begin] + np.negative(np.frombuffer(data[begin:end], "<f4")).tobytes() + data[end:]
    other.write_bytes(assembled(header, note | {"signature": signature}, changed))
    other.replace(path)
    network.forget()
    assert all(np.array_equal(np.asarray(network.switch(size)(x)), expected[size]) for size in expected)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, opens = tmp_path / "net.anysize", tmp_path / "other", runtime.safetensors.safe_open
    for one in (path, other):
        one.write_bytes((FIXTURES / "heterofl.anysize").read_bytes())

    def late(*arguments: Any) -> Any:
        other.replace(path)
        return opens(*arguments)

    monkeypatch.setattr(runtime.safetensors, "safe_open", late)
    with pytest.raises(ERRORS, match="was replaced while it was read"):
        runtime.load(path)


# The two files --------------------------------------------------------------------------------------


def test_what_both_runtimes_need_is_the_same_word_for_word() -> None:
    def shared(module: Any) -> str:
        text = Path(module.__file__).read_text(encoding="utf-8")
        return text[text.index("# Word for word the same") : text.index("# Until here")]

    assert shared(runtime) == shared(onnx_runtime)
    assert len(shared(runtime)) > 10_000
