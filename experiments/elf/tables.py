"""The accuracy tables of this folder's README from results/: `python experiments/elf/tables.py` writes them there.

Whatever stands between `<!-- table: NAME -->` and `<!-- end of table -->` is written anew.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

HERE = Path(__file__).parent
MARK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
ALONE = "each alone, dense"
ZEROS, HOLDERS = "eLF, zeros", "eLF, holders"
IID = "iid"


class Study(NamedTuple):
    """A table: the CSV it is made from, its networks, its lines as (what, split), and the paper's figures of some."""

    file: str
    head: str
    networks: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    splits: Mapping[str, str]
    paper: Mapping[tuple[str, str], Sequence[float | None]] = {}


TITLES = {"conv3": "Conv3", "conv5": "Conv5", "conv7": "Conv7"} | {f"resnet{n}": f"ResNet{n}" for n in (14, 20, 32)}
CONVOLUTIONS, RESIDUAL = tuple(TITLES)[:3], tuple(TITLES)[3:]
METHODS = {
    ALONE: "",
    ZEROS: "elf zeros",
    "eLF, the identity for removed blocks": "elf identity",
    HOLDERS: "elf holders",
}
"""The method of a line in the CSV; of a network alone it is the network."""
MORE = {
    "eLF, holders, Conv3 + Conv5 (Fig. 4)": "elf holders conv3 + conv5",
    "eLF, holders, Conv3 + Conv7": "elf holders conv3 + conv7",
    "eLF, holders, Conv5 + Conv7": "elf holders conv5 + conv7",
    "eLF, holders, FedProx, mu 200 (Fig. 5)": "elf holders fedprox",
    "eLF, holders, FedMAX, beta 10 (Fig. 5)": "elf holders fedmax",
}
PAIRS = {
    f"ResNet{small} + ResNet{large}": f"elf resnet{small} + resnet{large}"
    for small, large in ((14, 20), (14, 32), (20, 32))
}
THREE = (ALONE, ZEROS, HOLDERS)
FIVE, TWENTY = "5 classes, skewed", "20 classes, skewed"
STUDIES = {
    "residual": Study(
        "cifar10-16-residual",
        "CIFAR-10, one local epoch",
        RESIDUAL,
        tuple((what, split) for split in (IID, FIVE) for what in THREE),
        {IID: "iid", FIVE: "noniid"},
        {
            (ALONE, IID): (66.5, 70.8, 71.8),
            (ZEROS, IID): (None, None, 73.6),
            (ALONE, FIVE): (58.1, 63.5, 64.6),
            (ZEROS, FIVE): (None, None, 69.9),
        },
    ),
    "pairs": Study(
        "cifar10-16-pairs", "eLF with two depths, zeros", RESIDUAL, tuple((pair, IID) for pair in PAIRS), {IID: "iid"}
    ),
    "emnist": Study(
        "emnist",
        "EMNIST, one local epoch",
        CONVOLUTIONS,
        tuple((what, split) for split in (IID, TWENTY) for what in THREE),
        {IID: "iid", TWENTY: "noniid"},
        {
            (ALONE, IID): (77.6, 78.6, 79.8),
            (ZEROS, IID): (None, None, 79.7),
            (ALONE, TWENTY): (76.6, 77.6, 78.6),
            (ZEROS, TWENTY): (None, None, 78.5),
        },
    ),
    "fashion": Study(
        "fashion",
        "Fashion-MNIST, one local epoch",
        CONVOLUTIONS,
        (*((what, split) for split in (IID, FIVE) for what in METHODS), *((what, IID) for what in MORE)),
        {IID: "iid", FIVE: "noniid"},
    ),
}
LEADS = {"residual": (ZEROS, HOLDERS), "emnist": (HOLDERS,), "fashion": (HOLDERS,)}
"""For which lines of a study there is a table of how far they are ahead of every network alone."""


def rows(study: Study) -> list[dict[str, str]]:
    """The rows of the last round."""
    with (HERE / "results" / f"{study.file}.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    last = max(int(row["round"]) for row in found)
    return [row for row in found if int(row["round"]) == last]


def by_seed(study: Study, what: str, split: str, network: str) -> dict[str, float]:
    """Accuracy in percent by seed; nothing, if the line does not have this network."""
    method = (METHODS | MORE | PAIRS)[what] or network
    own = {"method": method, "split": study.splits[split], "network": network}
    found = [row for row in rows(study) if all(row[key] == value for key, value in own.items())]
    return {row["seed"]: 100 * float(row["accuracy"]) for row in found}


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation; how many there are, if not three."""
    if not values:
        return ""
    seeds = "" if len(values) == 3 else f" ({len(values)} seed{'s' * (len(values) > 1)})"
    return f"{mean(values):{sign}.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "") + seeds


def table(name: str) -> str:
    """Accuracy of every line at every network, the paper's in brackets."""
    study = STUDIES[name]
    lines = _head([study.head, "split", *(TITLES[network] for network in study.networks)])
    for what, split in study.lines:
        paper = study.paper.get((what, split), (None,) * len(study.networks))
        ours = [spread(list(by_seed(study, what, split, network).values())) for network in study.networks]
        cells = [f"{own} ({value})" if value else own for own, value in zip(ours, paper, strict=True)]
        lines.append(f"| {' | '.join([what, split, *cells])} |")
    return "\n".join([*lines, ""])


def leads(name: str) -> str:
    """How far lines are ahead of each network alone with the same seed."""
    study = STUDIES[name]
    lines = _head(["ahead of the network alone, in points", "split", *(TITLES[network] for network in study.networks)])
    for what, split in study.lines:
        if what in LEADS[name]:
            cells = [spread(_ahead(study, what, split, network), "+") for network in study.networks]
            lines.append(f"| {' | '.join([what, split, *cells])} |")
    return "\n".join([*lines, ""])


def _ahead(study: Study, what: str, split: str, network: str) -> list[float]:
    ours, alone = (by_seed(study, each, split, network) for each in (what, ALONE))
    return [ours[seed] - alone[seed] for seed in sorted(ours.keys() & alone.keys())]


def _head(titles: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "| --- | --- |" + " ---: |" * (len(titles) - 2)]


def shown(page: str) -> str:
    """The page with all tables between their marks."""

    def made(found: re.Match[str]) -> str:
        name = found[2]
        body = leads(name.removesuffix("_leads")) if name.endswith("_leads") else table(name)
        return f"{found[1]}{body}{found[4]}"

    return MARK.sub(made, page)


if __name__ == "__main__":
    readme = HERE / "README.md"
    readme.write_text(shown(readme.read_text(encoding="utf-8")), encoding="utf-8")
