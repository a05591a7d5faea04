"""A server that attacks secure sums: what it can try with the messages that devices answer, and what it gets."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anysize.deploy.summed import SUMMED, Summed
from anysize.errors import ConfigError, TrustError
from anysize.methods.messages import SubModel, Ticket
from anysize.methods.sums import CLIENTS, mean_of, words_of
from anysize.wire import dump, load

pytest.importorskip("flwr", reason="Flower is an extra")
masking = importlib.import_module("anysize.deploy.masking")
membership = importlib.import_module("anysize.deploy.membership")
messages = importlib.import_module("anysize.engines.flower_records")
fleet = importlib.import_module("test_secure_fleet")

VICTIM, OTHERS = "a", ("b", "c", "d")  # the devices of size 0.5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Server:
    """A server that sends devices what it likes, and goes through the steps of a sum with them."""

    def __init__(self, folder: Path) -> None:
        self.experiment, self.engine, self.wire = fleet.bench(folder)
        self.hello = self.engine._hello
        context, method = self.experiment.context, self.experiment.method
        self.state = method.init(context)
        clients = {c.id: c for c in fleet.everybody(self.experiment)}
        names = sorted(fleet.NAMES)
        self.message = {name: method.extract(context, self.state, clients[names.index(name)]) for name in names}

    def asks(self, name: str, note: dict[str, Any], blobs: list[bytes] | None = None) -> Any:
        """The note and the blobs of a device's answer; a TrustError with its words if it refuses."""
        content = messages.with_note(note, messages.record(blobs or []))
        answer = self.wire.desk(name).reply("train", content)
        said = messages.note_in(answer)
        if "failure" in said:
            raise TrustError(said["failure"])
        return said, messages.blobs_in(answer)

    def train(self, name: str, round: int = 1, **lie: Any) -> Any:
        """A device's keys, after it learned; `lie` changes its ticket, its tensors or the run and experiment."""
        sent = self.message[name]
        ticket = sent.ticket.to_json() | {"round": round, "rate": 0.05} | lie.get("ticket", {})
        tensors = sent.tensors if "tensors" not in lie else lie["tensors"](sent.tensors)
        said, _ = self.asks(name, {"hello": lie.get("hello", self.hello), "tickets": [ticket]}, [dump(tensors, {})])
        return membership.key_pair(said["keys"])

    def step(self, name: str, step: str, told: Any, round: int = 1, hello: Any = None) -> Any:
        """A device's answer to a step of the sum."""
        return self.asks(name, {"hello": hello or self.hello, "sum": membership.asked(step, round, told)})

    def summed(self, lies: dict[str, dict[str, Any]], round: int = 1, names: Sequence[str] = (VICTIM, *OTHERS)) -> Any:
        """The sum of devices of size 0.5, of whom some got something else."""
        place = {name: self.message[name].ticket.client for name in names}
        hello = {name: lies.get(name, {}).get("hello", self.hello) for name in names}
        collector = masking.Collector(3)
        keys = collector.met({place[n]: self.train(n, round, **lies.get(n, {})) for n in names})
        told = membership.key_texts(keys)
        shares = {
            place[n]: membership.blobs_in(self.step(n, "shares", told, round, hello[n])[0]["shares"]) for n in names
        }
        for name in names:
            given = membership.texts(collector.passed_on(shares)[place[name]])
            blob = self.step(name, "words", given, round, hello[name])[1][0]
            collector.add(place[name], membership.words_in(load(blob)[0]))
        alive = collector.alive()
        last = {n: self.step(n, "unmask", alive, round, hello[n])[0]["shares"] for n in names}
        return collector.total({place[n]: membership.blobs_in(said) for n, said in last.items()})


def test_without_lies_the_steps_of_this_server_give_the_sum(tmp_path: Path) -> None:
    server = Server(tmp_path)
    total = server.summed({})
    message = server.message[VICTIM]
    update = mean_of(total, message, message.tensors, range(4), server.experiment.context.tricks)
    assert any(not torch.equal(update.tensors[name], sent) for name, sent in message.tensors.items())


def nothing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "lie",
    [
        {"ticket": {"rate": 0.0}},
        {"ticket": {"seed": 5}},
        {"tensors": nothing},
        {"hello": "frozen"},
    ],
    ids=["a rate of zero", "another seed", "another network", "another experiment"],
)
def test_a_server_that_sends_the_others_something_else_does_not_get_the_sum(tmp_path: Path, lie: Any) -> None:
    """The others would add what the server foresees: at rate zero, nothing, so that the sum would be the victim's."""
    server = Server(tmp_path)
    if lie.get("hello") == "frozen":
        brief = server.hello["brief"]
        changed = {**brief, "config": brief["config"].replace("learning_rate = 0.05", "learning_rate = 0.04")}
        assert changed != brief
        lie = {"hello": {**server.hello, "brief": changed}}
    with pytest.raises(TrustError, match="or sent it another message"):
        server.summed(dict.fromkeys(OTHERS, lie))


