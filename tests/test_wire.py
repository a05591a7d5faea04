"""The wire format: what comes out is what went in, equal contents are equal bytes, and damage is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anysize.errors import CheckpointError, TrustError
from anysize.wire import dump, flatten, load, restore, size_bytes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 12), max_size=3)
NOTES = st.dictionaries(
    st.text(max_size=6), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.lists(st.integers(), max_size=3), max_size=4,
)  # fmt: skip


@st.composite
def contents(draw: Any) -> dict[str, Tensor]:
    named = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        name: torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=random, dtype=torch.uint8)
        .view(dtype if dtype is not torch.bool else torch.uint8)
        .to(dtype if dtype is torch.bool else None)
        .reshape(shape)
        for name, (dtype, shape) in named.items()
    }


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, NaN included."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@settings(max_examples=100, deadline=None)
@given(contents(), NOTES)
def test_what_comes_out_is_what_went_in_and_the_length_is_known_from_shapes(
    tensors: dict[str, Tensor], note: dict[str, Any]
) -> None:
    blob = dump(tensors, note)
    out, read = load(blob)
    assert read == note
    assert set(out) == set(tensors)
    assert all(same(tensor, out[name]) for name, tensor in tensors.items())
    assert size_bytes(tensors, note) == len(blob)
    assert size_bytes({name: tensor.to("meta") for name, tensor in tensors.items()}, note) == len(blob)


@settings(max_examples=50, deadline=None)
@given(contents(), NOTES, st.randoms(use_true_random=False))
def test_equal_contents_are_equal_bytes_in_any_order(
    tensors: dict[str, Tensor], note: dict[str, Any], dice: Any
) -> None:
    names, keys = list(tensors), list(note)
    dice.shuffle(names)
    dice.shuffle(keys)
    assert dump({n: tensors[n] for n in names}, {k: note[k] for k in keys}) == dump(tensors, note)


def test_memory_layout_and_sharing_leave_no_trace() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 2, 2)
    views = {"a": whole, "b": whole, "c": whole[:1], "d": whole.flatten()[3:9], "e": whole[:, :2], "f": whole.mT}
    apart = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    last = {
        name: view.contiguous(memory_format=torch.channels_last) if view.dim() == 4 else view
        for name, view in views.items()
    }
    assert dump(views, {}) == dump(apart, {}) == dump(last, {})
    assert size_bytes(views, {}) == len(dump(views, {}))


def test_reading_does_not_alter_what_was_written() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    out, _ = load(dump({"w": tensor}, {}))
    out["w"].add_(1)
    assert not out["w"].requires_grad
    assert tensor.tolist() == [0, 0, 0]


def test_every_cut_of_a_message_is_refused() -> None:
    blob = dump({"w": torch.arange(3.0), "count": torch.tensor(2)}, {"round": 1, "size": "0.25"})
    for length in range(len(blob)):
        with pytest.raises(CheckpointError, match="the file is damaged or was not written by anysize"):
            load(blob[:length], "the file", CheckpointError)
    with pytest.raises(TrustError, match="the message is damaged"):
        load(blob + b"\0")


@pytest.mark.parametrize(
    "blob",
    [
        safetensors.torch.save({"w": torch.ones(2)}),
        safetensors.torch.save({"w": torch.ones(2)}, {"format": "pt"}),
        safetensors.torch.save({}, {"anysize": "not json"}),
        safetensors.torch.save({}, {"anysize": "[1, 2]"}),
        safetensors.torch.save({}, {"anysize": "[" * 100_000}),
        b"\x80\x04\x95 a pickle",
        b"\xff" * 64,
        bytes(64),
        json.dumps({"w": 1}).encode(),
    ],
)
def test_what_is_not_ours_is_refused(blob: bytes) -> None:
    with pytest.raises(TrustError, match="was not written by anysize"):
        load(blob)


def test_a_flipped_byte_is_refused_or_read_as_a_message_of_the_same_form() -> None:
    blob = dump({"w": torch.arange(2.0)}, {"round": 1})
    refused = 0
    for place in range(len(blob)):
        for bit in (1, 16, 128):
            damaged = blob[:place] + bytes([blob[place] ^ bit]) + blob[place + 1 :]
            try:
                tensors, note = load(damaged)
            except TrustError:
                refused += 1
            else:
                assert isinstance(note, dict)
                assert sum(tensor.nbytes for tensor in tensors.values()) == 8
    assert refused > len(blob)


def test_a_number_that_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({}, {"loss": float("nan")})


# States


@dataclass(frozen=True)
class State:
    weights: dict[str, Any]
    scale: Tensor
    round: int


def test_a_state_survives_with_its_nesting_odd_names_and_empty_mappings() -> None:
    weights = {"a/b": torch.ones(2), "%2F": torch.zeros(1), "in": {"x.y": torch.ones(1), "none": {}}, "empty": {}}
    state = State(weights, torch.tensor(2.0), 7)
    again = restore(State, *load(dump(*flatten(state))))
    assert again.round == 7
    assert again.scale == 2
    assert set(again.weights) == set(weights)
    assert again.weights["in"].keys() == {"x.y", "none"}
    assert again.weights["in"]["none"] == again.weights["empty"] == {}
    assert torch.equal(again.weights["a/b"], torch.ones(2))
    assert torch.equal(again.weights["%2F"], torch.zeros(1))


def test_another_methods_state_is_refused_by_what_it_holds_and_lacks() -> None:
    @dataclass(frozen=True)
    class Other:
        basis: dict[str, Tensor]
        round: int

    tensors, note = flatten(Other({"w": torch.ones(1)}, 1))
    with pytest.raises(CheckpointError, match=r"holds basis.*lacks scale; lacks weights.*another method"):
        restore(State, tensors, note)


def test_a_tensor_in_place_of_a_mapping_is_refused() -> None:
    with pytest.raises(CheckpointError, match="weights/a should be a mapping"):
        restore(State, {"weights/a": torch.ones(1), "weights/a/b": torch.ones(1)}, {"round": 1})


def test_tensors_are_read_in_the_order_in_which_they_stand() -> None:
    blob = dump({f"layer{place}.weight": torch.ones(place + 1) for place in range(30)}, {})
    assert len({tuple(load(blob)[0]) for _ in range(8)}) == 1
