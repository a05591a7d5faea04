"""Which units are coupled, one topology at a time; sizes are those of `topologies`."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anysize.elastic.axes import Axes, Kept, trace
from anysize.elastic.slicing import narrow
from anysize.errors import ModelError
from topologies import TOPOLOGIES, CellLoop, FusedAttention, conv


def traced(name: str, **options: object) -> Axes:
    module, example = TOPOLOGIES[name]()
    return trace(module, example, **options)  # type: ignore[arg-type]


def sizes(axes: Axes) -> dict[str, int]:
    return {group.name: group.size for group in axes.groups}


def members(axes: Axes, group: str) -> set[tuple[str, int]]:
    return {(member.name, member.axis) for member in axes.group(group).members}


def test_a_chain_has_one_group_per_hidden_layer() -> None:
    axes = traced("chain")
    assert sizes(axes) == {"0": 8, "2": 6}
    assert members(axes, "0") == {("0.weight", 0), ("0.bias", 0), ("2.weight", 1)}


def test_residual_sums_share_one_group() -> None:
    axes = traced("residual")
    assert sizes(axes) == {"stem": 8, "first": 6}
    expected = {("stem.weight", 0), ("stem.bias", 0), ("second.weight", 0), ("second.bias", 0)}
    assert members(axes, "stem") == expected | {("first.weight", 1), ("fc.weight", 1)}


def test_concatenated_layers_keep_groups_of_their_own() -> None:
    axes = traced("concat")
    assert sizes(axes) == {"left": 8, "right": 4, "both": 12}
    left = next(m for m in axes.group("left").members if m.name == "both.weight")
    right = next(m for m in axes.group("right").members if m.name == "both.weight")
    assert left.units == (*range(8), *[-1] * 4)
    assert right.units == (*[-1] * 8, *range(4))


def test_a_residual_sum_over_a_concatenation_splits_into_the_concatenated_groups() -> None:
    axes = traced("concat_residual")
    assert sizes(axes) == {"left": 8, "right": 4}
    assert axes.index("both.weight", axes.kept(0.5))[0].tolist() == [0, 1, 2, 3, 8, 9]  # type: ignore[union-attr]


def test_flattening_repeats_each_channel_over_its_pixels() -> None:
    axes = traced("flatten_into_linear")
    member = next(m for m in axes.group("0").members if m.name == "4.weight")
    assert member.units == tuple(channel for channel in range(8) for _ in range(9))
    assert member.times == 9


def test_few_groups_of_a_convolution_stay_and_their_channels_shrink() -> None:
    axes = traced("grouped_wide")
    assert sizes(axes) == {"0": 8, "1": 12, "2": 4}  # 2 groups of 8 and of 12
    kept = axes.kept(0.5)
    assert axes.shape("1.weight", kept) == (12, 4, 3, 3)
    assert axes.index("1.weight", kept)[0].tolist() == [*range(6), *range(12, 18)]  # type: ignore[union-attr]


def test_many_groups_of_a_convolution_are_dropped_whole() -> None:
    axes = traced("grouped_many")
    assert sizes(axes) == {"0": 8, "2": 4}
    assert axes.shape("1.weight", axes.kept(0.5)) == (8, 2, 3, 3)


def test_depthwise_convolutions_follow_their_input() -> None:
    axes = traced("depthwise")
    assert sizes(axes) == {"0": 8, "5": 6}
    assert ("3.weight", 0) in members(axes, "0")
    assert ("4.running_var", 0) in members(axes, "0")
    assert sizes(traced("depthwise_multiplier")) == {"0": 8, "2": 6}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("batch_norm", {"0": 8}),
        ("batch_norm_without_statistics", {"0": 8}),
        ("layer_norm", {"0": 8}),
        ("group_norm", {"0": 8, "2": 4}),  # (2, 8): within groups; (4, 4): the outer of equals
        ("group_norm_many_groups", {"0": 8}),
        ("instance_norm", {"0": 8}),
        ("gated", {"0": 8}),
        ("squeeze_excite", {"stem": 8, "down": 4}),
        ("channel_shuffle", {"stem": 6}),
        ("channel_shuffle_layer", {"0": 4, "2": 4}),
        ("unet", {"down": 8, "deep": 12, "up": 8, "join": 8}),
        ("generator", {"0": 4, "2": 6, "4": 2}),
        ("weight_norm", {"0": 8}),
        ("spectral_norm", {"0": 8}),
        ("unequal_split", {"stem:0": 4, "stem:1": 8}),
        ("attribute_slice", {"stem:0": 4, "stem:1": 8}),
        ("small_gpt", {"symbols": 16, "attention.qkv": 8}),
        ("sizes_from_the_stream", {"into": 8}),  # the code gives stream and heads one width
        ("rotary_shared_keys", {"into": 16, "q": 4}),  # halves of a head are rotated into each other
        ("cosine", {"into": 8}),
        ("mixer", {"patch": 8, "places": 6, "channels": 10}),
        ("padded_shortcut", {"first": 8}),
        ("film", {"film": 8, "pair": 5}),
        ("masked_positions", {"into": 8, "mid": 6}),
        ("experts", {"into": 8, "experts.0.0": 6, "experts.1.0": 6}),
        ("norm_of_channels", {"0": 8, "2": 8}),
        ("from_settings", {"into": 4, "mix": 4, "wide": 6}),  # one setting is the size of two layers
        ("written_parts", {"into": 8}),
        ("overlapping", {"stem": 8, "mid": 6}),
        ("unpooled", {"stem": 8, "mid": 6}),
        ("waves", {"into": 4}),  # sines, cosines and halves of one size
        ("trained_mask", {"into": 8}),
        ("shuffled_groups", {"stem": 4, "first": 3}),  # of (3, 4) and twice (3, 3) within groups: groups stay
        ("silenced_third", {"parts": 8}),
        (
            "transformer",
            {"source": 8, **{f"transformer.{side}coder.layers.0.linear1": 12 for side in ("en", "de")}},
        ),
    ],
)
def test_each_topology_has_the_groups_its_couplings_leave(name: str, expected: dict[str, int]) -> None:
    assert sizes(traced(name)) == expected


def test_a_tied_decoder_shares_the_features_of_its_embedding_and_its_rows_stay() -> None:
    axes = traced("tied_embedding")
    assert sizes(axes) == {"encoder": 8}
    assert {("encoder.weight", 1), ("decoder.weight", 1), ("mix.weight", 0), ("mix.weight", 1)} <= members(
        axes, "encoder"
    )
    assert axes.shape("decoder.weight", axes.kept(0.5)) == (11, 4)
    assert dict(axes.head) == {"encoder.weight": 0, "decoder.weight": 0, "decoder.bias": 0}


def test_channels_within_heads_are_united_over_heads() -> None:
    axes = traced("vit_fused")
    assert sizes(axes) == {"patch": 16, "attention.qkv": 8, "mlp.0": 20}
    rows = axes.index("attention.qkv.weight", axes.kept(0.25))[0]
    assert rows is not None
    assert rows.tolist() == [8 * block + unit for block in range(6) for unit in range(2)]


def test_whole_heads_are_dropped_from_queries_keys_values_and_projection_alike() -> None:
    axes = traced("vit_fused", heads="whole")
    assert axes.group("attention.qkv").size == 2
    kept = axes.kept(0.5)
    assert axes.index("attention.qkv.weight", kept)[0].tolist() == [  # type: ignore[union-attr]
        16 * part + unit for part in range(3) for unit in range(8)
    ]
    assert axes.index("attention.proj.weight", kept)[1].tolist() == list(range(8))  # type: ignore[union-attr]


def test_separate_projections_couple_queries_with_keys_and_leave_values_apart() -> None:
    axes = traced("vit_separate")
    assert {("attention.q.weight", 0), ("attention.k.weight", 0)} <= members(axes, "attention.q")
    assert {("attention.v.weight", 0), ("attention.proj.weight", 1)} <= members(axes, "attention.v")
    whole = traced("vit_separate", heads="whole")
    assert {("attention.q.weight", 0), ("attention.v.weight", 0)} <= members(whole, "attention.q")


def test_positions_and_tokens_share_the_stream_and_their_places_stay() -> None:
    axes = traced("vit_chunk")
    assert {("token", 2), ("position", 2), ("patch.weight", 0)} <= members(axes, "patch")
    assert axes.shape("position", axes.kept(0.5)) == (1, 10, 8)


@pytest.mark.parametrize("heads, units", [("within", 4), ("whole", 4)])
def test_multihead_attention_couples_stream_and_inner_channels(heads: str, units: int) -> None:
    axes = traced("multihead_attention", heads=heads)
    assert [group.size for group in axes.groups] == [units]
    rows = axes.index("out.weight", axes.kept(0.5))[1]
    assert rows is not None
    within = [4 * head + unit for head in range(4) for unit in range(2)]
    assert rows.tolist() == (within if heads == "within" else list(range(8)))


def test_separate_key_and_value_sizes_form_a_group_of_their_own() -> None:
    axes = traced("multihead_attention_separate")
    assert sizes(axes) == {"memory": 12, "into": 4}
    assert {("attend.k_proj_weight", 1), ("attend.v_proj_weight", 1)} <= members(axes, "memory")


def test_all_gates_layers_and_directions_share_their_hidden_units() -> None:
    axes = traced("lstm_bidirectional")
    assert sizes(axes) == {"embed": 6, "rnn": 8}
    kept = axes.kept({"rnn": [1, 5]})
    gates = [8 * gate + unit for gate in range(4) for unit in (1, 5)]
    for end in ("l0", "l0_reverse", "l1", "l1_reverse"):
        for name in (f"rnn.weight_ih_{end}", f"rnn.weight_hh_{end}", f"rnn.bias_ih_{end}"):
            assert axes.index(name, kept)[0].tolist() == gates  # type: ignore[union-attr]
        assert axes.index(f"rnn.weight_hh_{end}", kept)[1].tolist() == [1, 5]  # type: ignore[union-attr]
    assert axes.index("rnn.weight_ih_l1", kept)[1].tolist() == [1, 5, 9, 13]  # type: ignore[union-attr]
    assert axes.index("out.weight", kept)[1].tolist() == [1, 5, 9, 13]  # type: ignore[union-attr]


def test_projected_units_of_an_lstm_are_a_group_apart() -> None:
    axes = traced("lstm_projected")
    assert sorted(group.size for group in axes.groups) == [4, 6, 8]
    projected = next(group for group in axes.groups if group.size == 4)
    assert {("rnn.weight_hr_l0", 0), ("rnn.weight_hh_l1", 1), ("out.weight", 1)} <= members(axes, projected.name)


@pytest.mark.parametrize("name", ["gru_cell", "lstm_cell"])
def test_a_loop_over_cells_shares_one_set_of_hidden_units(name: str) -> None:
    axes = traced(name)
    assert sizes(axes) == {"embed": 6, "cell": 8}
    gates = 3 if name == "gru_cell" else 4
    assert axes.shape("cell.weight_hh", axes.kept(0.5)) == (4 * gates, 4)


def test_given_states_are_coupled_with_the_hidden_units() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.rnn, self.out = nn.Linear(3, 8), nn.GRU(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x, self.start(x[0]).unsqueeze(0))[1][0])

    axes = trace(Stateful(), torch.zeros(4, 2, 3))
    assert {group.size for group in axes.groups} == {8}
    assert {("start.weight", 0), ("rnn.weight_hh_l0", 1), ("out.weight", 1)} <= members(axes, axes.groups[0].name)


def test_the_class_axis_is_found_by_tracing() -> None:
    assert dict(traced("residual").head) == {"fc.weight": 0, "fc.bias": 0}
    assert dict(traced("unet", class_axis=1).head) == {"out.weight": 0, "out.bias": 0}
    assert dict(traced("residual", class_axis=None).head) == {}


def test_what_the_network_returns_is_never_narrowed_unless_picked_out() -> None:
    class TwoResults(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, (h, _) = self.rnn(x)
            return self.out(y), h

    assert trace(TwoResults(), torch.zeros(2, 4, 3)).groups == ()
    assert sizes(trace(TwoResults(), torch.zeros(2, 4, 3), output=lambda result: result[0])) == {"rnn": 8}


def test_parameters_that_the_forward_never_reads_stay_whole() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    module[0].register_parameter("spare", nn.Parameter(torch.zeros(8)))
    axes = trace(module, torch.zeros(2, 3))
    assert axes.shape("0.spare", axes.kept(0.5)) == (8,)


class Unused(nn.Module):
    """A network of which `forward` leaves out the largest layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.forgotten = nn.Linear(30, 30)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Centred(nn.Module):
    """Reads the middle of a table of positions, as relative positions are: a longer text reads more of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.head = nn.Embedding(9, 4), nn.Parameter(torch.rand(1, 21, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.positions.size(1) // 2
        return self.head(self.embed(x) + self.positions[:, middle : middle + x.shape[1]])


def test_positions_that_a_short_text_leaves_unread_stay_for_longer_ones() -> None:
    network = Centred()
    axes = trace(network, torch.zeros(2, 3, dtype=torch.long))
    assert sizes(axes) == {"embed": 4}
    assert narrow(network, axes, 0.5)(torch.zeros(1, 11, dtype=torch.long)).shape == (1, 11, 3)


def test_a_network_that_hardly_shrinks_is_refused_until_what_stays_is_named_or_left_out() -> None:
    network, x = Unused(), torch.zeros(2, 4)
    advice = (
        "932 of 988 parameters have the same size at every width, most of them in forgotten; the forward never reads "
        "930 of them, so leave their layers out. To narrow the rest all the same, name those that stay, as in "
        "keep=['forgotten']"
    )
    with pytest.raises(ModelError, match=re.escape(advice)):
        narrow(network, trace(network, x), 0.5)
    assert narrow(network, trace(network, x), 1.0).first.out_features == 8
    assert narrow(network, trace(network, x, keep=["forgotten"]), 0.5).first.out_features == 4
    network.forgotten = nn.Identity()
    assert narrow(network, trace(network, x), 0.5).first.out_features == 4


class AttentionByFunction(nn.Module):
    """Torch's attention as a function, which is told the channels that it must get."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.heads = 8, 2
        self.embed = nn.Linear(3, 8)
        self.queries, self.keys, self.values, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        layers = (self.queries, self.keys, self.values)
        found, _ = nn.functional.multi_head_attention_forward(
            *(x, x, x, self.channels, self.heads, torch.empty([0]), torch.cat([layer.bias for layer in layers])),
            *(None, None, False, 0.0, self.out.weight, self.out.bias),
            use_separate_proj_weight=True,
            q_proj_weight=self.queries.weight,
            k_proj_weight=self.keys.weight,
            v_proj_weight=self.values.weight,
        )
        return self.head(found)


