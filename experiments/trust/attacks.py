"""Runs every rule against every attack and writes results/attacks.csv; cells that are there already are not run again.

python experiments/trust/attacks.py [--seeds 0 1 2] [--attacks none sign-flip] [--settings iid "3 classes"]
    [--rules mean norm-filter]
python experiments/trust/attacks.py --table        # writes the table of README.md anew
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
import time
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

from anysize import config
from anysize.attacks import backdoor_success
from anysize.errors import AnysizeError
from anysize.experiment.experiment import evaluation_part
from anysize.runs.experiment import Experiment

HERE = Path(__file__).parent
FILE, RESULTS = HERE / "attacks.toml", HERE / "results" / "attacks.csv"
RULES = ("mean", "norm-filter", "norm-clip", "median", "trimmed-mean", "krum", "geometric-median")
ATTACKS = {
    "none": [],
    "sign-flip": ["adversary.name=sign-flip"],
    "sign-flip, not scaled": ["adversary.name=sign-flip", "adversary.strength=1"],
    "sign-flip by the largest": ["adversary.name=sign-flip", "adversary.who=largest"],
    "scale": ["adversary.name=scale"],
    "noise": ["adversary.name=noise"],
    "inner-product": ["adversary.name=inner-product"],
    "label-flip": ["adversary.name=label-flip"],
    "backdoor": ["adversary.name=backdoor"],
}
SETTINGS = {"iid": [], "3 classes": ["data.split=classes", "data.classes_per_client=3"]}
SIZES = ("0.25", "0.5", "0.75", "1.0")
KEYS = ("setting", "attack", "rule", "seed")
COUNTS = ("attackers", "attackers_left_out", "honest", "honest_left_out")
MARK = re.compile(r"(<!-- table -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
COLUMNS = (*KEYS, *SIZES, "backdoor", "diverged", *COUNTS, "cpu_seconds", "command")


def measured(setting: str, attack: str, rule: str, seed: int) -> dict[str, object]:
    """One row: the accuracy of every size after the last round; chance, if training diverged."""
    overrides = [f"seed={seed}", f"aggregation.rule={rule}", *SETTINGS[setting], *ATTACKS[attack]]
    began = time.process_time()
    row: dict[str, object] = {"setting": setting, "attack": attack, "rule": rule, "seed": seed, "diverged": 0}
    experiment = Experiment.from_config(config.load(FILE, overrides))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = experiment.run(folder, overwrite=True)
            row |= {label: round(value, 4) for label, value in run.history[-1]["accuracy"].items()}
            row |= counted(run.history, experiment.attackers)
            if attack in ("none", "backdoor"):
                row["backdoor"] = round(backdoor_success(run.customize("1.0"), evaluation_part(experiment)), 4)
    except AnysizeError as error:
        print(error)
        row |= dict.fromkeys(SIZES, 0.1) | {"diverged": 1}
    command = (
        f'python experiments/trust/attacks.py --seeds {seed} --attacks "{attack}" --settings "{setting}" --rules {rule}'
    )
    return row | {"cpu_seconds": round(time.process_time() - began, 1), "command": command}


def counted(history: list[dict[str, Any]], attackers: Collection[int]) -> dict[str, int]:
    """How many updates attackers and honest clients sent in all rounds, and how many of them were left out."""
    kept = [entry["client"] for event in history for entry in event["clients"]]
    out = [entry["client"] for event in history for entry in event.get("missing", ())]
    lied, fooled = (sum(client in attackers for client in some) for some in (kept, out))
    return dict(zip(COUNTS, (lied + fooled, fooled, len(kept) + len(out) - lied - fooled, len(out) - fooled)))


def table(rows: list[dict[str, str]]) -> str:
    """Accuracy in %, the mean over all sizes and the seeds that were run, with their number, as Markdown."""
    lines = [f"| setting, attack | {' | '.join(RULES)} |", "| --- " * (len(RULES) + 1) + "|"]
    for setting, attack in product(SETTINGS, ATTACKS):
        own = [row for row in rows if (row["setting"], row["attack"]) == (setting, attack)]
        if own:
            cells = [_cell([row for row in own if row["rule"] == rule]) for rule in RULES]
            lines.append(f"| {setting}, {attack} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rows: list[dict[str, str]]) -> str:
    values = [float(row[size]) for row in rows for size in SIZES]
    return f"{100 * sum(values) / len(values):.1f} ({len(rows)})" if values else "-"


def recorded() -> list[dict[str, str]]:
    """The rows that are there already."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shown(page: str) -> str:
    """The page with the table between its marks."""
    return MARK.sub(lambda found: f"{found[1]}{table(recorded())}\n{found[3]}", page)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked.add_argument("--attacks", nargs="+", default=list(ATTACKS))
    asked.add_argument("--settings", nargs="+", default=list(SETTINGS))
    asked.add_argument("--rules", nargs="+", default=list(RULES))
    asked.add_argument("--table", action="store_true", help="write the README's table anew instead")
    given = asked.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    if given.table:
        page = HERE / "README.md"
        page.write_text(shown(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    rows = recorded()
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for seed, attack, setting, rule in product(given.seeds, given.attacks, given.settings, given.rules):
        if (setting, attack, rule, str(seed)) in done:
            continue
        row = measured(setting, attack, rule, seed)
        print(row, flush=True)
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
