"""Partitions: who has what, and that the same seed always says the same."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anysize.data import Data, DeviceShares, Share, TensorPart, split
from anysize.data.partition import class_shares, deal, dealt_classes, equal_mixes
from anysize.errors import DataError

ALL_SPLITS = [
    ("iid", {}),
    ("classes", {"classes_per_client": 3}),
    ("dirichlet", {"alpha": 0.3}),
    ("dirichlet", {"alpha": 0.3, "equal": False}),
    ("natural", {}),
]


def make_data(samples: int = 1000, classes: int = 10, groups: int = 20) -> Data:
    """Samples whose only feature is their own number, so that a share shows which ones it holds."""
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    group = np.array([f"g{number:03d}" for number in np.arange(samples) % groups])
    return Data(train=TensorPart(np.arange(samples, dtype=np.float32)[:, None], labels, group), classes=classes)


def ids(part) -> list[int]:
    return part.batch(torch.arange(len(part)))[0].flatten().int().tolist()


def histogram(shares, data: Data) -> np.ndarray:
    """(clients, classes): counted from the samples that each share really gives."""
    rows = []
    for client in range(len(shares)):
        _, y = shares.share(client).train.batch(torch.arange(shares.samples(client)))
        rows.append(np.bincount(y.numpy(), minlength=data.classes))
    return np.array(rows)


@pytest.mark.parametrize("name, options", ALL_SPLITS)
def test_no_sample_is_used_twice_and_nobody_is_empty(name, options):
    data = make_data()
    shares = split(data, 20, name, validation=0.2, **options)
    drawn = [shares.share(client) for client in range(len(shares))]
    used = [i for share in drawn for i in ids(share.train) + ids(share.held_out)]
    assert len(shares) == 20
    assert len(used) == len(set(used))
    assert all(len(share.train) > 0 for share in drawn)
    assert [len(share.train) for share in drawn] == [shares.samples(client) for client in range(20)]


@pytest.mark.parametrize("name, options", ALL_SPLITS)
def test_the_same_seed_gives_the_same_shares_in_any_order_and_another_seed_others(name, options):
    data = make_data()
    first, again, other = (split(data, 20, name, validation=0.2, seed=s, **options) for s in (3, 3, 4))
    forward = [(ids(first.share(c).train), ids(first.share(c).held_out)) for c in range(20)]
    backward = [(ids(again.share(c).train), ids(again.share(c).held_out)) for c in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [(ids(other.share(c).train), ids(other.share(c).held_out)) for c in range(20)]


def test_iid_shares_use_every_sample_and_differ_by_at_most_one():
    shares = split(make_data(1003), 20)
    sizes = [shares.samples(client) for client in range(20)]
    assert sum(sizes) == 1003
    assert set(sizes) == {50, 51}


def test_iid_shares_look_like_the_whole():
    data = make_data(10_000)
    counts = histogram(split(data, 10), data)
    whole = np.bincount(data.train.labels().numpy()) / 10
    # Five standard deviations of a binomial count of about 100 in 1000.
    assert np.abs(counts - whole).max() < 5 * 9.5


def test_each_client_has_exactly_k_classes_in_equal_shares():
    data = Data(train=(np.zeros((6000, 1)), np.arange(6000) % 10))
    counts = histogram(split(data, 100, "classes", classes_per_client=3), data)
    assert (np.count_nonzero(counts, axis=1) == 3).all()
    assert set(counts[counts > 0]) == {20}  # 6000 samples / (100 clients x 3 classes)
    assert counts.sum() == 6000


@given(
    supply=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    clients=st.integers(1, 25),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_class_shares_are_distinct_equal_and_within_supply_whenever_that_is_possible(supply, clients, data):
    per_client = data.draw(st.integers(1, len(supply)))
    supply = np.array(supply)
    possible = np.minimum(supply, clients).sum() >= clients * per_client
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    if not possible:
        with pytest.raises(DataError, match="there are too few samples for"):
            class_shares(supply, clients, per_client, rng)
        return
    counts = class_shares(supply, clients, per_client, rng)
    assert (np.count_nonzero(counts, axis=1) == per_client).all()
    assert len(set(counts[counts > 0])) == 1
    assert (counts.sum(axis=0) <= supply).all()
    larger = counts.max() + 1
    assert np.minimum(supply // larger, clients).sum() < clients * per_client  # no larger share would do


def test_every_draw_is_among_the_classes_with_most_shares_left():
    counts = class_shares(np.full(10, 30), 100, 3, np.random.default_rng(1))
    left = np.full(10, 30)
    for row in counts:
        taken = row > 0
        assert left[taken].min() >= left[~taken].max()
        left = left - taken


def test_different_seeds_break_ties_differently():
    first, second = (class_shares(np.full(10, 30), 100, 3, np.random.default_rng(s)) for s in (0, 1))
    assert not np.array_equal(first, second)


@given(
    supply=st.lists(st.integers(0, 50), min_size=1, max_size=10).filter(lambda s: sum(s) >= 8),
    alpha=st.sampled_from([1e-4, 0.1, 1.0, 1e3]),
    seed=st.integers(0, 100),
)
@settings(max_examples=150, deadline=None)
def test_both_dirichlet_splits_deal_out_the_whole_supply(supply, alpha, seed):
    supply = np.array(supply)
    even = equal_mixes(supply, 8, alpha, np.random.default_rng(seed))
    uneven = dealt_classes(supply, 8, alpha, np.random.default_rng(seed))
    smallest = min(10, supply.sum() // 8)
    for counts in (even, uneven):
        assert (counts >= 0).all()
        assert (counts.sum(axis=0) == supply).all()
    assert np.ptp(even.sum(axis=1)) <= 1
    assert uneven.sum(axis=1).min() >= smallest


@pytest.mark.parametrize("equal", [True, False])
def test_a_small_alpha_skews_the_classes_and_a_large_one_does_not(equal):
    data = make_data(5000)

    def top_share(alpha: float) -> float:
        counts = histogram(split(data, 20, "dirichlet", alpha=alpha, equal=equal), data)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert top_share(0.05) > 0.6
    assert top_share(1000.0) < 0.2


def test_equal_mixes_have_the_spread_of_dirichlet_draws():
    alpha, classes, clients = 0.5, 4, 3000
    counts = equal_mixes(np.full(classes, 30 * clients), clients, alpha, np.random.default_rng(0))
    shares = counts[:, 0] / counts.sum(axis=1)
    mean = 1 / classes
    # The last clients take what is left, so the spread is near that of the law and not equal to it.
    assert shares.var() == pytest.approx(mean * (1 - mean) / (classes * alpha + 1), rel=0.25)


def test_dealing_gives_each_client_its_count_of_each_class():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 200)
    counts = rng.integers(0, 8, (5, 5))
    order, offsets = deal(labels, counts)
    for client, row in enumerate(counts):
        own = order[offsets[client] : offsets[client + 1]]
        assert np.bincount(labels[own], minlength=5).tolist() == row.tolist()


def test_a_natural_split_gives_each_group_to_one_client():
    data = make_data(groups=20)
    shares = split(data, None, "natural")
    assert len(shares) == 20
    for client in range(20):
        assert {i % 20 for i in ids(shares.share(client).train)} == {client}
        assert shares.samples(client) == 50
        assert shares.group_of(client) == f"g{client:03d}"


def test_fewer_clients_than_groups_get_whole_groups_drawn_by_the_seed():
    data = make_data(groups=20)
    chosen = [[split(data, 5, "natural", seed=seed).group_of(client) for client in range(5)] for seed in range(3)]
    assert all(len(set(groups)) == 5 and groups == sorted(groups) for groups in chosen)
    assert chosen[0] != chosen[1] or chosen[1] != chosen[2]


def test_more_clients_than_groups_share_each_group_evenly():
    data = make_data(900, groups=3)
    shares = split(data, 30, "natural")
    assert [shares.group_of(client) for client in (0, 9, 10, 29)] == ["g000", "g000", "g001", "g002"]
    assert {shares.samples(client) for client in range(30)} == {30}
    assert all(len({i % 3 for i in ids(shares.share(client).train)}) == 1 for client in range(30))


@pytest.mark.parametrize(("clients", "each", "found"), [(4, 5, [5, 5, 5, 5]), (3, 5, [5, 5, 5]), (3, 7, [7, 7, 6])])
def test_several_groups_go_to_a_client_whole_and_evenly(clients: int, each: int, found: list[int]) -> None:
    data = make_data(groups=20)
    shares = split(data, clients, "natural", groups_per_client=each)
    groups = [{i % 20 for i in ids(shares.share(client).train)} for client in range(clients)]
    assert [len(own) for own in groups] == found
    assert len(set().union(*groups)) == sum(found)  # no group has two clients
    assert [shares.samples(client) for client in range(clients)] == [50 * count for count in found]
    assert shares.group_of(0) is None


def test_without_a_number_of_clients_there_are_enough_for_all_groups():
    data = make_data(groups=20)
    shares = split(data, None, "natural", groups_per_client=6)
    assert [shares.samples(client) for client in range(len(shares))] == [250] * 4
    other = split(data, None, "natural", groups_per_client=6, seed=1)
    assert ids(other.share(0).train) != ids(shares.share(0).train)


def test_domains_come_to_the_clients_in_the_order_asked_for():
    data = make_data(900, groups=3)
    order = ["g002", "g000", "g001"]
    shares = split(data, 6, "natural", domains=order)
    assert [shares.group_of(client) for client in range(6)] == ["g002", "g002", "g000", "g000", "g001", "g001"]
    assert {i % 3 for i in ids(shares.share(0).train)} == {2}
    alphabetical = split(data, 6, "natural")
    assert ids(alphabetical.share(4).train) == ids(shares.share(0).train)  # who has which samples stays


def test_only_the_domains_that_are_named_are_used():
    data = make_data(900, groups=3)
    shares = split(data, 4, "natural", domains=["g002", "g000"])
    assert [shares.group_of(client) for client in range(4)] == ["g002", "g002", "g000", "g000"]
    assert {i % 3 for client in range(4) for i in ids(shares.share(client).train)} == {2, 0}
    assert len(shares.used) == 600
    with pytest.raises(DataError, match=r"there is no g009; name data groups of the data once each: g000, g001, g002"):
        split(data, 6, "natural", domains=["g002", "g009"])
    with pytest.raises(DataError, match="one is there twice"):
        split(data, 6, "natural", domains=["g002", "g002"])


def test_groups_may_be_numbers():
    part = TensorPart(np.zeros((4, 1)), [0, 1, 0, 1], group=np.array([7, 3, 7, 7], dtype=np.int16))
    shares = split(Data(train=part), None, "natural")
    assert [(shares.group_of(c), shares.samples(c)) for c in range(2)] == [("3", 1), ("7", 3)]


def test_validation_holds_out_its_fraction_and_never_everything():
    data = make_data(100)
    for clients, fraction, expected in [
        (10, 0.2, 2),
        (10, 0.001, 1),
        (50, 0.99, 1),
        (100, 0.5, 0),
        (10, 0.0, 0),
    ]:
        share = split(data, clients, validation=fraction).share(0)
        held = 0 if share.held_out is None else len(share.held_out)
        assert (held, len(share.train)) == (expected, 100 // clients - expected)


def test_held_out_samples_of_a_client_follow_from_seed_and_client_alone():
    data = make_data(200)
    shares = split(data, 10, validation=0.3, seed=9)
    before = ids(shares.share(4).held_out)
    for client in range(10):
        shares.share(client)
    assert ids(shares.share(4).held_out) == before


@pytest.mark.parametrize("name, options", ALL_SPLITS)
def test_a_fraction_uses_only_that_part_of_the_data(name, options):
    shares = split(make_data(2000), 20, name, fraction=0.25, **options)
    used = sum(shares.samples(client) for client in range(20))
    assert 0.8 * 500 <= used <= 500  # equal shares of unequal classes leave some over


def test_shares_of_devices_are_loaded_only_when_drawn():
    asked = []

    def loader(device: int) -> Share:
        asked.append(device)
        return Share(train=(np.zeros((device + 1, 2)), np.zeros(device + 1, dtype=np.int64)))

    shares = DeviceShares(loader, clients=1_000_000)
    assert (len(shares), asked) == (1_000_000, [])
    assert shares.samples(5) == 6
    assert asked == [5]


@pytest.mark.parametrize("name, options", [split for split in ALL_SPLITS if split[0] != "natural"])
def test_a_hundred_thousand_samples_among_a_thousand_clients_take_well_under_a_second(name, options):
    data = make_data(100_000)
    start = time.perf_counter()
    split(data, 1000, name, **options)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    "match, clients, name, options",
    [
        ("did you mean 'dirichlet'", 10, "dirichle", {}),
        ("allowed: 1 to 10", 10, "classes", {"classes_per_client": 11}),
        ("allowed: 1 to 10", 10, "classes", {"classes_per_client": 0}),
        ("classes_per_client is not given", 10, "classes", {}),
        ("use at most 1000 clients", 1001, "iid", {}),
        ("use at most 1000 clients", 1001, "dirichlet", {"alpha": 1.0}),
        ("use at most 100 clients", 101, "iid", {"fraction": 0.1}),
        ("alpha is 0", 10, "dirichlet", {"alpha": 0.0}),
        ("alpha is nan", 10, "dirichlet", {"alpha": float("nan")}),
        ("alpha is None", 10, "dirichlet", {}),
        ("clients is 0; at least 1", 0, "iid", {}),
        ("clients is not given", None, "iid", {}),
        ("validation is 1", 10, "iid", {"validation": 1.0}),
        ("fraction is 0", 10, "iid", {"fraction": 0.0}),
        ("fewer samples than clients", 1500, "natural", {}),
        ("only 20 data groups", 21, "natural", {"groups_per_client": 2}),
        ("groups_per_client is 0", 5, "natural", {"groups_per_client": 0}),
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(match, clients, name, options):
    with pytest.raises(DataError, match=match):
        split(make_data(), clients, name, **options)


def test_all_problems_are_told_at_once():
    with pytest.raises(DataError) as caught:
        split(make_data(), 0, "dirichlet", alpha=-1.0, validation=2.0)
    assert len(str(caught.value).splitlines()) == 3


def test_a_natural_split_needs_groups():
    with pytest.raises(DataError, match="needs data with groups"):
        split(Data(train=(np.zeros((4, 1)), [0, 1, 0, 1])), 2, "natural")


def test_a_split_by_classes_needs_classes():
    with pytest.raises(DataError, match="needs one class per sample"):
        split(Data(train=(np.zeros((4, 1)), np.zeros(4))), 2, "classes", classes_per_client=1)


def test_a_client_that_does_not_exist_is_refused():
    shares = split(make_data(), 10)
    for client in (-1, 10):
        with pytest.raises(DataError, match="there are 10, numbered from 0"):
            shares.share(client)
