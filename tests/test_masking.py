"""Secure sums in memory: what the server gets, what it does not get, and what a member refuses."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from anysize.errors import TrustError
from anysize.methods.messages import SubModel, Ticket, Update
from anysize.methods.sums import ClassSum, class_of, mean_of, words_of
from anysize.methods.training import Tricks

pytest.importorskip("flwr", reason="Flower is an extra")
masking = importlib.import_module("anysize.deploy.masking")

LENGTH = 40
STEPS = ("keys", "shares", "words", "unmask")


def secrets(count: int) -> dict[int, Any]:
    random = np.random.default_rng(count)
    return {10 * place + 3: random.integers(0, 2**64, LENGTH, dtype=np.uint64) for place in range(count)}


def summed(
    added: Mapping[int, Any], threshold: int = 3, gone: Mapping[str, Collection[int]] | None = None
) -> tuple[Any, dict[int, Any]]:
    """The sum as the server finds it, and the masked words that it saw; members leave before they answer a step."""
    members = {number: masking.Member(number, threshold) for number in added}
    server, lost = masking.Collector(threshold), gone or {}

    def left(step: str, told: Collection[int]) -> list[int]:
        return [number for number in told if not any(number in lost.get(s, ()) for s in STEPS[: STEPS.index(step) + 1])]

    keys = server.met({number: members[number].keys() for number in left("keys", added)})
    shares = server.passed_on({number: members[number].shares(keys) for number in left("shares", keys)})
    seen = {number: members[number].words(shares[number], added[number]) for number in left("words", shares)}
    for number, words in seen.items():
        server.add(number, words)
    alive = server.alive()
    return server.total({number: members[number].unmask(alive) for number in left("unmask", alive)}), seen


def plain_sum(added: Mapping[int, Any], *numbers: int) -> list[int]:
    """The oracle: Python's whole numbers."""
    return [sum(int(added[number][i]) for number in numbers) % 2**64 for i in range(LENGTH)]


@pytest.mark.parametrize("step", STEPS)
def test_the_server_gets_the_exact_sum_of_those_that_stayed_whenever_others_leave(step: str) -> None:
    added = secrets(7)
    leaving = [13, 63]
    total, seen = summed(added, gone={step: leaving})
    in_it = [number for number in added if step == "unmask" or number not in leaving]
    assert sorted(seen) == in_it
    assert total.tolist() == plain_sum(added, *in_it)


def test_members_may_leave_one_at_every_step() -> None:
    added = secrets(12)
    gone = {"keys": [3], "shares": [13], "words": [23], "unmask": [33]}
    total, _ = summed(added, gone=gone)
    assert total.tolist() == plain_sum(added, *(number for number in added if number not in (3, 13, 23)))


@pytest.mark.parametrize(("step", "count"), [("keys", 5), ("shares", 3), ("words", 3), ("unmask", 3)])
def test_with_too_few_left_there_is_no_sum(step: str, count: int) -> None:
    added = secrets(7)
    with pytest.raises(TrustError, match=r"a sum that hides each needs (3|5)"):
        summed(added, gone={step: list(added)[:count]})


def test_what_the_server_sees_is_spread_evenly_and_tells_nothing_of_what_was_added() -> None:
    """Zeros are added, so that any trace of them would show; every bit of a masked word is a coin."""
    added = {number: np.zeros(4000, dtype=np.uint64) for number in (1, 2, 3, 4)}
    total, seen = summed(added)
    assert not total.any()
    bits = np.unpackbits(np.concatenate([words.view(np.uint8) for words in seen.values()]))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
    low, high = seen[1].astype(float), seen[2].astype(float)
    assert abs(np.corrcoef(low, high)[0, 1]) < 5 / 4000**0.5
    again = summed(added)[1]
    assert not np.any(seen[1] == again[1])  # fresh keys for every sum
    # All but one leave the server's guess short of that one's masks.
    assert (seen[1] + seen[2] + seen[3]).any()


def test_the_shares_of_too_few_members_unmask_nobody() -> None:
    added = secrets(4)
    members = {number: masking.Member(number, 3) for number in added}
    keys = {number: member.keys() for number, member in members.items()}
    server = masking.Collector(3)
    shares = server.passed_on({n: member.shares(server.met(keys)) for n, member in members.items()})
    for number, member in members.items():
        server.add(number, member.words(shares[number], added[number]))
    told = {number: members[number].unmask(server.alive()) for number in list(added)[:2]}
    with pytest.raises(TrustError, match="2 devices of its size were left"):
        server.total(told)
    # Two shares of a secret that takes three make another secret, or none.
    shamir = importlib.import_module("flwr.common.secure_aggregation.crypto.shamir")
    try:
        found = shamir.combine_shares([told[number][3] for number in told])
    except ValueError:
        return
    assert found != members[3]._seed


