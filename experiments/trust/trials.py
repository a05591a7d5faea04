"""What was tried before norm-filter was chosen, judged on clients' held-out data alone: HeteroFL on the benchmark.

    python experiments/trust/trials.py updates iid
    python experiments/trust/trials.py rule "3 classes" sign-flip direction [seed]
    python experiments/trust/trials.py tables

The first looks at the updates of a run without attackers, in which nothing is left out, and prints rows of
results/updates.csv. The second trains under an attack, as attacks.toml says, for 60 rounds, and prints
a row of results/trials.csv: the accuracy of every size, how many attackers sent an update and how many of these were
left out, and the same of honest clients. The third prints the tables of README.md. Rules:

    mean                    nothing is done
    clip by size            cut to the median norm of the updates of the same size (norm-clip)
    clip                    cut to the median norm of all updates
    filter                  left out if longer than twice that
    filter and clip         both (norm-filter)
    direction               both, and of the rest at most a fifth of all are left out, if their mean cosine with the
                            other updates, over the entries that both have, is below zero
    remembered direction    the same with the cosine with the server's last steps (their average of decay 0.8)
    center                  cut to the median distance from the server's last step (Karimireddy et al. 2021)
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from anysize.attacks import Attack
from anysize.client.process import one_thread
from anysize.config import load
from anysize.engines.base import Engine
from anysize.engines.inprocess import InProcess
from anysize.engines.malicious import Malicious
from anysize.errors import AnysizeError
from anysize.experiment.experiment import Experiment
from anysize.methods.messages import SubModel, Update
from anysize.methods.steps import moved, norm_of, step_of
from anysize.wire import Tensors, copies

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmark"))
import trials as benchmark  # noqa: E402 - the benchmark's own trials, which judge on held-out data too

SETTINGS = {"iid": [], "3 classes": ["data.split=classes", "data.classes_per_client=3"]}
LOOKED_AT = (1, 2, 5, 10, 20, 30, 40, 50)


@dataclass
class Round:
    """The updates of a round as steps, and what the server remembers.

    Attributes:
        labels: the size of each update.
        steps: how far each moved.
        last: the server's last steps, averaged; empty in the first round.
    """

    labels: list[str]
    steps: list[Tensors]
    last: Tensors = field(default_factory=dict)

    def norms(self) -> list[float]:
        return [norm_of(step) for step in self.steps]


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The entries of a tensor that a smaller one has: widths are nested."""
    return tensor[tuple(slice(min(sizes)) for sizes in zip(tensor.shape, like.shape))]


