"""An engine in which some of the clients that another engine runs attack."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from anysize.attacks.updates import Attack
from anysize.client.shards import Evaluation
from anysize.devices.fleet import Fleet
from anysize.engines.base import Absence, Engine
from anysize.methods.messages import SubModel, Update
from anysize.methods.steps import step_of
from anysize.tasks import Sums
from anysize.wire import copies


class Malicious(Engine):
    """Lets an engine run all clients honestly, and changes what attackers answer when they train.

    An attack that needs the round's honest updates holds all answers of the round.

    Args:
        engine: runs the clients.
        attack: what attackers do.
        attackers: which clients these are.
    """

    def __init__(self, engine: Engine, attack: Attack, attackers: Collection[int]) -> None:
        self._engine = engine
        self._attack = attack
        self._attackers = attackers

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        sent: deque[SubModel] = deque()

        def noted() -> Iterator[SubModel]:
            for sub_model in sub_models:
                sent.append(sub_model)
                yield sub_model

        pairs: Iterator[tuple[SubModel, Update | Absence]] = (
            (sent.popleft(), answer) for answer in self._engine.perform(noted())
        )
        if self._attack.needs_honest:
            held = [(message, _copied(answer)) for message, answer in pairs]
            pairs = iter(held)
            honest = [(m, a) for m, a in held if isinstance(a, Update) and m.ticket.client not in self._attackers]
        else:
            honest = []
        for message, answer in pairs:
            yield self._changed(message, answer, honest)

    def _changed(
        self, message: SubModel, answer: Update | Absence, honest: Sequence[tuple[SubModel, Update]]
    ) -> Update | Absence:
        """An attacker's answer; any other as it is."""
        ticket = message.ticket
        if isinstance(answer, Absence) or ticket.job != "train" or ticket.client not in self._attackers:
            return answer
        alike = [step_of(m.tensors, a.tensors) for m, a in honest if _form(m) == _form(message)]
        names = (ticket.round, ticket.client)
        return replace(answer, tensors=self._attack.answer(message.tensors, answer.tensors, names, alike))

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """Who is there, as the engine below says."""
        return self._engine.fleet(round, planned)

    def evaluate(self, evaluation: Evaluation) -> Iterator[Sums]:
        """The sums of each shard, by the engine below."""
        return self._engine.evaluate(evaluation)

    def close(self) -> None:
        """Closes the engine below."""
        self._engine.close()


def _copied(answer: Update | Absence) -> Update | Absence:
    return answer if isinstance(answer, Absence) else replace(answer, tensors=copies(answer.tensors))


def _form(message: SubModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in message.tensors.items()}