def test_a_round_cannot_be_replayed_by_way_of_another_experiment(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.summed({})
    other = {**server.hello, "brief": {**server.hello["brief"]}}
    other["brief"]["config"] = other["brief"]["config"].replace("learning_rate = 0.05", "learning_rate = 0.04")
    with pytest.raises(TrustError, match="refused round 1: what it learned in round 1 was summed already"):
        server.train(VICTIM)
    server.train(VICTIM, round=2, hello=other)  # a device holds one experiment at a time
    with pytest.raises(TrustError, match="refused round 1: what it learned in round 1 was summed already"):
        server.train(VICTIM)
    server.train(VICTIM, round=2)


def test_a_round_cannot_be_replayed_by_way_of_a_run_that_the_server_invents(tmp_path: Path) -> None:
    """The others learn the same again, bit for bit: without the victim, the difference of sums would be its update."""
    server = Server(tmp_path)
    server.summed({})
    again = {**server.hello, "run": "0123abcd"}
    server.train("e", hello=again)  # this device was in no sum
    for name in OTHERS:
        with pytest.raises(TrustError, match=r"the same message was summed in another run.*another seed"):
            server.train(name, hello=again)
    server.train(VICTIM, round=2, hello=again)


def test_a_server_that_compares_sums_over_almost_the_same_network_sees_what_one_device_learned(tmp_path: Path) -> None:
    """The page says so: no device can tell that another run, with one number changed, leaves it out."""
    server = Server(tmp_path)
    ticket = server.message[VICTIM].ticket.to_json() | {"rate": 0.05}
    sent = SubModel(server.message[VICTIM].tensors, Ticket.from_json(ticket))
    (learned,) = fleet.inside(server.experiment, server.wire.home).perform([sent])
    own = words_of(learned, sent, server.experiment.context.tricks).view("int64")[2:].astype(float)

    def nudged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["network.head.bias"][0] += 1e-6
        return changed

    lie = {"hello": {**server.hello, "run": "0123abcd"}, "tensors": nudged}
    without = server.summed(dict.fromkeys(OTHERS, lie), names=OTHERS).view("int64").astype(float)
    difference = (server.summed({}).view("int64").astype(float) - without)[2:]
    assert np.corrcoef(difference, own)[0, 1] > 0.999


def test_a_device_that_was_started_again_remembers_its_sums(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.summed({})
    server.wire.desks.clear()  # their processes end
    with pytest.raises(TrustError, match="refused round 1: what it learned in round 1 was summed already"):
        server.train(VICTIM)
    with pytest.raises(TrustError, match="the same message was summed in another run"):
        server.train(VICTIM, hello={**server.hello, "run": "0123abcd"})
    server.train(VICTIM, round=2)


def test_a_device_that_cannot_remember_a_sum_tells_nothing_in_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    (server.wire.home / "devices" / VICTIM / SUMMED).mkdir()
    server.wire.desks.clear()
    with pytest.raises(ConfigError, match="does not say what this device told in secure sums"):
        server.train(VICTIM)
    (server.wire.home / "devices" / VICTIM / SUMMED).rmdir()
    memory = Summed(tmp_path / "none" / SUMMED)
    with pytest.raises(TrustError, match="could not write"):
        memory.note("ab", 1, b"message")
    memory.check("ab", 1, b"message")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rounds": {"a": 1}}', '{"rounds": {"a": "1"}, "messages": []}', '{"rounds": [], "messages": 3}'],
)
def test_a_damaged_memory_of_sums_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMED).write_text(text)
    with pytest.raises(ConfigError, match=f"{SUMMED} does not say what this device told"):
        Summed(tmp_path / SUMMED)


def test_numbers_written_in_several_ways_do_not_make_a_sum_larger(tmp_path: Path) -> None:
    server = Server(tmp_path)
    keys = membership.key_texts({0: server.train(VICTIM), 1: server.train("b")})
    with pytest.raises(TrustError, match="a sum over 2 devices was asked for; this one takes part in 3"):
        server.step(VICTIM, "shares", keys | {"00": keys["0"], " 1": keys["1"], "01": keys["1"]})