def begun(count: int = 4, threshold: int = 3) -> tuple[dict[int, Any], Any, Any]:
    """Members, their keys, and what each encrypted for the others."""
    members = {number: masking.Member(number, threshold) for number in range(count)}
    keys = {number: member.keys() for number, member in members.items()}
    return members, keys, {number: member.shares(keys) for number, member in members.items()}


def test_a_member_does_each_step_once_and_in_order() -> None:
    fresh = masking.Member(0, 3)
    with pytest.raises(TrustError, match='asks for "unmask", and the next step of this sum is "keys"'):
        fresh.unmask([0, 1, 2])
    members, keys, shares = begun()
    with pytest.raises(TrustError, match='next step of this sum is "words"'):
        members[0].shares(keys)
    words = np.zeros(3, dtype=np.uint64)
    given = {number: shares[number][0] for number in (1, 2, 3)}
    members[0].words(given, words)
    with pytest.raises(TrustError, match='next step of this sum is "unmask"'):
        members[0].words(given, words)  # with other masks, the difference would tell about these
    told = members[0].unmask([0, 1, 2])
    with pytest.raises(TrustError, match='next step of this sum is "done"'):
        members[0].unmask([0, 1, 3])  # it would get both shares of 2 and of 3
    seed, key = members[0]._held[3]
    assert told[3] == key != seed


def test_a_member_tells_one_share_of_each_and_none_for_a_sum_that_is_too_small() -> None:
    members, _, shares = begun(7)
    words = np.zeros(3, dtype=np.uint64)
    for number, member in members.items():
        member.words({other: own[number] for other, own in shares.items() if other != number}, words)
    with pytest.raises(TrustError, match="a sum over 4 of 7 devices; it needs 5"):
        members[0].unmask([0, 1, 2, 3])
    with pytest.raises(TrustError, match="no part of the sum"):
        members[1].unmask([0, 1, 2, 3, 4, 9])
    with pytest.raises(TrustError, match="or says that this one is not"):
        members[2].unmask([0, 1, 3, 4, 5])


def test_a_member_refuses_keys_and_shares_that_a_server_made_up() -> None:
    words = np.zeros(3, dtype=np.uint64)

    def met(change: Any) -> Any:
        members = {number: masking.Member(number, 3) for number in range(4)}
        keys = {number: member.keys() for number, member in members.items()}
        return members[0].shares(change(keys))

    with pytest.raises(TrustError, match="a sum over 2 devices was asked for; this one takes part in 3"):
        met(lambda keys: {0: keys[0], 1: keys[1]})
    with pytest.raises(TrustError, match="keys that are not this device's"):
        met(lambda keys: keys | {0: keys[1]})
    with pytest.raises(TrustError, match="several devices have the same key"):
        met(lambda keys: keys | {2: keys[1]})
    with pytest.raises(TrustError, match="a public key is none"):
        met(lambda keys: keys | {2: masking.Keys(b"no key", b"nor this")})

    members, _, shares = begun()
    with pytest.raises(TrustError, match="not what it encrypted for this one"):
        members[0].words({1: shares[1][0], 2: shares[2][3], 3: shares[3][0]}, words)
    members, _, shares = begun()
    with pytest.raises(TrustError, match="only 2 of 4 devices are left, and a sum needs 3"):
        members[0].words({1: shares[1][0]}, words)
    members, _, shares = begun()
    with pytest.raises(TrustError, match="no part of the sum"):
        members[0].words({1: shares[1][0], 2: shares[2][0], 8: shares[3][0]}, words)


def test_members_notice_if_the_server_tells_them_different_things() -> None:
    members = {number: masking.Member(number, 3) for number in range(5)}
    keys = {number: member.keys() for number, member in members.items()}
    fewer = {number: keys[number] for number in (0, 1, 2, 3)}
    sent = {number: member.shares(fewer if number == 1 else keys) for number, member in members.items()}
    with pytest.raises(TrustError, match="tells device 1 of other members"):
        members[0].words({number: sent[number][0] for number in (1, 2, 3, 4)}, np.zeros(3, dtype=np.uint64))


