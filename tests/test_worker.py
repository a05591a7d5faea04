"""A device's worker, with a SuperLink that is a list of messages in memory."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

from anysize.wire import Json

pytest.importorskip("flwr", reason="Flower is an extra")
flower = importlib.import_module("flwr.app")
forms = importlib.import_module("flwr.app.message.message")
inflatable = importlib.import_module("flwr.supercore.inflatable.inflatable_object")
records = importlib.import_module("anysize.engines.flower_records")
runs = importlib.import_module("flwr.supercore.run")
worker = importlib.import_module("anysize.deploy.worker")


class Superlink:
    """What Flower's connection of a node gives, with messages in memory."""

    def __init__(self, *messages: Any) -> None:
        self.waiting, self.objects, self.replies = list(messages), dict[str, bytes](), list[Any]()
        self.confirmed: list[str] = []

    def connected(self) -> tuple[Any, ...]:
        return (7, self.receive, self.send, None, None, self.pull, self.push, self.confirm)

    def receive(self) -> tuple[Any, Any] | None:
        if not self.waiting:
            raise KeyboardInterrupt  # as if the device was stopped
        message = self.waiting.pop(0)
        self.objects |= {name: part.deflate() for name, part in inflatable.get_all_nested_objects(message).items()}
        return forms.remove_content_from_message(message), inflatable.get_object_tree(message)

    def pull(self, run: int, name: str) -> bytes:
        return self.objects[name]

    def confirm(self, run: int, name: str) -> None:
        self.confirmed.append(name)

    def send(self, message: Any, tree: Any, seconds: float) -> tuple[set[str], str]:
        self.replies.append(message)
        return set(), "session"

    def push(self, *given: Any) -> None:
        raise AssertionError("the server has all objects already")


def message_from_the_server(note: Json) -> Any:
    """A message as the SuperLink holds it."""
    about = flower.Metadata(3, "", 1, 7, "", "1", time.time(), 60.0, "train")
    message = forms.make_message(about, records.with_note(note, records.record([b"tensors"])))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def test_a_worker_answers_one_message_after_another_by_itself(tmp_path: Path) -> None:
    sent = [message_from_the_server({"place": place}) for place in range(2)]
    superlink, seen = Superlink(*sent), list[tuple[Json, list[bytes], bool]]()
    came, held = list[Any](), list[list[str]]()
    send = superlink.send

    def sending(*given: Any) -> Any:
        held.append(list(came[-1].content))
        return send(*given)

    superlink.send = sending  # type: ignore[method-assign]

    def answer(message: Any) -> Any:
        came.append(message)
        seen.append((records.note_in(message.content), records.blobs_in(message.content), (tmp_path / "open").exists()))
        return flower.Message(records.with_note({"done": True}, records.record([])), reply_to=message)

    with pytest.raises(KeyboardInterrupt):
        worker.Node(superlink.connected(), tmp_path / "open").work(answer)
    assert seen == [({"place": place}, [b"tensors"], True) for place in range(2)]
    assert [reply.metadata.reply_to_message_id for reply in superlink.replies] == [one.object_id for one in sent]
    assert held == [[]] * 2, "what came is freed before the answer is packed"
    assert superlink.confirmed == [one.object_id for one in sent]
    assert not (tmp_path / "open").exists()


def test_a_worker_that_died_in_a_job_tells_the_server_when_it_starts_again(tmp_path: Path) -> None:
    sent = message_from_the_server({})

    def dies(message: Any) -> Any:
        raise SystemExit(137)

    with pytest.raises(SystemExit):
        worker.Node(Superlink(sent).connected(), tmp_path / "open").work(dies)
    after = Superlink()
    with pytest.raises(KeyboardInterrupt):
        worker.Node(after.connected(), tmp_path / "open").work(dies)
    (told,) = after.replies
    assert told.has_error()
    assert told.metadata.reply_to_message_id == sent.object_id
    assert told.metadata.dst_node_id == 1
    assert not (tmp_path / "open").exists()


@pytest.mark.parametrize("rest", [b"", b"\x0a\xff"])
def test_a_worker_that_died_as_it_noted_a_message_starts_again_all_the_same(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "open").write_bytes(rest)
    superlink = Superlink(message_from_the_server({}))
    with pytest.raises(KeyboardInterrupt):
        worker.Node(superlink.connected(), tmp_path / "open").work(
            lambda message: flower.Message(records.with_note({}, records.record([])), reply_to=message)
        )
    assert len(superlink.replies) == 1
    assert not superlink.replies[0].has_error()