def test_the_channels_that_torchs_attention_is_told_of_follow_the_width() -> None:
    network, x = AttentionByFunction(), torch.rand(5, 2, 3)
    small = narrow(network, trace(network, x), 0.5)
    assert small.channels == 4
    assert small(x).shape == (5, 2, 2)


def test_tracing_leaves_the_module_as_it_was() -> None:
    module, example = TOPOLOGIES["vit_fused"]()
    module.train()
    before = copy.deepcopy(module.state_dict())
    expected = module(*example)
    trace(module, example)
    assert module.training
    assert type(module.attention.heads) is int
    assert not module._forward_hooks
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(module(*example), expected)


def test_shapes_list_what_state_dict_holds() -> None:
    module, example = TOPOLOGIES["small_gpt"]()
    axes = trace(module, example)
    assert dict(axes.shapes) == {name: tuple(t.shape) for name, t in module.state_dict().items()}
    assert axes.shape("mask", axes.kept(0.5)) == (9, 9)


def test_groups_print_readably() -> None:
    module = nn.Sequential(conv(3, 4), nn.Flatten(), nn.Linear(16, 2))
    assert str(trace(module, torch.zeros(2, 3, 2, 2))) == (
        "0: 4 units\n"
        "  0.weight axis 0\n"
        "  0.bias axis 0\n"
        "  2.weight axis 1, 4 elements a unit\n"
        "never narrowed: 2.weight axis 0"
    )