def test_a_key_that_the_server_puts_in_place_of_a_devices_is_noticed() -> None:
    """To one member alone: the others' shares say which keys they were shown."""
    for which in ("mask", "post"):
        members = {number: masking.Member(number, 3) for number in range(4)}
        keys = {number: member.keys() for number, member in members.items()}
        false = keys | {2: keys[2]._replace(**{which: getattr(masking.Member(2, 3).keys(), which)})}
        shares = {number: member.shares(false if number == 0 else keys) for number, member in members.items()}
        for number in (0, 1):
            given = {other: own[number] for other, own in shares.items() if other != number}
            with pytest.raises(TrustError, match=r"of other members|not what it encrypted"):
                members[number].words(given, np.zeros(3, dtype=np.uint64))


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (3, 3), (4, 3), (5, 3), (6, 4), (7, 5)])
def test_no_tale_about_who_left_gets_both_secrets_of_a_member(count: int, threshold: int) -> None:
    """All tales in which each member hears of one set of survivors: of nobody come enough shares of both secrets."""
    least = masking.needed(count, threshold)
    tales = [set(alive) for size in range(least, count + 1) for alive in itertools.combinations(range(count), size)]
    # What a member tells of the victim depends on whether the victim is in its tale, and it must be itself in it.
    told = {member: {0 in alive for alive in tales if member in alive} for member in range(count)}
    most_seeds = sum(True in own for own in told.values())
    members_of_both = [member for member, own in told.items() if own == {True, False}]
    for split in range(len(members_of_both) + 1):
        keys = len([member for member, own in told.items() if own == {False}]) + split
        seeds = most_seeds - split
        assert not (seeds >= least and keys >= least)


def test_a_server_that_tells_of_a_drop_out_to_some_members_cannot_unmask_it() -> None:
    """Half of the members hear that member 0 left, half that it stayed; the server takes what it gets."""
    members = {number: masking.Member(number, 3) for number in range(7)}
    keys = {number: member.keys() for number, member in members.items()}
    server = masking.Collector(3)
    shares = server.passed_on({n: member.shares(server.met(keys)) for n, member in members.items()})
    words = {n: member.words(shares[n], np.full(5, n, dtype=np.uint64)) for n, member in members.items()}
    for number, own in words.items():
        server.add(number, own)
    told = {n: members[n].unmask([1, 2, 3, 4, 5, 6] if n in (1, 2, 3) else range(7)) for n in members}
    with pytest.raises(TrustError, match=r"4 devices of its size were left, and a sum that hides each needs 5"):
        server._combined(0, {n: told[n] for n in (0, 4, 5, 6)})  # shares of the seed
    with pytest.raises(TrustError, match=r"3 devices of its size were left, and a sum that hides each needs 5"):
        server._combined(0, {n: told[n] for n in (1, 2, 3)})  # shares of the key
    with pytest.raises(TrustError, match=r"not fit together|make no key|another key"):
        server._private(0, told)  # both kinds mixed are shares of nothing
    with pytest.raises(TrustError, match='next step of this sum is "done"'):
        members[4].unmask([1, 2, 3, 4, 5, 6])


def test_a_sum_over_more_devices_than_can_be_is_refused_before_shares_are_made() -> None:
    member = masking.Member(0, 3)
    own = member.keys()
    with pytest.raises(TrustError, match=f"a sum over {CLIENTS + 1} devices was asked for; it can have {CLIENTS}"):
        member.shares({0: own} | {n: masking.Keys(b"%d" % n, b"x%d" % n) for n in range(1, CLIENTS + 1)})


def test_what_is_left_of_a_sum_after_a_mistake_is_thrown_away(tmp_path: Path) -> None:
    """A device that was asked for something wrong does not go on with the same masks."""
    server = Server(tmp_path)
    place = {name: server.message[name].ticket.client for name in (VICTIM, *OTHERS)}
    keys = membership.key_texts({place[name]: server.train(name) for name in place})
    shares = {place[n]: membership.blobs_in(server.step(n, "shares", keys)[0]["shares"]) for n in place}
    mine = {other: own[place[VICTIM]] for other, own in shares.items() if other != place[VICTIM]}
    few = membership.texts(dict(itertools.islice(mine.items(), 1)))
    with pytest.raises(TrustError, match="only 2 of 4 devices are left"):
        server.step(VICTIM, "words", few)
    with pytest.raises(TrustError, match="a sum that it has no part in"):
        server.step(VICTIM, "words", membership.texts(mine))