def work(superlink: Superlink, folder: Path) -> None:
    """Answer every message of a SuperLink."""
    with pytest.raises(KeyboardInterrupt):
        worker.Node(superlink.connected(), folder / "open").work(
            lambda message: flower.Message(records.with_note({"done": True}, records.record([])), reply_to=message)
        )
    assert not (folder / "open").exists()


def failing(times: int, way: Any) -> Any:
    """The same way, which fails that often first."""
    left = [times]

    def takes(*given: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("the line is down")
        return way(*given)

    return takes


@pytest.mark.parametrize("way", ["pull", "confirm", "send"])
def test_a_transfer_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    superlink, waits = Superlink(message_from_the_server({})), list[float]()
    monkeypatch.setattr(worker.time, "sleep", waits.append)
    monkeypatch.setattr(superlink, way, failing(2, getattr(superlink, way)))
    work(superlink, tmp_path)
    (reply,) = superlink.replies
    assert records.note_in(reply.content) == {"done": True} if reply.has_content() else not reply.has_error()
    assert waits == [1.0, 4.0]


@pytest.mark.parametrize(
    "way, told", [("pull", "could not fetch its message"), ("send", "could not deliver its answer")]
)
def test_the_server_learns_of_a_transfer_that_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, told: str
) -> None:
    """Otherwise it would wait until the round's time is over: it gives a message only once."""
    superlink = Superlink(
        first := message_from_the_server({"place": 0}), second := message_from_the_server({"place": 1})
    )
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(superlink, way, failing(len(worker.AGAIN) + 1, getattr(superlink, way)))
    work(superlink, tmp_path)
    failed, answered = superlink.replies
    assert (failed.has_error(), answered.has_error()) == (True, False)
    assert failed.error.reason == f"{told}: OSError; its own log says more"
    assert failed.metadata.reply_to_message_id == first.object_id
    assert answered.metadata.reply_to_message_id == second.object_id


def test_a_worker_that_reaches_nobody_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [message_from_the_server({"place": place}) for place in range(2)]
    superlink = Superlink(*sent)
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(superlink, "send", failing(2 * (len(worker.AGAIN) + 1), superlink.send))
    work(superlink, tmp_path)
    (reply,) = superlink.replies
    assert reply.metadata.reply_to_message_id == sent[1].object_id


def test_a_message_whose_run_has_ended_costs_a_worker_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = [message_from_the_server({"place": place}) for place in range(2)]
    superlink = Superlink(*sent)
    superlink.pull = lambda run, name: (  # type: ignore[method-assign]
        superlink.objects[name] if sent[1].object_id in superlink.objects else _gone()
    )
    waits: list[float] = []
    monkeypatch.setattr(worker.time, "sleep", waits.append)
    node = worker.Node(superlink.connected(), tmp_path / "open")
    with pytest.raises(KeyboardInterrupt):
        node.work(lambda message: flower.Message(records.with_note({}, records.record([])), reply_to=message))
    assert [reply.metadata.reply_to_message_id for reply in superlink.replies] == [sent[1].object_id]
    assert len(waits) == 1
    assert caplog.messages == ["a message could not be fetched: its run has ended"]


def _gone() -> bytes:
    raise runs.RunNotRunningException


class Grid:
    """What Flower gives the server's part of a run: an answer to each message, of which one cannot be unpacked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def pull_messages(self, asked: list[str]) -> list[Any]:
        found = [self.answers[one] for one in asked if one in self.answers]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found


def test_an_answer_that_cannot_be_unpacked_costs_no_other_one() -> None:
    links = importlib.import_module("anysize.deploy.link")
    sent = message_from_the_server({})
    partial = flower.Error(3, "Reply message objects are unavailable. The sender may not have completed the upload")
    grid = Grid(
        {
            "good": flower.Message(records.with_note({"done": True}, records.record([])), reply_to=sent),
            "bad": ValueError("unexpected format for object head"),
            "half": flower.Message(partial, reply_to=sent),
        }
    )
    found = links.GridLink(grid).replies(["bad", "good", "half", "none"])
    assert set(found) == {"good", "bad", "half"}
    assert records.note_in(found["good"].content) == {"done": True}
    assert found["bad"] == links.Reply(None, "sent an answer that cannot be read (ValueError)")
    assert found["half"] == links.Reply(None, "sent an answer that did not arrive whole")


def test_a_run_that_has_lost_its_own_superlink_does_not_blame_the_devices() -> None:
    links, httpx = importlib.import_module("anysize.deploy.link"), importlib.import_module("httpx")
    with pytest.raises(httpx.ConnectError):
        links.GridLink(Grid({"one": httpx.ConnectError("no server")})).replies(["one"])
