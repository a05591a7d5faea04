"""Parameters as they go over the wire, against the figures of the papers and of their authors' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anysize.context import Size
from anysize.data import Data
from anysize.experiment import Experiment
from anysize.methods import FLANC, Client, HeteroFL, Method, SHeteroFL, SplitMix

WIDTHS = [0.25, 0.5, 0.75, 1.0]


def experiment(model: Any, method: Any, shape: tuple[int, ...], **more: Any) -> Experiment:
    x = torch.zeros(8, *shape, dtype=torch.uint8)
    return Experiment(
        data=Data(train=(x, torch.arange(8) % 10), classes=10),
        clients=4,
        model=model,
        method=method,
        devices={"capacities": WIDTHS},
        **more,
    )


def sent(made: Experiment, method: Method[Any] | None = None) -> list[int]:
    """Parameters in the message to a client of each width: no running statistics, no constants."""
    context, method = made.context, method or made.method
    state = method.init(context)
    counts = []
    for width in WIDTHS:
        message = method.extract(context, state, Client(0, 0, Size(width), 1, 1, 0))
        trained = dict(method.build(context, message).named_parameters())
        assert set(trained) <= set(message.tensors)
        counts.append(sum(message.tensors[name].numel() for name in trained))
    return counts


def test_the_dense_cnn_has_the_authors_counts() -> None:
    made = experiment("flanc-cnn", "heterofl", (1, 28, 28), keep=["stem"])
    assert sent(made) == [43_978, 105_738, 185_930, 284_554]
    assert made.cost(Size(0.5)).parameters == 105_738


def test_the_composed_cnn_has_the_authors_counts() -> None:
    made = experiment("flanc-cnn", "flanc", (1, 28, 28), keep=["stem"])
    assert sent(made) == [33_482, 63_498, 97_610, 135_818]
    assert made.cost(Size(0.5)).parameters == 63_498
    basis = made.method.init(made.context).basis
    assert sorted(tuple(tensor.shape) for tensor in basis.values()) == [(32, 8, 3, 3), (32, 16, 3, 3)]


@pytest.fixture(scope="module")
def resnet() -> Experiment:
    return experiment("resnet18", "heterofl", (3, 32, 32))


def test_the_dense_resnet_has_the_authors_counts(resnet: Experiment) -> None:
    counts = sent(resnet)
    assert counts[3] == 11_173_962
    assert counts[:3] == pytest.approx([710_826, 2_809_866, 6_298_986], rel=0.02)


def test_the_composed_resnet_has_the_authors_counts(resnet: Experiment) -> None:
    # Both convolutions of a stage's first block have an R1 that follows the stage before it: half of this one's.
    layers = {"stage[234].0.conv2": {"basis_inputs": 0.0625}}
    counts = sent(resnet, FLANC(layers=layers))
    assert counts == pytest.approx([530_858, 1_219_594, 2_362_986, 3_956_810], rel=0.03)


@pytest.fixture(scope="module")
def characters() -> Experiment:
    tokens = torch.arange(8 * 6).reshape(8, 6) % 30
    return Experiment(
        data=Data(train=(tokens[:, :-1].clone(), tokens[:, 1:].clone()), classes=30),
        clients=4,
        model={"name": "char-lstm", "options": {"embedding": 16, "hidden": 64, "layers": 2}},
        method="flanc",
        task="next-token",
        devices={"capacities": WIDTHS},
    )


def test_recurrent_weights_are_composed_of_a_small_basis(characters: Experiment) -> None:
    state = characters.method.init(characters.context)
    recurrent = [name for name in state.basis if "weight_hh" in name]
    assert len(recurrent) == 2
    for name in recurrent:
        assert state.basis[name].shape == (7, 8)  # R1 = 64 / 8; R2 = floor(15 / 16 * 8)
        for width in WIDTHS:
            hidden = int(64 * width)
            assert state.coefficients[repr(width)][name].shape == (4 * hidden, hidden // 8, 7)


def test_the_composed_char_lstm_is_smaller_than_the_dense_one_and_grows_with_the_width(characters: Experiment) -> None:
    composed = sent(characters)
    dense = []
    for width in WIDTHS:
        e, h = int(16 * width), int(64 * width)
        dense.append(30 * e + 4 * h * (e + h + 2) + 4 * h * (h + h + 2) + 30 * (h + 1))
    assert composed == sorted(composed)
    assert all(small < large for small, large in zip(composed, dense))
    assert sent(characters, HeteroFL()) == dense


# Split-Mix, Table 1: parameters as its authors' code counts them; MACs in the paper are a tenth of these.
TABLE_1 = {
    "preresnet18": ((3, 32, 32), [176_178, 701_018, 2_796_714, 11_172_170], [8.9, 35.0, 139, 555]),
    "digits-cnn": ((3, 28, 28), [224_194, 892_154, 3_559_402, 14_219_210], [1.16, 3.7, 12.9, 47.8]),
    "alexnet": ((3, 256, 256), [901_714, 3_583_770, 14_288_938, 57_063_498], [24.5, 75, 254, 923]),
}


@pytest.mark.parametrize(
    "name", ["digits-cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("preresnet18", "alexnet"))]
)
def test_split_mix_and_its_baseline_have_the_authors_counts(name: str) -> None:
    shape, parameters, macs = TABLE_1[name]
    widths = [0.125, 0.25, 0.5, 1.0]
    x = torch.zeros(8, *shape, dtype=torch.uint8)
    made = Experiment(
        data=Data(train=(x, torch.arange(8) % 10), classes=10),
        clients=4,
        model=name,
        method=SHeteroFL(),
        devices={"capacities": widths},
        training={"batch_size": 2},
    )
    whole = [made.cost(Size(width)) for width in widths]
    assert [cost.parameters for cost in whole] == parameters
    assert [cost.macs / 1e6 for cost in whole] == pytest.approx(macs, rel=0.02)
    mixed = [made.cost(Size(width), method=SplitMix()) for width in widths]
    assert [cost.parameters for cost in mixed] == [count * parameters[0] for count in (1, 2, 4, 8)]
    assert [cost.macs for cost in mixed] == [count * mixed[0].macs for count in (1, 2, 4, 8)]