# --- widths


@settings(max_examples=30, deadline=None)
@given(width=st.floats(0.001, 1.0))
def test_fractions_round_up_and_keep_at_least_one_unit(width: float) -> None:
    axes = traced("chain")
    for name, size in sizes(axes).items():
        count = axes.kept(width).count(name)
        assert 1 <= count <= size
        assert count - 1 < width * size <= count + 1e-6


def test_kept_sets_are_equal_however_they_are_written() -> None:
    axes = traced("chain")
    assert axes.kept({"0": 4}) == axes.kept({"0": 0.5}) == axes.kept({"0": [2, 0, 1, 3]})
    assert hash(axes.kept(0.5)) == hash(axes.kept({"0": 4, "2": 3}))
    assert axes.kept(axes.kept(0.5)) == axes.kept(0.5)
    assert axes.kept(0.5) != axes.kept(0.75)
    assert isinstance(axes.kept(1.0), Kept)


def test_every_problem_of_a_width_is_reported_at_once() -> None:
    axes = traced("chain")
    with pytest.raises(ModelError, match=r"unknown width group '1'.*cannot keep 9 of group '0'"):
        axes.kept({"1": 0.5, "0": 9})
    with pytest.raises(ModelError, match=r"not in \(0, 1\]"):
        axes.kept(0.0)
    with pytest.raises(ModelError, match="distinct indices"):
        axes.kept({"0": [1, 1]})
    with pytest.raises(ModelError, match=r"did you mean '0\.weight'"):
        axes.index("0.weigth", axes.kept(0.5))


