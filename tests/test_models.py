"""Networks: parameter counts of the papers, any input size, the registry's errors."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from anysize.errors import ConfigError, ModelError
from anysize.models import Normalize, build, models, normalized

IMAGE_MODELS = [
    "mlp",
    "small-cnn",
    "flanc-cnn",
    "digits-cnn",
    "femnist-cnn",
    "vgg11",
    "resnet14",
    "resnet20",
    "resnet32",
]
WIDE_MODELS = ["resnet18", "preresnet18"]


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("flanc-cnn", (1, 28, 28), 284_554),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("preresnet18", (3, 32, 32), 11_172_170),
        ("resnet14", (3, 32, 32), 175_258),
        ("resnet20", (3, 32, 32), 272_474),
        ("resnet32", (3, 32, 32), 466_906),
        ("digits-cnn", (3, 28, 28), 14_219_210),
        # The convolutions of VGG-11 have 9,220,480 parameters, 2,752 of them biases, which here are the norms'.
        ("vgg11", (3, 32, 32), 9_220_480 - 2_752 + 2 * 2_752 + 5_130),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name, shape, expected):
    with torch.device("meta"):
        assert parameters(build(name, shape, 10)) == expected


def test_the_small_transformer_has_the_parameters_of_deit_tiny():
    width, hidden, patches, blocks = 192, 768, 64, 12
    block = 4 * width * (width + 1) + hidden * (width + 1) + width * (hidden + 1) + 4 * width
    embedding = width * (3 * 16 + 1) + width + (patches + 1) * width
    with torch.device("meta"):
        net = build("vit-tiny", (3, 32, 32), 10)
    assert parameters(net) == embedding + blocks * block + 2 * width + 10 * (width + 1)


def test_the_small_transformer_says_what_does_not_fit():
    with pytest.raises(ModelError, match=r"patches of 5 x 5 do not fill.*; width 10 is not a multiple of 3 heads"):
        build("vit-tiny", (3, 32, 32), 10, {"patch": 5, "width": 10})


@pytest.mark.parametrize("p, expected", [(0.25, 43_978), (0.5, 105_738), (0.75, 185_930), (1.0, 284_554)])
def test_flanc_cnn_with_its_stem_kept_has_the_published_count_at_every_width(p, expected):
    net = build("flanc-cnn", (1, 28, 28), 10)
    kept = {"stem.weight": (1, 1), "stem.bias": (1,), "conv1.weight": (p, 1), "conv2.weight": (p, p)}
    kept |= {"head.weight": (1, p), "head.bias": (1,)}
    shapes = {name: tensor.shape for name, tensor in net.named_parameters()}
    assert set(shapes) == set(kept)
    counts = [np.prod(shape) * np.prod(kept[name]) for name, shape in shapes.items()]
    assert sum(counts) == expected


def test_an_eighth_of_preresnet18_has_the_published_count():
    with torch.device("meta"):
        assert parameters(build("preresnet18", (3, 32, 32), 10, {"channels": [8, 16, 32, 64]})) == 176_178


def test_resnet18_for_a_hundred_classes_has_the_published_count():
    with torch.device("meta"):
        assert parameters(build("resnet18", (3, 32, 32), 100)) == 11_220_132


@pytest.mark.parametrize("name", IMAGE_MODELS + WIDE_MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 33, 20)])
def test_every_image_network_takes_any_channels_and_sizes_from_eight(name, shape):
    options = {"channels": [8, 8, 16, 16]} if name in WIDE_MODELS else {}
    net = build(name, shape, 7, options)
    out = net(torch.rand(2, *shape))
    assert out.shape == (2, 7)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_char_lstm_gives_logits_at_every_position_that_depend_on_the_past_only():
    net = build("char-lstm", (20,), 30, {"hidden": 16}).eval()
    tokens = torch.randint(30, (3, 20), generator=torch.Generator().manual_seed(0))
    out = net(tokens)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 30
    assert out.shape == (3, 20, 30)
    assert net(tokens[:, :5]).shape == (3, 5, 30)
    torch.testing.assert_close(net(changed)[:, :10], out[:, :10])
    assert not torch.allclose(net(changed)[:, 10:], out[:, 10:])


def test_char_lstm_has_the_parameters_of_its_layers():
    embedding, hidden, vocabulary = 8, 256, 74
    first = 4 * hidden * (embedding + hidden + 2)
    second = 4 * hidden * (hidden + hidden + 2)
    expected = vocabulary * embedding + first + second + vocabulary * (hidden + 1)
    assert parameters(build("char-lstm", (80,), vocabulary)) == expected


def test_text_lstm_classifies_a_whole_text():
    net = build("text-lstm", (50,), 2, {"vocabulary": 100, "hidden": 8})
    assert net(torch.randint(100, (4, 50))).shape == (4, 2)
    assert net(torch.randint(100, (4, 12))).shape == (4, 2)


def test_small_cnn_halves_the_image_right_after_its_first_convolution():
    net = build("small-cnn", (1, 28, 28), 10)
    seen = []
    net.conv2.register_forward_hook(lambda layer, given, out: seen.append(tuple(out.shape)))
    net(torch.rand(2, 1, 28, 28))
    assert seen == [(2, 64, 14, 14)]


def test_a_residual_block_adds_its_input_to_its_convolutions():
    net = build("resnet14", (3, 16, 16), 10)
    block = net.stage1[1].eval()
    x = torch.rand(2, 16, 16, 16)
    conv = torch.nn.functional.conv2d
    inner = torch.relu(block.norm1(conv(x, block.conv1.weight, padding=1)))
    expected = torch.relu(x + block.norm2(conv(inner, block.conv2.weight, padding=1)))
    torch.testing.assert_close(block(x), expected)


def test_a_projecting_pre_activation_block_projects_the_activated_input():
    net = build("preresnet18", (3, 16, 16), 10, {"channels": [4, 8, 8, 8]})
    block = net.stage2[0].eval()
    x = torch.randn(2, 4, 16, 16)
    conv = torch.nn.functional.conv2d
    active = torch.relu(block.norm1(x))
    inner = torch.relu(block.norm2(conv(active, block.conv1.weight, stride=2, padding=1)))
    expected = conv(inner, block.conv2.weight, padding=1) + conv(active, block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), expected)
    plain = net.stage2[1].eval()
    for weight in (plain.conv1.weight, plain.conv2.weight):
        torch.nn.init.zeros_(weight)
    y = torch.randn(2, 8, 8, 8)
    assert torch.equal(plain(y), y)


def test_weights_follow_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (build("mlp", (4,), 3, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_every_network_has_a_summary_and_the_list_is_sorted():
    names = [name for name, _ in models()]
    assert names == sorted(names)
    assert {*IMAGE_MODELS, *WIDE_MODELS, "char-lstm"} <= set(names)
    assert all(summary.endswith(".") for _, summary in models())


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_networks")
    monkeypatch.setitem(sys.modules, "own_networks", module)
    return module


def test_the_users_function_gets_shape_and_classes_only_if_it_asks(own_module):
    own_module.plain = lambda hidden=3: nn.Linear(2, hidden)
    own_module.shaped = lambda input_shape, classes, bias=True: nn.Linear(input_shape[0], classes, bias=bias)
    assert build("own_networks:plain", (2,), 9, {"hidden": 5}).out_features == 5
    shaped = build("own_networks:shaped", (4,), 9, {"bias": False})
    assert (shaped.in_features, shaped.out_features, shaped.bias) == (4, 9, None)


def test_what_the_users_function_returns_must_be_a_module(own_module):
    own_module.wrong = lambda: 3
    with pytest.raises(ModelError, match=r"returned a int; it must return an nn\.Module"):
        build("own_networks:wrong", (2,), 2)


@pytest.mark.parametrize(
    "error, match, name, shape, options",
    [
        (ConfigError, "did you mean 'resnet18'", "resnet19", (3, 32, 32), {}),
        (ConfigError, "has no 'nothing'", "math:nothing", (3, 32, 32), {}),
        (ModelError, "did you mean 'hidden'.*Known: hidden", "mlp", (4,), {"hiden": [3]}),
        (ModelError, "hidden is .*at least 1", "mlp", (4,), {"hidden": [0]}),
        (ModelError, "at least 8 x 8.*not \\(1, 4, 4\\)", "small-cnn", (1, 4, 4), {}),
        (ModelError, "takes images", "resnet18", (80,), {}),
        (ModelError, "takes token sequences", "char-lstm", (1, 28, 28), {}),
        (ModelError, "halve a 8 x 8 image to nothing", "resnet18", (1, 8, 8), {"channels": [2] * 5}),
    ],
)
def test_bad_input_is_refused_with_the_way_out(error, match, name, shape, options):
    with pytest.raises(error, match=match):
        build(name, shape, 10, options)


def test_normalize_is_the_first_layer_and_no_part_of_the_state():
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    net = normalized(nn.Flatten(), mean, std)
    x = torch.rand(2, 3, 4, 4)
    expected = (x.numpy() - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    np.testing.assert_allclose(net(x).numpy(), expected.reshape(2, -1), rtol=1e-5, atol=1e-6)
    assert net.state_dict() == {}
    assert [name for name, _ in net.named_children()] == ["normalize", "network"]


def test_without_statistics_the_first_layer_is_the_identity():
    x = torch.rand(2, 3)
    assert torch.equal(normalized(nn.Identity(), None, None)(x), x)


def test_normalize_refuses_a_deviation_of_zero():
    with pytest.raises(ModelError, match="each std above 0"):
        Normalize([0.5], [0.0])