def test_shares_of_liars_are_left_out_or_void_the_sum() -> None:
    added = secrets(4)
    members = {number: masking.Member(number, 3) for number in added}
    server = masking.Collector(3)
    keys = server.met({number: member.keys() for number, member in members.items()})
    shares = server.passed_on({number: member.shares(keys) for number, member in members.items()})
    for number in (3, 13, 23):
        server.add(number, members[number].words(shares[number], added[number]))
    told = {number: members[number].unmask(server.alive()) for number in server.alive()}
    with pytest.raises(TrustError, match="nobody asked for"):
        server.add(3, added[3])
    moved = {other: (9).to_bytes(4, "little") + share[4:] for other, share in told[13].items()}
    with pytest.raises(TrustError, match="2 devices of its size were left"):
        server.total(told | {13: moved})
    false = {other: share[:4] + bytes(len(share) - 4) for other, share in told[13].items()}
    with pytest.raises(TrustError, match=r"do not fit together|make no key|make another key"):
        server._private(33, told | {13: false})
    assert server.total(told).tolist() == plain_sum(added, 3, 13, 23)


# Updates as words.


def answered(client: int, samples: int = 5) -> tuple[SubModel, Update]:
    """What a client got, the same for each, and what it answers."""
    random = torch.Generator().manual_seed(client)
    sent = {"w": torch.linspace(-1, 1, 6).reshape(2, 3), "n": torch.tensor(4)}
    learned = {
        "w": sent["w"] + torch.randn(2, 3, generator=random) / 10,
        "n": torch.tensor(4 + client),
        "new": torch.randn(3, generator=random),
    }
    ticket = Ticket(client, 1, 0, "0.5", 0.5, rate=0.1)
    return SubModel(sent, ticket), Update(learned, ticket, samples=samples, loss=0.5 + client)


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_the_mean_of_a_class_is_the_weighted_mean_within_the_fixed_point(weighting: Any) -> None:
    tricks = replace(Tricks(), weighting=weighting)
    clients = [answered(client, samples=7 * client + 2) for client in range(5)]
    words = {client: words_of(update, message, tricks) for client, (message, update) in enumerate(clients)}
    total, _ = summed(words)
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in clients[0][1].tensors.items()}
    found = mean_of(total, clients[0][0], forms, range(5), tricks)
    weights = [Fraction(update.samples if weighting == "samples" else 1) for _, update in clients]
    for name in ("w", "new"):
        for place in np.ndindex(*forms[name].shape):
            values = [Fraction(float(update.tensors[name][place])) for _, update in clients]
            exact = sum(w * value for w, value in zip(weights, values)) / sum(weights)
            assert abs(float(found.tensors[name][place]) - float(exact)) <= 2**-25 + 2**-24 * abs(float(exact))
    exact = sum(w * Fraction(update.loss) for w, (_, update) in zip(weights, clients)) / sum(weights)
    assert found.loss == pytest.approx(float(exact), abs=2**-25)
    counts = sum(w * int(update.tensors["n"]) for w, (_, update) in zip(weights, clients)) / sum(weights)
    assert int(found.tensors["n"]) == round(counts)
    assert found.members == (0, 1, 2, 3, 4)
    assert found.weight(tricks) == float(sum(weights))

    here = ClassSum.of(*clients[0])
    for _, update in clients:
        here.add(update, tricks)
    alike = here.mean(tricks)  # a simulation has no masks, and the same bits
    assert all(torch.equal(alike.tensors[name], found.tensors[name]) for name in forms)


def test_numbers_that_no_sum_can_hold_stay_on_the_client() -> None:
    message, update = answered(1)
    for value in (float("nan"), float("inf"), 1e12):
        wrong = replace(update, tensors=update.tensors | {"new": torch.tensor([0.0, value, 0.0])})
        with pytest.raises(TrustError, match="not finite, or by"):
            words_of(wrong, message, Tricks())


def test_a_sum_that_somebody_spoiled_is_noticed_by_its_weight() -> None:
    message, update = answered(1)
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in update.tensors.items()}
    tricks = replace(Tricks(), weighting="clients")
    words = words_of(update, message, tricks)
    with pytest.raises(TrustError, match="the sum of 3 clients has weight 1"):
        mean_of(words, message, forms, [1, 2, 3], tricks)


def test_a_class_is_what_got_the_same_tensors_and_the_same_ticket() -> None:
    message, _ = answered(1)
    assert class_of(message) == class_of(answered(2)[0])
    others = [replace(message.ticket, size="1.0"), replace(message.ticket, more={"bases": [1]})]
    assert len({class_of(message), *(class_of(replace(message, ticket=ticket)) for ticket in others)}) == 3
    assert class_of(message) != class_of(replace(message, tensors={"w": torch.zeros(3, 3)}))