def test_elastic_tells_axes_of_groups_that_can_be_narrowed_from_the_rest() -> None:
    axes = traced("residual", keep=["first"])
    assert axes.elastic("stem.weight", 0)
    assert not axes.elastic("stem.weight", 1)
    assert not axes.elastic("first.weight", 0)
    assert not axes.elastic("fc.weight", 0)


# --- keeping groups whole


def test_keep_keeps_the_whole_group_and_says_so() -> None:
    axes = traced("residual", keep=["stem"])
    assert axes.group("stem").fixed
    assert not axes.group("first").fixed
    assert "stem: 8 units, kept whole" in str(axes)
    assert axes.kept(0.25).count("stem") == 8
    with pytest.raises(ModelError, match="kept whole by keep"):
        axes.kept({"stem": 0.5})


def test_keep_matches_ends_of_dotted_names_and_patterns() -> None:
    nested = nn.Sequential()
    module, example = TOPOLOGIES["residual"]()
    nested.add_module("network", module)
    assert trace(nested, example, keep=["stem"]).group("network.stem").fixed
    assert trace(nested, example, keep=["f*st"]).group("network.first").fixed
    assert trace(nested, example, keep=["network.first.weight"]).group("network.first").fixed


def test_keep_of_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match="unknown name in keep 'stm'; did you mean 'stem'"):
        traced("residual", keep=["stm"])