def cosine(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Of two steps, over the entries that both have."""
    pairs = [(part(one[name], other[name]), part(other[name], one[name])) for name in one if name in other]
    product = sum(float((a * b).sum()) for a, b in pairs)
    squares = [sum(float(pair[i].square().sum()) for pair in pairs) for i in (0, 1)]
    return product / max(math.sqrt(squares[0] * squares[1]), 1e-30)


Factors = Sequence[float]
"""By how much each step is multiplied; 0 leaves an update out."""


def by_size(round: Round) -> Factors:
    norms = round.norms()
    bounds = {
        label: statistics.median(n for n, own in zip(norms, round.labels) if own == label) for label in round.labels
    }
    return [min(1.0, bounds[label] / max(norm, 1e-30)) for norm, label in zip(norms, round.labels)]


def clip(round: Round) -> Factors:
    bound = statistics.median(round.norms())
    return [min(1.0, bound / max(norm, 1e-30)) for norm in round.norms()]


def filtered(round: Round) -> Factors:
    bound = statistics.median(round.norms())
    return [float(norm <= 2 * bound) for norm in round.norms()]


def both(round: Round) -> Factors:
    return [a * b for a, b in zip(clip(round), filtered(round))]


def without(factors: Factors, scores: Mapping[int, float]) -> Factors:
    """The factors, 0 for those with the lowest scores below zero: at most a fifth of all, with those already out."""
    most = math.ceil(0.2 * len(factors)) - sum(factor == 0 for factor in factors)
    worst = sorted((i for i in scores if scores[i] < 0), key=scores.__getitem__)[: max(0, most)]
    return [0.0 if i in worst else factor for i, factor in enumerate(factors)]


def direction(round: Round) -> Factors:
    factors = both(round)
    kept = [i for i, factor in enumerate(factors) if factor]
    cosines = {pair: cosine(round.steps[pair[0]], round.steps[pair[1]]) for pair in itertools.combinations(kept, 2)}
    scores = {i: sum(value for pair, value in cosines.items() if i in pair) for i in kept}
    return without(factors, scores)


def remembered(round: Round) -> Factors:
    factors = both(round)
    if not round.last:
        return factors
    return without(factors, {i: cosine(step, round.last) for i, step in enumerate(round.steps) if factors[i]})


RULES: dict[str, Callable[[Round], Factors]] = {
    "mean": lambda round: [1.0] * len(round.steps),
    "clip by size": by_size,
    "clip": clip,
    "filter": filtered,
    "filter and clip": both,
    "direction": direction,
    "remembered direction": remembered,
}
DECAY = {"remembered direction": 0.8, "center": 0.0}


def centered(round: Round) -> list[Tensors]:
    """The steps, no further from the server's last one than the median."""
    middle = [{name: part(round.last[name], t) if round.last else 0 * t for name, t in s.items()} for s in round.steps]
    away = [{name: t - m[name] for name, t in s.items()} for s, m in zip(round.steps, middle)]
    bound = statistics.median(map(norm_of, away))
    cut = [min(1.0, bound / max(norm_of(own), 1e-30)) for own in away]
    return [{name: m[name] + c * t for name, t in a.items()} for a, m, c in zip(away, middle, cut)]


def changed(rule: str, round: Round) -> list[Tensors | None]:
    """The steps after a rule; None for those that are left out."""
    if rule == "center":
        return list(centered(round))
    factors = RULES[rule](round)
    # A step that is not cut stays the very same, so that its update keeps its bits.
    cut = [step if f == 1 else {name: f * t for name, t in step.items()} for f, step in zip(factors, round.steps)]
    return [step if f else None for f, step in zip(factors, cut)]


def train(experiment: Experiment, rule: str, look: Callable[[int, Round], None]) -> tuple[Any, dict[str, int]]:
    """The state after the last round, and how many updates came and were left out."""
    context, method, config = experiment.context, experiment.method, experiment.config
    costs = {size.label: experiment.cost(size).training_macs for size in context.sizes}
    engine: Engine = InProcess(context, method, experiment.shares, {})
    attack = Attack(config.adversary, config.seed)
    if experiment.attackers and attack.on_updates:
        engine = Malicious(engine, attack, experiment.attackers)
    state, last, counts = method.init(context), dict[str, torch.Tensor](), dict.fromkeys(COUNTS, 0)
    for number in range(1, config.rounds + 1):
        rate = config.training.rate(number - 1, config.rounds)
        clients = benchmark.participants(experiment, number, costs)
        sent = [with_rate(method.extract(context, state, client), rate) for client in clients]
        updates = [replace(u, tensors=copies(u.tensors)) for u in engine.perform(iter(sent)) if isinstance(u, Update)]
        steps = [step_of(message.tensors, update.tensors) for message, update in zip(sent, updates)]
        round = Round([update.label for update in updates], steps, last)
        look(number, round)
        after = changed(rule, round)
        for update, step in zip(updates, after):
            who = "attackers" if update.ticket.client in experiment.attackers else "honest"
            counts[who] += 1
            counts[f"{who}_left_out"] += step is None
        kept = [
            update if step is own else replace(update, tensors=moved(message.tensors, update.tensors, step))
            for update, message, own, step in zip(updates, sent, steps, after)
            if step is not None
        ]
        before, state = state, method.aggregate(context, state, iter(kept))
        if rule in DECAY:
            own = step_of(before.tensors, state.tensors)
            decay = DECAY[rule] if last else 0.0
            last = {name: decay * last.get(name, 0 * t) + (1 - decay) * t for name, t in own.items()}
        if not all(bool(tensor.isfinite().all()) for tensor in state.tensors.values()):
            raise AnysizeError("diverged")
    return state, counts


COUNTS = ("attackers", "attackers_left_out", "honest", "honest_left_out")


def with_rate(message: SubModel, rate: float) -> SubModel:
    return replace(message, ticket=replace(message.ticket, rate=rate))


def made(setting: str, attack: str, seed: str) -> Experiment:
    under = [] if attack == "none" else [f"adversary.name={attack}"]
    return Experiment.from_config(load(HERE / "attacks.toml", [*SETTINGS[setting], *under, f"seed={seed}"]))


def updates(setting: str) -> None:
    """Print a row for some rounds of a run without attackers."""

    def look(number: int, round: Round) -> None:
        if number not in LOOKED_AT:
            return
        cosines = [cosine(a, b) for a, b in itertools.combinations(round.steps, 2)]
        norms, middle = round.norms(), statistics.median(round.norms())
        by_cosine = (statistics.median(cosines), min(cosines), max(cosines))
        row = [*by_cosine, min(norms) / middle, max(norms) / middle]
        command = f'python experiments/trust/trials.py updates "{setting}"'
        rarest = round.labels.count("1.0")
        csv.writer(sys.stdout).writerow(
            [setting, number, len(norms), rarest, *(f"{value:.3f}" for value in row), command]
        )

    train(made(setting, "none", "0"), "mean", look)


def rule(setting: str, attack: str, name: str, seed: str = "0") -> None:
    """Print the row of a trial."""
    began = time.process_time()
    experiment, counts = made(setting, attack, seed), dict[str, int]()
    try:
        state, counts = train(experiment, name, lambda number, round: None)
        found = [round(100 * accuracy, 2) for accuracy in benchmark.judged(experiment, state)]
    except AnysizeError:
        found = [10.0] * len(experiment.context.sizes)
    row = [
        setting,
        attack,
        name,
        seed,
        *found,
        round(sum(found) / len(found), 2),
        *(counts.get(key, "") for key in COUNTS),
    ]
    command = f'python experiments/trust/trials.py rule "{setting}" {attack} "{name}" {seed}'
    csv.writer(sys.stdout).writerow([*row, round(time.process_time() - began, 1), command])


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def trials_table() -> str:
    """By rule, the mean accuracy of the sizes in every setting and under every attack that was tried, as Markdown."""
    found = rows("trials")
    columns = list(dict.fromkeys((row["setting"], row["attack"]) for row in found))
    lines = [f"| rule | {' | '.join(map(', '.join, columns))} |", "| --- " * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(row["rule"] for row in found):
        own = {(row["setting"], row["attack"]): float(row["mean"]) for row in found if row["rule"] == name}
        lines.append(f"| {name} | {' | '.join(f'{own[c]:.1f}' if c in own else '-' for c in columns)} |")
    return "\n".join(lines)


def updates_table() -> str:
    """By setting and round, how alike updates are and how long, as Markdown."""
    lines = ["| setting | round | holders of the rarest entries | cosines | lengths, in medians |", "| --- " * 5 + "|"]
    for row in rows("updates"):
        low, middle, high = (float(row[key]) for key in ("cosine_lowest", "cosine_median", "cosine_highest"))
        lengths = f"{float(row['shortest']):.2f} to {float(row['longest']):.2f}"
        cosines = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"| {row['setting']} | {row['round']} | {row['largest']} of {row['clients']} | {cosines} | {lengths} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "tables":
        print(trials_table(), updates_table(), sep="\n\n")
    else:
        with one_thread():
            {"updates": updates, "rule": rule}[sys.argv[1]](*sys.argv[2:])
