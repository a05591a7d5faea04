"""What was equal in a comparison and what was not, in plain sentences, from the runs themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anysize.comparisons.outcomes import Outcome
from anysize.comparisons.tuning import Choice
from anysize.config.toml import flat, inline

_ASIDE = ("name", "seed", "method", "engine", "checkpoint_every", "compare")
"""Keys that make no difference to what is learned, or that are the subject of a comparison."""


def statements(outcomes: Sequence[Outcome], choices: Mapping[tuple[str, str], Choice]) -> list[str]:
    """Sentences on what was equal and what was not; those that hold in every setting come once.

    Args:
        outcomes: the finished runs.
        choices: what was tuned, by setting and label.
    """
    settings = list(dict.fromkeys(outcome.setting for outcome in outcomes))
    by_setting = {
        setting: list(
            _of_setting(
                [outcome for outcome in outcomes if outcome.setting == setting],
                {label: choice for (where, label), choice in choices.items() if where == setting},
            )
        )
        for setting in settings
    }
    common = [line for line in by_setting[settings[0]] if all(line in lines for lines in by_setting.values())]
    own = [f"{setting}: {line}" for setting, lines in by_setting.items() for line in lines if line not in common]
    return [*common, *own, *_seeds(outcomes), *_best(outcomes)]


def _of_setting(outcomes: Sequence[Outcome], choices: Mapping[str, Choice]) -> Iterable[str]:
    tuned = {key for choice in choices.values() for key in choice.values}
    keys = differing(outcomes)
    left = {key: values for key, values in keys.items() if key not in tuned}
    first = outcomes[0].config
    devices = f"{first.data.clients} clients, " if first.data.clients else ""
    yield (
        f"Equal: {first.model.name} on {first.data.name}, {devices}and every other key of the experiment but the "
        f"method and its options{', and what the next lines name' if left or tuned else ''}."
    )
    for key, values in left.items():
        yield f"Not equal: {key} = {_by_value(values)}."
    for key in sorted(tuned):
        yield _tuned(key, choices)
    yield _participants(outcomes)
    yield from _spent(outcomes)


def differing(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By dotted key, the value of every label, where not all are equal; the methods' own options are left out."""
    flats = {outcome.label: flat(outcome.config.to_dict()) for outcome in outcomes}
    keys = dict.fromkeys(key for values in flats.values() for key in values)
    found = {}
    for key in keys:
        if key.split(".")[0] in _ASIDE:
            continue
        values = {label: own.get(key) for label, own in flats.items()}
        if len({repr(value) for value in values.values()}) > 1:
            found[key] = values
    return found


def _by_value(values: Mapping[str, Any]) -> str:
    """The labels that have each value: `true for a, b; false for c`."""
    groups: dict[str, list[str]] = {}
    for label, value in values.items():
        groups.setdefault("absent" if value is None else inline(value), []).append(label)
    return "; ".join(f"{text} for {_listed(labels)}" for text, labels in groups.items())


def _listed(labels: Iterable[str]) -> str:
    """The labels in a row, in quotes where one holds a comma itself."""
    return ", ".join(f"“{label}”" if "," in label else label for label in labels)


def _tuned(key: str, choices: Mapping[str, Choice]) -> str:
    having = {label: choice for label, choice in choices.items() if key in choice.values}
    first = next(iter(having.values()))
    tried = dict.fromkeys(inline(values[key]) for choice in having.values() for values, _ in choice.scores)
    return (
        f"Tuned: {key}, one of {', '.join(tried)}, by the mean over clients on their held-out data, with seed "
        f"{first.seed} alone and {first.rounds} rounds: "
        f"{_by_value({label: choice.values[key] for label, choice in having.items()})}."
    )


def _participants(outcomes: Sequence[Outcome]) -> str:
    """Whether the same clients took part in the same rounds, by what the runs wrote down."""
    other = []
    for seed in dict.fromkeys(outcome.seed for outcome in outcomes):
        same = [outcome for outcome in outcomes if outcome.seed == seed]
        other += [outcome.label for outcome in same if outcome.participants != same[0].participants]
    if other:
        return f"Not equal: who took part in which round ({_listed(dict.fromkeys(other))})."
    rounds = sorted({len(outcome.rounds) for outcome in outcomes})
    return (
        f"Equal, as the runs wrote it down: {' or '.join(map(str, rounds))} rounds, and with equal seeds the same "
        "clients in the same rounds."
    )


def _spent(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """What the methods cost in all, since equal rounds are not equal cost."""
    for unit, words in (("bytes", "traffic of all rounds"), ("training_macs", "multiply-adds of all training")):
        totals: dict[str, list[float]] = {}
        for outcome in outcomes:
            totals.setdefault(outcome.label, []).append(list(outcome.spent.values())[-1][unit])
        means = {label: sum(values) / len(values) for label, values in totals.items()}
        least = min(means.values()) or 1.0
        if max(means.values()) <= 1.01 * least:
            yield f"Equal: the {words}, within 1 %."
        else:
            times = ", ".join(
                f"{_listed([label])} {mean / least:.2f}" for label, mean in sorted(means.items(), key=_second)
            )
            yield f"Not equal: the {words}, as multiples of the least: {times}."


def _second(entry: tuple[str, float]) -> float:
    return entry[1]


def _seeds(outcomes: Sequence[Outcome]) -> Iterable[str]:
    counts = {len([other for other in outcomes if _group(other) == _group(outcome)]) for outcome in outcomes}
    if counts == {1}:
        yield "One seed: there is no spread, and small differences mean nothing."
    elif len(counts) > 1:
        yield f"Not equal: the number of finished seeds, from {min(counts)} to {max(counts)}."


def _group(outcome: Outcome) -> tuple[str, str]:
    return outcome.setting, outcome.label


def _best(outcomes: Sequence[Outcome]) -> Iterable[str]:
    judged = "the test set" if outcomes[0].judged_on == "test" else "clients' held-out data"
    if all(len(outcome.mean_curve) > 1 for outcome in outcomes):
        yield (
            f"The last round is the result. The best round is chosen by {judged} itself, of "
            f"{len(outcomes[0].mean_curve)} evaluations, and therefore too good; it is there because papers often "
            "print it."
        )
    if outcomes[0].judged_on == "clients":
        yield (
            "Judged on clients' held-out data: a size by the clients that have it, so that different sizes are judged "
            "on different samples."
        )