# --- what cannot be followed


class Unruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.linalg.qr(self.into(x))[0])


def test_an_operation_without_a_rule_is_refused_by_name_place_and_way_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Unruled())
    with pytest.raises(ModelError, match=r"linalg_qr.* at 1 \(.*test_axes.py:\d+\).*keep="):
        trace(module, torch.zeros(6, 4))
    axes = trace(module, torch.zeros(6, 4), keep=["into"])
    assert {group.name: group.fixed for group in axes.groups} == {"0": False, "1.into": True}


class Writes(nn.Module):
    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width = width
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros(2, 3, self.width or 6)
        for step in range(3):
            result[:, step] = self.into(x[:, step])
        return self.out(result)


def test_units_written_into_parts_of_a_plain_tensor_are_its_units() -> None:
    axes = trace(Writes(6), torch.zeros(2, 3, 4))
    assert sizes(axes) == {"into": 6}
    assert axes.attributes(axes.kept(0.5)) == {"width": 3}


def test_a_plain_tensor_whose_size_is_a_number_is_refused_when_it_is_narrowed() -> None:
    with pytest.raises(ModelError, match=r"does not run.*test_axes.py:\d+"):
        narrow(Writes(None), trace(Writes(None), torch.zeros(2, 3, 4)), 0.5)


def test_a_forward_that_reads_values_is_refused_with_its_line() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(ModelError, match=r"cannot run without data, at 0 \(.*test_axes.py:\d+\)"):
        trace(nn.Sequential(Reads()), torch.zeros(2, 4))


def test_an_unknown_choice_of_heads_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown choice of heads"):
        traced("chain", heads="both")


# --- sizes stored on modules


def test_integer_attributes_follow_the_width() -> None:
    module, example = TOPOLOGIES["vit_fused"]()
    within = trace(module, example)
    assert within.attributes(within.kept(0.5)) == {"attention.head_dim": 4}
    whole = trace(module, example, heads="whole")
    assert whole.attributes(whole.kept(0.5)) == {"attention.heads": 1}
    assert within.attributes(within.kept(1.0)) == {}


def test_the_size_of_a_state_made_from_an_attribute_follows_the_hidden_units() -> None:
    axes = trace(CellLoop(nn.GRUCell), torch.zeros(2, 4, dtype=torch.long))
    assert axes.attributes(axes.kept({"cell": 3})) == {"hidden": 3}


def test_attributes_can_be_mapped_by_hand() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 8
            self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(x).view(-1, int(str(self.width))))

    example = torch.zeros(2, 4)
    with pytest.raises(ModelError, match="does not run"):
        narrow(Hidden(), trace(Hidden(), example), 0.5)
    axes = trace(Hidden(), example, attributes={"width": "into"})
    assert narrow(Hidden(), axes, 0.5).width == 4
    with pytest.raises(ModelError, match=r"unknown attribute 'wdth'.*unknown width group 'in'"):
        trace(Hidden(), example, attributes={"wdth": "in"})


def test_attention_blocks_of_equal_names_keep_groups_apart() -> None:
    module = nn.Sequential(nn.Linear(5, 16), FusedAttention(), nn.Sequential(FusedAttention()), nn.Linear(16, 3))
    expected = {"0": 16, "1.qkv": 8, "1.proj": 16, "2.0.qkv": 8, "2.0.proj": 16}
    assert sizes(trace(module, torch.zeros(2, 6, 5))) == expected


def test_axes_survive_pickling() -> None:
    module, example = TOPOLOGIES["vit_fused"]()
    axes = trace(module, example)
    again = pickle.loads(pickle.dumps(axes))
    assert again.groups == axes.groups
    assert again.attributes(again.kept(0.5)) == axes.attributes(axes.kept(0.5))
