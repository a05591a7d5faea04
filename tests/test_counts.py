"""Parameters as they go over the wire, against the figures of the papers and of their authors' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anysize.data import Data
from anysize.methods import FLANC, Client, HeteroFL, Method, SHeteroFL, SplitMix
from anysize.methods.flanc import FLANCState
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment

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


# Multiply-adds of a training step, FLANC's by hand from the layers of the network

BATCH = 32


def resnet18_layers() -> list[tuple[int, int, int, int]]:
    """(inputs, outputs, kernel entries, output positions) of every convolution, the stem first."""
    layers, inputs = [(3, 64, 9, 32 * 32)], 64
    for outputs, positions in ((64, 32 * 32), (128, 16 * 16), (256, 8 * 8), (512, 4 * 4)):
        layers += [(inputs, outputs, 9, positions)] + [(outputs, outputs, 9, positions)] * 3
        if inputs != outputs:
            layers.append((inputs, outputs, 1, positions))  # the projection
        inputs = outputs
    return layers


def flanc_resnet18(width: float, execution: str) -> int:
    """Per sample: all three passes over each factor where a layer mixes, over the whole weight where it composes."""
    (_, stem, entries, positions), *layers = resnet18_layers()
    each = 2 * positions * int(stem * width) * 3 * entries  # the stem, of whose inputs nobody wants a gradient
    each += 3 * 10 * int(512 * width)  # the classifier
    per_batch = 0
    for full_inputs, full_outputs, entries, positions in layers:
        inputs, outputs = int(full_inputs * width), int(full_outputs * width)
        if entries == 1:
            each += 3 * positions * outputs * inputs
            continue
        r1, r2 = full_inputs // 8, full_outputs // 4
        fragments = inputs // r1
        per_batch += 3 * r2 * r2 * r1 * entries  # the Gram matrix of the basis
        mixes = r2 / outputs + r2 / (r1 * entries) <= 0.6 if execution == "auto" else execution == "mix"
        if mixes:
            each += 3 * positions * (fragments * r2 * r1 * entries + outputs * fragments * r2)
        else:
            each += 3 * positions * outputs * inputs * entries
            per_batch += 3 * outputs * fragments * r2 * r1 * entries
    return (BATCH * each + per_batch) // BATCH


@pytest.fixture(scope="module")
def composed_resnet(resnet: Experiment) -> FLANCState:
    return FLANC().init(resnet.context)


@pytest.mark.parametrize("execution", ["auto", "compose", "mix"])
def test_training_the_composed_resnet_multiplies_what_is_counted_by_hand(
    resnet: Experiment, composed_resnet: FLANCState, execution: Any
) -> None:
    for width in (0.25, 1.0):
        found = resnet.cost(Size(width), state=composed_resnet, method=FLANC(execution=execution))
        assert found.training_macs == flanc_resnet18(width, execution)


def test_training_the_full_composed_resnet_multiplies_less_than_the_dense_one(
    resnet: Experiment, composed_resnet: FLANCState
) -> None:
    (inputs, stem, entries, positions), *layers = resnet18_layers()
    inner = sum(positions * outputs * inputs * entries for inputs, outputs, entries, positions in layers)
    dense = resnet.cost(Size(1.0)).training_macs
    assert dense == 2 * positions * stem * inputs * entries + 3 * (inner + 10 * 512)
    assert resnet.cost(Size(1.0), state=composed_resnet, method=FLANC()).training_macs < 0.7 * dense


@pytest.mark.parametrize("execution", ["compose", "mix"])
def test_training_the_composed_char_lstm_multiplies_what_is_counted_by_hand(
    characters: Experiment, execution: Any
) -> None:
    steps, vocabulary = 5, 30
    for width in WIDTHS:
        e, h = int(16 * width), int(64 * width)
        # From the inputs and from the state; weights (4 h, inputs) of R1 inputs and floor(15 / 16 R1) vectors.
        each, per_batch = 3 * steps * vocabulary * h, 0
        for inputs, r1, from_state in ((e, 2, False), (h, 8, True), (h, 8, False), (h, 8, True)):
            r2 = 15 * r1 // 16
            each += 2 * steps * 4 * h * inputs + (steps - from_state) * 4 * h * inputs
            per_batch += 3 * (4 * h * (inputs // r1) * r2 * r1 + r2 * r2 * r1)
        found = characters.cost(Size(width), method=FLANC(execution=execution)).training_macs
        assert found == (BATCH * each + per_batch) // BATCH
