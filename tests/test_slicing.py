"""Narrowed networks run, are really smaller, and compute what the full network does with dropped units silenced."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anysize.elastic.axes import Axes, trace
from anysize.elastic.skeleton import copied
from anysize.elastic.slicing import narrow, scatter_, take
from anysize.elastic.tracing.forward import meta_copy
from anysize.errors import ModelError
from topologies import TOPOLOGIES, SeparateAttention, conv

CLASS_AXIS = {"unet": 1, "generator": 1}


def prepared(name: str, heads: str = "within") -> tuple[nn.Module, tuple[Tensor, ...], Axes]:
    module, example = TOPOLOGIES[name]()
    axes = trace(module, example, heads=heads, class_axis=CLASS_AXIS.get(name, -1))  # type: ignore[arg-type]
    return module.eval(), example, axes


def dropped(axes: Axes, group: str, width: float) -> set[int]:
    found = axes.group(group)
    return set(range(found.size)) - set(axes.kept(width).units(group))


@pytest.mark.parametrize("heads", ["within", "whole"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_narrows_to_smaller_tensors_and_the_same_output_shape(name: str, heads: str) -> None:
    module, example, axes = prepared(name, heads)
    full = module(*example)
    for width in (1.0, 0.75, 0.5):
        small = narrow(module, axes, width).eval()
        kept = axes.kept(width)
        assert {n: tuple(t.shape) for n, t in small.state_dict().items()} == {
            n: axes.shape(n, kept) for n in axes.shapes
        }
        assert small(*example).shape == full.shape
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_full_width_is_the_network_itself(name: str) -> None:
    module, example, axes = prepared(name)
    same = narrow(module, axes, 1.0).eval()
    for key, tensor in module.state_dict().items():
        assert torch.equal(same.state_dict()[key], tensor)
        assert tensor.numel() < 2 or same.state_dict()[key].data_ptr() != tensor.data_ptr()
    assert torch.equal(same(*example), module(*example))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from([name for name in TOPOLOGIES if name != "lstm_projected"]))
def test_any_choice_of_units_gives_a_network_that_runs(data: st.DataObject, name: str) -> None:
    module, example, axes = prepared(name, data.draw(st.sampled_from(["within", "whole"])))
    width = {
        group.name: data.draw(st.lists(st.integers(0, group.size - 1), min_size=1, unique=True))
        for group in axes.groups
    }
    small = narrow(module, axes, width).eval()
    assert small(*example).shape == module(*example).shape
    for key, tensor in small.state_dict().items():
        index = axes.index(key, axes.kept(width))
        rows = [np.arange(n) if own is None else own.numpy() for n, own in zip(module.state_dict()[key].shape, index)]
        full = module.state_dict()[key].numpy()
        assert np.array_equal(tensor.numpy(), full[np.ix_(*rows)] if rows else full)


@pytest.mark.parametrize("units", [[1], [3, 2], [0, 3]])
def test_pixels_stay_whichever_channels_do(units: list[int]) -> None:
    module, example, axes = prepared("generator")
    small = narrow(module, axes, {axes.groups[0].name: units})
    assert small[1].unflattened_size == (2 * len(units), 2, 2)
    assert small(*example).shape == module(*example).shape


# --- the oracle: silenced units of the full network

READS = {nn.Linear: 1, nn.Conv2d: 1, nn.Conv1d: 1, nn.ConvTranspose2d: 0}


def silence(module: nn.Module, axes: Axes, width: float) -> None:
    """Zero, in every layer that reads them, the entries of units that are not kept."""
    layers = dict(module.named_modules())
    for group in axes.groups:
        gone = dropped(axes, group.name, width)
        for member in group.members:
            owner, _, kind = member.name.rpartition(".")
            if kind != "weight" or READS.get(type(layers[owner])) != member.axis:
                continue
            rows = [place for place, unit in enumerate(member.units) if unit in gone]
            with torch.no_grad():
                module.get_parameter(member.name).index_fill_(member.axis, torch.tensor(rows, dtype=torch.long), 0.0)


@pytest.mark.parametrize("width", [0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    "name",
    [
        "chain", "residual", "concat", "concat_residual", "flatten_into_linear", "grouped_wide", "depthwise",
        "depthwise_multiplier", "batch_norm", "tied_embedding", "squeeze_excite", "channel_shuffle",
        "channel_shuffle_layer", "unet", "gated", "unequal_split", "attribute_slice", "one_dimensional",
        "three_dimensional", "instance_norm", "padded_shortcut", "masked_positions", "experts", "from_settings",
        "written_parts", "overlapping", "unpooled", "trained_mask",
    ],
)  # fmt: skip
def test_the_narrowed_network_is_the_full_one_with_dropped_units_silenced(name: str, width: float) -> None:
    module, example, axes = prepared(name)
    small = narrow(module, axes, width).eval()
    silence(module, axes, width)
    torch.testing.assert_close(small(*example), module(*example), rtol=1e-4, atol=1e-5)


def test_many_groups_of_a_convolution_silence_whole() -> None:
    module, example, axes = prepared("grouped_many")
    small = narrow(module, axes, 0.5).eval()
    with torch.no_grad():
        module[2].weight[:, 8:] = 0
        module[2].weight[2:] = 0
        module[2].bias[2:] = 0
    torch.testing.assert_close(small(*example), module(*example))
    assert small[1].groups == 4


def test_dropping_whole_heads_silences_them() -> None:
    torch.manual_seed(0)
    module, example = SeparateAttention().eval(), torch.randn(2, 6, 16)
    axes = trace(module, example, heads="whole")
    small = narrow(module, axes, {"q": 1})
    with torch.no_grad():
        module.proj.weight[:, 8:] = 0
    assert small.num_heads == 1
    torch.testing.assert_close(small(example), module(example))


def test_dropping_whole_heads_of_torch_attention_matches_attention_written_out() -> None:
    module, example, axes = prepared("multihead_attention", "whole")
    small = narrow(module, axes, 0.5)
    memory, attend = small.memory(*example), small.attend
    projected = F.linear(torch.stack([small.into(*example), memory, memory]), attend.in_proj_weight)
    q, k, v = (
        (projected[part, :, :, 8 * part : 8 * part + 8] + attend.in_proj_bias[8 * part : 8 * part + 8])
        .unflatten(-1, (2, 4))
        .transpose(1, 2)
        for part in range(3)
    )
    mixed = (q @ k.mT / 2.0).softmax(-1) @ v
    expected = small.out(attend.out_proj(mixed.transpose(1, 2).flatten(2)))
    assert (attend.num_heads, attend.embed_dim, attend.head_dim) == (2, 8, 4)
    torch.testing.assert_close(small(*example), expected)


@pytest.mark.parametrize("name", ["rnn", "gru_two_layers", "lstm_bidirectional", "gru_cell", "lstm_cell"])
def test_dropped_hidden_units_are_silenced_in_every_layer_and_direction(name: str) -> None:
    module, example, axes = prepared(name)
    group = "cell" if name.endswith("cell") else "rnn"
    kept = [1, 2, 6]
    small = narrow(module, axes, {group: kept}).eval()
    gone = [unit for unit in range(8) if unit not in kept]
    with torch.no_grad():
        for key, tensor in module.named_parameters():
            reads_hidden = "weight_hh" in key or "weight_ih_l1" in key or key == "out.weight"
            for unit in gone if reads_hidden else []:
                tensor[:, unit::8] = 0
    torch.testing.assert_close(small(*example), module(*example))


def test_projected_lstms_silence_hidden_and_projected_units() -> None:
    module, example, axes = prepared("lstm_projected")
    hidden, projected = (next(g.name for g in axes.groups if g.size == size) for size in (8, 4))
    small = narrow(module, axes, {hidden: [0, 3, 7], projected: [1, 2]}).eval()
    with torch.no_grad():
        for key, tensor in module.named_parameters():
            if "weight_hr" in key:
                tensor[:, [1, 2, 4, 5, 6]] = 0
            if "weight_hh" in key or "weight_ih_l1" in key or key == "out.weight":
                tensor[:, 0::4] = 0
                tensor[:, 3::4] = 0
    assert (small.rnn.hidden_size, small.rnn.proj_size) == (3, 2)
    torch.testing.assert_close(small(*example), module(*example))


# --- what a narrowed module is


@pytest.mark.parametrize(
    "name, path, expected",
    [
        ("grouped_wide", "1", {"groups": 2, "in_channels": 8, "out_channels": 12}),
        ("depthwise", "3", {"groups": 4, "in_channels": 4, "out_channels": 4}),
        ("group_norm", "1", {"num_groups": 2, "num_channels": 8}),
        ("group_norm", "3", {"num_groups": 2, "num_channels": 8}),
        ("group_norm_many_groups", "1", {"num_groups": 4, "num_channels": 8}),
        ("layer_norm", "2", {"normalized_shape": (4,)}),
        ("batch_norm_without_statistics", "2", {"num_features": 4}),
        ("channel_shuffle_layer", "3", {"num_parameters": 2}),
        ("generator", "1", {"unflattened_size": (4, 2, 2)}),
        ("generator", "2", {"groups": 2, "in_channels": 4, "out_channels": 6}),
        ("lstm_bidirectional", "rnn", {"hidden_size": 4, "input_size": 3}),
        ("gru_cell", "cell", {"hidden_size": 4, "input_size": 3}),
        ("multihead_attention_separate", "attend", {"embed_dim": 8, "kdim": 6, "vdim": 6, "num_heads": 4}),
        ("tied_embedding", "encoder", {"num_embeddings": 11, "embedding_dim": 4}),
    ],
)
def test_layers_store_their_new_sizes(name: str, path: str, expected: dict[str, object]) -> None:
    module, _, axes = prepared(name)
    layer = narrow(module, axes, 0.5).get_submodule(path)
    assert {key: getattr(layer, key) for key in expected} == expected


def test_tied_tensors_stay_tied_and_frozen_ones_frozen() -> None:
    module, _, axes = prepared("tied_embedding")
    module.mix.weight.requires_grad_(False)
    small = narrow(module, axes, 0.5)
    assert small.encoder.weight is small.decoder.weight
    assert [p.requires_grad for p in small.mix.parameters()] == [False, True]


@pytest.mark.parametrize("name", ["lstm_bidirectional", "depthwise", "vit_fused", "weight_norm"])
def test_a_narrowed_network_trains(name: str) -> None:
    module, example, axes = prepared(name)
    small = narrow(module, axes, 0.5).train()
    small(*example).square().mean().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    assert all(p.grad is None for p in module.parameters())


def test_meta_modules_stay_meta() -> None:
    module, _, axes = prepared("vit_fused")
    small = narrow(meta_copy(module), axes, 0.5)
    assert all(tensor.is_meta for tensor in small.state_dict().values())
    assert {n: t.shape for n, t in small.state_dict().items()} == {
        n: t.shape for n, t in narrow(module, axes, 0.5).state_dict().items()
    }


class Distances(nn.Module):
    """Adds distances between positions to the channels, a table that the first forward makes and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 2)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.table is None:
            self.register_buffer("table", torch.arange(hidden.shape[-1], dtype=x.dtype) * 0 + 1.0, persistent=False)
        return self.down(hidden + self.table)


