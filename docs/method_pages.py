"""Writes docs/methods: a page per method from its docstring, with equations, options, cost and measured results.

python docs/method_pages.py
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import generate

import anysize as az
from anysize.experiment.plan import plan
from anysize.methods import make, methods
from anysize.report.charts import capital
from anysize.report.tables import NARROW_SPACE, count, size_bytes

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "methods"

MEAN_OF_HOLDERS = r"W[i] = \frac{\sum_{k : i \in W_k} a_k \, W_k[i]}{\sum_{k : i \in W_k} a_k}"
EQUATIONS: dict[str, list[tuple[str, str]]] = {
    "elf": [
        (
            "The look-up: the most accurate entry of the table that a budget allows.",
            r"\rho(B) = \arg\max_{(p, l)} \, \theta_{p,l} "
            r"\quad \text{such that} \quad C(\phi_p(\omega \odot m_p^l)) \le B",
        ),
        (
            "The merge: what a device does not have counts as zero.",
            r"\omega = \sum_k \frac{n_k}{n} \, \phi_{p_k}^{-1}(\omega_k)",
        ),
    ],
    "fedavg": [("The mean of the clients' weights, by samples.", r"w_{t+1} = \sum_k \frac{n_k}{n} \, w_k")],
    "fedhm": [
        ("A client trains the largest kernels of every weight.", r"W \approx U_r \Sigma_r V_r^{\top}"),
        ("The server averages the recomposed weights.", r"W = \frac{\sum_k a_k \, U_k V_k^{\top}}{\sum_k a_k}"),
    ],
    "fjord": [
        (
            "For every batch a client draws a width that it can hold.",
            r"p \sim \mathcal{U}(\{p \in P : p \le p_{\max}^k\})",
        ),
        ("Every entry is averaged over the clients that hold it.", MEAN_OF_HOLDERS.replace("W", "w")),
    ],
    "flanc": [
        ("Every width's weight is a product of its own coefficients and the shared basis.", r"W_p = U_p V"),
        (
            "The basis is kept orthogonal.",
            r"L = L_{\text{task}} + \lambda \sum_l \left\| V_l V_l^{\top} - I \right\|^2",
        ),
        (
            "The basis is averaged over all clients, coefficients over the clients of their width.",
            r"V = \sum_k \frac{\lvert D_k \rvert}{\sum_j \lvert D_j \rvert} V_k, \qquad "
            r"U_p = \sum_{k \in p} \frac{\lvert D_k \rvert}{\sum_{j \in p} \lvert D_j \rvert} U_{p,k}",
        ),
    ],
    "fiarse": [
        (
            "The units of a width group that a client of width p trains: those whose weights are the largest.",
            r"M_p = \text{top-}\lceil p n \rceil \text{ of } u \mapsto \sum_{w \in u} \lvert w \rvert",
        ),
        ("Every entry is averaged over the clients whose sub-model holds it.", MEAN_OF_HOLDERS),
    ],
    "fedrolex": [
        (
            "The channels of layer i, of K, that a client of width p trains in round j.",
            r"S_i = \left\{ (j - 1 + c) \bmod K_i : 0 \le c < \lceil p K_i \rceil \right\}",
        ),
        ("Every entry is averaged over the clients whose window holds it.", MEAN_OF_HOLDERS),
    ],
    "heterofl": [("Every entry is averaged over the clients whose slice holds it.", MEAN_OF_HOLDERS)],
    "lora": [
        ("A frozen weight with an adapter of the client's rank.", r"W + s \, B_k A_k"),
        (
            "zero-padding: the mean of factors that are padded with zeros.",
            r"B = \sum_k p_k \, [B_k \; 0], \qquad A = \sum_k p_k \begin{bmatrix} A_k \\ 0 \end{bmatrix}",
        ),
        (
            "svd: the best approximation of the mean product at each rank.",
            r"B_r A_r = U_r \Sigma_r V_r^{\top}, \qquad U \Sigma V^{\top} = \sum_k p_k \, B_k A_k",
        ),
        (
            "stacking: the exact sum, added to the weights.",
            r"W \leftarrow W + s \, [B_1 \ldots B_K] \begin{bmatrix} p_1 A_1 \\ \vdots \\ p_K A_K \end{bmatrix}",
        ),
    ],
    "oat": [
        (
            "The loss at many balances of accuracy and robustness.",
            r"\min_\theta \, \mathbb{E}_{x, y} \, \mathbb{E}_{\lambda} \left[ (1 - \lambda) \, L(f(x; \lambda), y) "
            r"+ \lambda \, L(f(x + \delta; \lambda), y) \right]",
        ),
        ("Norms depend on the balance.", r"\gamma(\lambda) \, \text{BN}(x) + \beta(\lambda)"),
    ],
    "origdrop": [
        (
            "Every entry is averaged over the clients that hold it; entries that nobody holds are zero in the end.",
            MEAN_OF_HOLDERS,
        )
    ],
    "prism": [
        ("A weight as a sum of principal kernels.", r"W = \sum_i \sigma_i \, u_i v_i^{\top}"),
        (
            "A client's kernels are drawn by importance, without replacement.",
            r"p_i = \frac{\sigma_i^{\kappa}}{\sum_j \sigma_j^{\kappa}}",
        ),
        (
            "Each kernel is averaged over the clients that had it; one that nobody had stays.",
            r"u_i = \sum_{c : i \in I_c} \alpha_c \, u_{i,c}",
        ),
        (
            "The decay of the product of the factors.",
            r"\frac{\lambda}{2} \left\| \sum_{i \in I_c} u_i v_i^{\top} \right\|_F^2",
        ),
    ],
    "ladder": [
        (
            "A client trains its own width p, and a smaller one, q, that is drawn for every batch and taught by p.",
            r"L_k = L(f_p(x), y) + (1 - t) \, L(f_q(x), y) + t \, D\left(f_q(x), f_p(x)\right)",
        ),
        ("Every entry is averaged over the clients that hold it.", MEAN_OF_HOLDERS),
    ],
    "sheterofl": [
        ("A client trains all widths that it can afford.", r"L_k = \sum_{p \le R_k} L(f_p(x), y)"),
        ("Every entry is averaged over the clients whose largest width holds it.", MEAN_OF_HOLDERS),
    ],
    "splitmix": [
        (
            "Each base network is averaged over the clients that trained it.",
            r"w_i = \frac{\sum_{k : i \in W_k} \lvert D_k \rvert \, w_{i,k}}{\sum_{k : i \in W_k} \lvert D_k \rvert}",
        ),
        ("A device mixes as many bases as fit.", r"f(x) = \frac{1}{m} \sum_{i=1}^{m} f(x; w_i)"),
    ],
}
"""What each method computes: words and LaTeX. Its docstring says which function does it."""


class Results(NamedTuple):
    """A CSV of measured results, and what to say about it.

    `only` picks lines by columns; `named` is the method of all lines, `labels` what the file calls a method as it is by
    default.
    """

    path: str
    words: str
    about: str
    only: Mapping[str, str] = MappingProxyType({})
    named: str | None = None
    labels: Mapping[str, str] = MappingProxyType({})


RESULTS = (
    Results(
        "experiments/benchmark/results/cifar.csv",
        "CIFAR-10 at 16 x 16, 3 classes per client, equal tricks, 100 rounds",
        "experiments/benchmark/README.md",
        {"setting": "3 classes"},
        labels={"fedavg": "FedAvg, weakest width"},
    ),
    Results("experiments/demo/results.csv", "two-digit numbers, 40 rounds", "experiments/demo/README.md"),
    Results(
        "experiments/flanc/results/fashion-mnist-small-iid-own.csv",
        "Fashion-MNIST, iid, capacities redrawn every round, 30 rounds",
        "experiments/flanc/README.md",
    ),
    Results(
        "experiments/flanc/results/fashion-mnist-small-classes-own.csv",
        "Fashion-MNIST, 3 classes per client, capacities redrawn every round, 30 rounds",
        "experiments/flanc/README.md",
    ),
    Results(
        "experiments/prism/results/accuracy-drop.csv",
        "a quarter of Fashion-MNIST, iid, keep ratio 0.2, 30 rounds",
        "experiments/prism/README.md",
        {"split": "iid", "keep": "0.2"},
        labels={"fedhm": "orthdrop"},
    ),
    Results(
        "experiments/lora/results/seeds.csv",
        'the next character of 20 of Shakespeare\'s roles, `merge = "stacking"`, 20 rounds',
        "experiments/lora/README.md",
        {"method": "stacking"},
        "lora",
    ),
    Results(
        "experiments/splitmix/results/classes.csv",
        "CIFAR-10 at 16 x 16, 3 classes per client, 60 rounds",
        "experiments/splitmix/README.md",
    ),
    Results(
        "experiments/elf/results/cifar10-16-short.csv",
        "CIFAR-10 at 16 x 16, half of the weights masked, 20 rounds, missing entries count as zeros",
        "experiments/elf/README.md",
        labels={"elf": "elf zeros"},
    ),
)


TRIALS = "experiments/benchmark/trials.csv"


def page(name: str) -> str:
    """The page of one method."""
    kind: Any = type(make(name))
    module = sys.modules[kind.__module__]
    text = inspect.getdoc(module) or ""
    idea, _, rest = text.partition("\n\n")
    title, _, does = idea.partition(": ")
    summary = dict(methods())[name]
    parts = [
        f"# {title}",
        f"`{name}`: {summary}. This page is generated from `src/anysize/methods/{name}.py`.",
        capital(" ".join(does.split())),
        "## What it computes",
        *(f"{words}\n\n$$\n{latex}\n$$" for words, latex in EQUATIONS[name]),
        "## Paper, notation, departures",
        *map(markdown, re.split(r"\n\n+", rest)),
        "## Options",
        options(kind),
        "## Cost",
        *cost(name),
        *results(name),
        *(trials() if name == "ladder" else ()),
    ]
    return "\n\n".join(parts) + "\n"


def markdown(paragraph: str) -> str:
    """A paragraph of a docstring as markdown: a table of notation as a table, lists and text as they are."""
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines):
        rows = [re.split(r" {2,}", line.strip(), maxsplit=2) for line in lines]
        head, *body = [[*row, *[""] * (3 - len(row))] for row in rows]
        code = [
            generate.cells(*(f"`{cell}`" if i < 2 and cell else cell for i, cell in enumerate(row))) for row in body
        ]
        return "\n".join([generate.cells(*head), generate.cells("---", "---", "---"), *code])
    return (
        paragraph.replace("*", r"\*")
        .replace("Departures:\n-", "Departures:\n\n-")
        .replace("|", r"\|")
        .replace("_{", r"\_{")
    )


def options(kind: Any) -> str:
    """A table of the method's options."""
    meanings = generate.attributes_of(kind)
    rows = [
        generate.cells(f"`{field.name}`", f"`{generate.toml(generate.made(field))}`", meanings[field.name])
        for field in dataclasses.fields(kind)
    ]
    table = [generate.cells("key of `[method]`", "default", "meaning"), generate.cells("---", "---", "---"), *rows]
    return "\n".join(table) if rows else "None."


def reference(name: str) -> tuple[az.Experiment, str]:
    """The experiment that costs are counted for, and what to say about it."""
    if name != "elf":
        devices = {"capacities": [0.25, 0.5, 0.75, 1.0]}
        made = az.Experiment(data="digits", clients=20, model="small-cnn", method=name, devices=devices, rounds=1)
        return made, "`small-cnn` on the digits"
    depths = {"groups": [{"name": f"depth {depth}", "depth": depth} for depth in (1, 2, 3)]}
    model = {"name": "resnet20", "options": {"channels": [8, 16, 32]}}
    method = {"name": "elf", "sparsities": [0.0]}
    made = az.Experiment(data="digits", clients=20, model=model, method=method, devices=depths, rounds=1)
    return made, "`resnet20` with half of the channels on the digits, without masks"


def cost(name: str) -> Iterator[str]:
    """What a client of each size costs, for one network."""
    made, words = reference(name)
    yield f"Of one client of each device group, for {words}, as `anysize plan` counts it:"
    heads = (
        "device group",
        "parameters",
        "MACs",
        "training MACs",
        "activations",
        "bytes down",
        "bytes up",
        "finished network",
    )
    rows = [generate.cells(*heads), generate.cells("---", *["---:"] * (len(heads) - 1))]
    for group in plan(made)["groups"]:
        values = [count(group[key]) for key in ("parameters", "macs", "training_macs")]
        values += [size_bytes(group[key]) for key in ("activation_bytes", "bytes_down", "bytes_up", "inference_bytes")]
        rows.append(generate.cells(group["name"], *(value.replace(NARROW_SPACE, " ") for value in values)))
    yield "\n".join(rows)