def test_a_table_that_the_forward_keeps_after_the_trace_is_made_again() -> None:
    network, example = Distances(), torch.randn(4, 3)
    axes = trace(network, example)
    network(example)
    small = narrow(network, axes, 0.5)
    assert dict(small.named_buffers()) == {}
    kept = list(axes.kept(0.5).units(axes.groups[0].name))
    hidden = F.linear(example, network.up.weight[kept], network.up.bias[kept]) + 1
    expected = F.linear(hidden, network.down.weight[:, kept], network.down.bias)
    assert len(kept) == 4
    torch.testing.assert_close(small(example), expected)


def test_a_narrowed_network_runs_without_this_package(tmp_path: object) -> None:
    module, _, axes = prepared("lstm_bidirectional")
    torch.save(narrow(module, axes, 0.5).rnn, f"{tmp_path}/net.pt")
    code = (
        "import sys, torch; torch.load(sys.argv[1], weights_only=False)(torch.zeros(2, 5, 3));"
        "assert not any(name.startswith('anysize') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, f"{tmp_path}/net.pt"], check=True)


# --- refusals


class Constant(nn.Module):
    """Sizes of labelled axes written as numbers, in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.fc, self.part = conv(3, 8), nn.Linear(8 * 16, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.way == "view":
            return self.fc(x.view(-1, 8 * 16))
        return self.part(x[:, :4].mean((2, 3)))


@pytest.mark.parametrize("way", ["view", "slice"])
def test_sizes_written_as_numbers_are_refused_with_line_and_way_out(way: str) -> None:
    module, example = nn.Sequential(Constant(way)), torch.zeros(2, 3, 4, 4)
    axes = trace(module, example)
    assert torch.equal(narrow(module, axes, 1.0)(example), module(example))
    with pytest.raises(ModelError, match=r"0(\.part)? \(.*test_slicing.py:\d+\).*keep="):
        narrow(module, axes, 0.25)
    kept = trace(module, example, keep=["stem"])
    assert narrow(module, kept, 0.25)(example).shape == (2, 3)


def test_a_constant_stride_that_still_fits_but_reads_other_units_is_refused() -> None:
    class EverySecond(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.fc = nn.Linear(3, 8), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.stem(x)[:, ::2])

    module, example = EverySecond(), torch.zeros(2, 3)
    axes = trace(module, example)
    read, unread = (group.name for group in axes.groups)
    assert narrow(module, axes, {read: 2, unread: 2}, verify=True)(example).shape == (2, 2)
    # Units 0 2 4 | 5 7 stay: every second of them is 0 4 7, as many as the layer expects, but not its own.
    with pytest.raises(ModelError, match="would combine units that the full network keeps apart"):
        narrow(module, axes, {read: [0, 1, 2], unread: [2, 3]})


def test_a_projection_as_wide_as_the_hidden_state_is_refused_in_words() -> None:
    module, _, axes = prepared("lstm_projected")
    with pytest.raises(ModelError, match="'rnn' would have 1 hidden and 1 projected"):
        narrow(module, axes, 0.1)


# --- moving tensors between sizes


def test_take_agrees_with_numpy_and_never_shares_memory() -> None:
    full = torch.arange(60.0).reshape(3, 4, 5)
    for index in (
        (None, None, None),
        (torch.tensor([0, 1]), None, None),
        (torch.tensor([0, 2]), torch.tensor([1, 2, 3]), torch.tensor([0, 4])),
        (torch.tensor([2, 0]), None, torch.tensor([1, 0, 2, 3])),
    ):
        rows = [np.arange(n) if own is None else own.numpy() for n, own in zip(full.shape, index)]
        taken = take(full, index)
        assert np.array_equal(taken.numpy(), full.numpy()[np.ix_(*rows)])
        assert taken.is_contiguous()
        assert taken.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


index_sets = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.just(size), st.none() | st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted)
    )
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(index_sets, min_size=1, max_size=4))
def test_scatter_writes_exactly_the_kept_entries(
    parts: list[tuple[int, list[int] | None]],
) -> None:
    shape = tuple(size for size, _ in parts)
    index = tuple(None if rows is None else torch.tensor(rows) for _, rows in parts)
    mesh = np.ix_(*[np.arange(size) if rows is None else np.array(rows) for size, rows in parts])
    start = torch.arange(float(np.prod(shape))).reshape(shape)
    source = -torch.ones_like(take(start, index)).cumsum(0)

    target, expected = start.clone(), start.numpy().copy()
    scatter_(target, index, source)
    expected[mesh] = source.numpy()
    assert np.array_equal(target.numpy(), expected)
    assert torch.equal(take(target, index), source)


@pytest.mark.parametrize("columns", [None, torch.tensor([0, 1])])
def test_one_row_of_every_head_is_taken_as_a_copy(columns: Tensor | None) -> None:
    full = torch.arange(24.0).reshape(6, 4)
    taken = take(full, (torch.tensor([0, 3]), columns))
    assert taken.equal(full[[0, 3]] if columns is None else full[[0, 3]][:, :2])
    assert taken.is_contiguous()
    taken.zero_()
    assert full.equal(torch.arange(24.0).reshape(6, 4))


def test_scatter_refuses_what_would_broadcast() -> None:
    with pytest.raises(ModelError, match=r"\(1, 2\) does not fit the \(3, 2\)"):
        scatter_(torch.zeros(3, 4), (None, torch.tensor([0, 1])), torch.ones(1, 2))


def test_a_fast_copy_equals_a_deep_copy_and_shares_what_that_shares() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.LSTM(3, 3)
            self.tied, self.again = self.first.weight, self.first
            self.notes: dict[str, list[int]] = {"a": [1]}
            self.empty: dict[str, int] = {}
            self.register_buffer("seen", torch.ones(2))

    def facts(module: Own) -> list[object]:
        shared = (module.tied is module.first.weight, module.again is module.first)
        return [str(module), list(module.state_dict()), shared, module.notes, module.training, sorted(vars(module))]

    net = Own().eval()
    net.first._forward_hooks[1] = print
    ours, theirs = copied(net), copy.deepcopy(net)
    assert facts(ours) == facts(theirs) == facts(net)
    assert all(own.equal(old) and own is not old for own, old in zip(ours.parameters(), net.parameters()))
    assert ours.notes["a"] is not net.notes["a"]
    assert ours.empty is not net.empty
    assert dict(ours.first._forward_hooks) == {1: print}
    ours.first.register_forward_hook(lambda *_: None)
    assert len(net.first._forward_hooks) == 1


def test_a_width_is_checked_once_and_the_traced_network_itself_not_again() -> None:
    passes = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            passes.append(1)
            return self.second(self.first(x))

    module = Counted()
    axes = trace(module, torch.zeros(2, 3))
    traced = len(passes)
    narrow(module, axes, 1.0)
    assert len(passes) == traced
    narrow(module, axes, 0.5)
    narrow(module, axes, 0.5)
    assert len(passes) == traced + 1