def results(name: str) -> Iterator[str]:
    """What was measured, a line per setting."""
    yield "## Results"
    rows = [row for source in RESULTS for row in measured(source, name)]
    if not rows:
        yield (
            "No CSV of this repository has this method alone; the pages of "
            "[the experiments](../../experiments/README.md) say what was measured."
        )
        return
    yield (
        "Test accuracy in percent by size after the last round, mean and standard deviation where there are several "
        "seeds. Settings differ: compare methods only within one of them, and with their costs."
    )
    yield "\n".join(
        [generate.cells("setting", "seeds", "accuracy by size"), generate.cells("---", "---:", "---"), *rows]
    )


def trials() -> Iterator[str]:
    """What was tried for a method of our own, each alone and on clients' held-out data: a line for each idea."""
    with (ROOT / TRIALS).open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    sizes = [key for key in lines[0] if re.fullmatch(r"\d\.\d+", key)]
    runs: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for line in lines:
        about = tuple(line[key] for key in ("method", "setting", "learning_rate", "idea"))
        runs.setdefault(about, {})[line["seed"]] = line
    yield "## What was tried"
    yield (
        "Ideas for a method that is the best at every size, alone and together. Accuracy in percent on what all "
        "clients hold out (2,500 samples, so that a difference below two points at one size says little), equal "
        f"tricks, {lines[0]['rounds']} rounds, mean over the seeds. Ahead: how far the mean of the sizes is ahead of "
        "the same method, rate and seeds without the idea, with its standard deviation over seeds. Nothing here was "
        f"seen on test data. [The runs, and the command of each](../../{TRIALS})."
    )
    head = ("method", "setting", "rate", "idea", "seeds", *sizes, "ahead")
    rows = [generate.cells(*head), generate.cells("---", "---", "---:", "---", *["---:"] * (len(head) - 4))]
    for about in sorted(runs, key=lambda about: (about[1], about[0], float(about[2]), about[3] != "as it is")):
        (method, setting, rate, idea), own = about, runs[about]
        plain = runs.get((method, setting, rate, "as it is"), {}) if idea != "as it is" else {}
        pairs = [float(line["mean"]) - float(plain[seed]["mean"]) for seed, line in own.items() if seed in plain]
        shown = [average([line[size] for line in own.values()]) for size in sizes]
        rows.append(generate.cells(f"`{method}`", setting, rate, idea, str(len(own)), *shown, ahead(pairs)))
    yield "\n".join(rows)


def average(cells: Sequence[str]) -> str:
    """The mean of numbers in a CSV, with one digit; nothing if there are none."""
    return f"{fmean(map(float, cells)):.1f}" if all(cells) else ""


def ahead(differences: Sequence[float]) -> str:
    """A mean of paired differences, with their standard deviation where there are several."""
    if not differences:
        return ""
    spread = f" ± {stdev(differences):.1f}" if len(differences) > 1 else ""
    return f"{round(fmean(differences), 1) + 0.0:+.1f}{spread}"


def measured(source: Results, name: str) -> Iterator[str]:
    """A line of the table of results, if the CSV has the method."""
    with (ROOT / source.path).open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if all(line[key] == value for key, value in source.only.items())]
    for line in lines:
        line.setdefault("size", line.get("network", ""))
    own = [line for line in lines if source.named == name or line.get("method") == source.labels.get(name, name)]
    by_size: dict[str, list[float]] = {}
    last = max((int(line["round"]) for line in own if "round" in line), default=None)
    for line in own:
        seeds = [float(line[key]) for key in line if key.startswith("accuracy seed ") and line[key]]
        if seeds:
            by_size[line["size"]] = seeds
        elif "accuracy" in line and (last is None or int(line["round"]) == last):
            by_size.setdefault(line["size"], []).append(float(line["accuracy"]))
    if by_size:
        shown = ", ".join(
            f"{size}: {percent(values)}" for size, values in sorted(by_size.items(), key=lambda item: order(item[0]))
        )
        seeds_ = sorted({len(values) for values in by_size.values()})
        yield generate.cells(f"[{source.words}](../../{source.about})", " or ".join(map(str, seeds_)), shown)


def order(size: str) -> tuple[float, str]:
    """Sizes in order of their numbers, whatever stands before these."""
    number = re.search(r"\d+(\.\d+)?", size)
    return (float(number[0]) if number else 0.0, size)


def percent(values: list[float]) -> str:
    """A mean in percent, with the deviation of several."""
    around = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{around}"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, _ in methods():
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
