"""The figures in the READMEs of the experiments are those of the CSV files beside them."""

from __future__ import annotations

import csv
import itertools
import runpy
import shlex
import tomllib
from pathlib import Path
from statistics import mean, stdev

import pytest

from anysize import config

FOLDER = Path(__file__).parents[1] / "experiments"
WIDTHS = ("0.125", "0.25", "0.5", "1.0")
WIDTHS_OF_FLANC = ("0.25", "0.5", "0.75", "1.0")


def rows(paper: str, name: str) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with (FOLDER / paper / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(paper: str, header: str, page: str = "README.md") -> list[list[str]]:
    """The cells of the page's table whose first line begins with `header`, without its two first lines."""
    lines = (FOLDER / paper / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    body = lines[start + 2 :]
    end = next(number for number, line in enumerate([*body, ""]) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def said(cell: str, *fractions: str | float) -> bool:
    """Whether a cell gives these fractions, as percentages with one digit."""
    numbers = [float(number) for number in cell.replace("/", ",").split(",")]
    return len(numbers) == len(fractions) and all(
        abs(number - 100 * float(fraction)) <= 0.0501 for number, fraction in zip(numbers, fractions)
    )


def one(found: list[dict[str, str]], column: str = "accuracy", **where: str) -> str:
    """The value of the single row that agrees with all of `where`."""
    values = [row[column] for row in found if all(row[key] == value for key, value in where.items())]
    assert len(values) == 1, where
    return values[0]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/results/*.csv")), ids=lambda path: path.stem)
def test_every_row_names_a_command_that_can_be_given(path: Path) -> None:
    found = {row["command"] for row in rows(path.parents[1].name, path.stem)}
    for command in found:
        words = shlex.split(command.partition(" && ")[0])
        assert (FOLDER.parent / words[2 if words[0] == "anysize" else 1]).is_file(), command
        if words[0] == "anysize":
            assert words[1] in ("run", "compare", "plan"), command
            overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
            config.load(FOLDER.parent / words[2], overrides)


@pytest.mark.parametrize("script", ["elf/tables.py", "flanc/tables.py", "wire/results.py"])
def test_a_page_has_the_tables_that_its_script_makes(script: str) -> None:
    page = (FOLDER / script).with_name("README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(FOLDER / script))["shown"](page) == page
    assert "<!-- end of table -->" in page


@pytest.mark.parametrize(
    "name, header, networks, lines",
    [
        ("fashion", "| Fashion-MNIST, one local epoch", ("conv3", "conv5", "conv7"), 13),
        ("emnist", "| EMNIST, one local epoch", ("conv3", "conv5", "conv7"), 6),
        ("cifar10-16-residual", "| CIFAR-10, one local epoch", ("resnet14", "resnet20", "resnet32"), 6),
        ("cifar10-16-pairs", "| eLF with two depths, zeros", ("resnet14", "resnet20", "resnet32"), 3),
    ],
)
def test_elf_over_seeds(name: str, header: str, networks: tuple[str, ...], lines: int) -> None:
    found = rows("elf", name)
    last = max((row["round"] for row in found), key=int)
    shown = table("elf", header)
    assert len(shown) == lines
    for label, split, *cells in shown:
        words = label.partition(" (")[0].lower().removeprefix("elf, ")
        words = words.partition(", mu")[0].partition(", beta")[0].replace("the identity for removed blocks", "identity")
        kind = "iid" if split == "iid" else "noniid"
        for network, cell in zip(networks, cells, strict=True):
            method = network if label.startswith("each") else f"elf {words.replace(', ', ' ')}"
            own = {"method": method, "split": kind, "network": network, "round": last}
            values = [100 * float(row["accuracy"]) for row in found if all(row[key] == own[key] for key in own)]
            assert len(values) == (3 if cell else 0), own
            assert not cell or cell.partition(" (")[0] == f"{mean(values):.1f} ± {stdev(values):.1f}", own


def test_elf_on_residual_networks() -> None:
    found = rows("elf", "cifar10-16-short")
    shown = table("elf", "| seed | zeros | holders")
    methods = ("elf zeros", "elf holders", "elf zeros no masks", "elf holders no masks")
    assert [line[0] for line in shown] == ["0", "1", "2"]
    for seed, *cells in shown:
        for method, cell in zip(methods, cells, strict=True):
            where = {"method": method, "seed": seed, "round": "20"}
            values = [one(found, network=network, **where) for network in ("resnet8", "resnet14", "resnet20")]
            assert said(cell, *values), where


@pytest.mark.parametrize("split", ["iid", "classes"])
@pytest.mark.parametrize("recipe", ["own", "equal"])
def test_flanc_on_fashion_mnist_with_the_small_network(split: str, recipe: str) -> None:
    found = rows("flanc", f"fashion-mnist-small-{split}-{recipe}")
    shown = [
        row
        for row in table("flanc", "| split | recipe | method |")
        if row[0] == {"iid": "iid", "classes": "3 classes"}[split] and row[1].startswith(recipe)
    ]
    assert len(shown) == 3
    for _, _, method, _, average, *cells in shown:
        values = [one(found, "mean", method=method, size=size) for size in ("0.25", "0.5", "0.75", "1.0")]
        assert all(said(cell, value) for cell, value in zip(cells, values)), method
        assert said(average, mean(map(float, values))), method


def test_flanc_on_fashion_mnist_with_the_papers_network() -> None:
    found = rows("flanc", "table1")
    shown = table("flanc", "| method | paper, mean | last round, mean")
    for method, _, last, *cells, best in shown:
        own = {"setting": "3 classes", "method": method}
        values = [one(found, size=size, **own) for size in WIDTHS_OF_FLANC]
        assert all(said(cell, value) for cell, value in zip(cells, values, strict=True)), method
        assert said(last, mean(map(float, values))), method
        assert said(best, mean(float(one(found, "best", size=size, **own)) for size in WIDTHS_OF_FLANC)), method
    assert {method for method, *_ in shown} == {row["method"] for row in found}


def test_flancs_table_1_has_ours_where_a_run_was_finished() -> None:
    found = rows("flanc", "table1")
    columns = [(setting, method) for setting in ("iid", "3 classes") for method in ("heterofl", "fjord", "flanc")]
    lines = [line[1:] for line in table("flanc", "| data | width | iid: HeteroFL") if line[0] == "Fashion-MNIST"]
    assert [width for width, *_ in lines] == [*WIDTHS_OF_FLANC, "mean"]
    for width, *cells in lines:
        for (setting, method), cell in zip(columns, cells, strict=True):
            own = [row for row in found if (row["setting"], row["method"]) == (setting, method)]
            ours = [float(row["accuracy"]) for row in own if width in (row["size"], "mean")]
            assert said(cell.split("/")[1], mean(ours)) if ours else cell.endswith("–"), (width, setting, method)


def test_flancs_study_without_tricks() -> None:
    found = [row for row in rows("flanc", "study") if row["tricks"] == "plain"]
    shown = table("flanc", "| method | mean of the widths, seeds", "study.md")
    assert len(shown) == 4

    def average(run: str, **where: str) -> float:
        kept = [row for row in found if row["run"] == run and all(row[key] == value for key, value in where.items())]
        assert kept, (run, where)
        return mean(float(row["accuracy"]) for row in kept)

    for name, seeds, overall, *cells, early in shown:
        run = name.lower()
        assert said(seeds, *(average(run, round="20", seed=seed) for seed in "012")), name
        assert said(overall.strip("*"), average(run, round="20")), name
        for width, cell in zip(("0.25", "0.5", "0.75", "1.0"), cells):
            assert said(cell, average(run, round="20", size=width)), (name, width)
        assert said(early, average(run, round="10")), name


def test_parts_of_flanc() -> None:
    """The page has the variants in the order of the file."""
    found = rows("flanc", "parts")
    compared = tomllib.loads((FOLDER / "flanc" / "parts.toml").read_text())["compare"]
    cells = [
        (setting, method["label"])
        for setting in compared["settings"]
        for method in compared["methods"]
        if setting in method.get("settings", [setting])
    ]
    shown = table("flanc", "| variant | setting | seeds 0, 1, 2", "study.md")
    for (setting, method), (_, where, of_seeds, overall, *widths) in zip(cells, shown, strict=True):
        own = [row for row in found if (row["setting"], row["method"]) == (setting, method)]
        means = [mean(float(row["accuracy"]) for row in own if row["seed"] == seed) for seed in "012"]
        assert where == setting
        assert said(of_seeds, *means), (setting, method)
        assert said(overall.strip("*"), mean(means)), (setting, method)
        for width, cell in zip(("0.25", "0.5", "0.75", "1.0"), widths, strict=True):
            of_width = [float(row["accuracy"]) for row in own if row["size"] == width]
            assert said(cell, mean(of_width)) if cell else not of_width, (setting, method, width)


def test_prism_against_the_full_network_over_seeds() -> None:
    found = rows("prism", "accuracy-drop")
    names = {
        "full network, FedAvg": "fedavg",
        "PriSM in windows": "prism windows",
        'PriSM, `dropped = "kept"`': "prism kept",
        "OrthDrop (`fedhm`)": "orthdrop",
        "Split-Mix, all bases": "splitmix",
        "HeteroFL, at the trained size": "heterofl",
    }
    shown = table("prism", "| method | iid, 0.2 | iid, 0.4")
    assert len(shown) == 8
    for name, *cells in shown:
        method = names.get(name, name.lower())
        places = itertools.product(("iid", "dirichlet 0.1"), ("0.2", "0.4"))
        for (split, keep), cell in zip(places, cells, strict=True):
            where = {"method": method, "split": split, "keep": "1.0" if method == "fedavg" else keep}
            where["size"] = keep if method == "heterofl" else "1.0"
            of_seeds = [one(found, seed=seed, **where) for seed in "012"]
            assert said(cell.replace(" ", ","), *of_seeds), where


def test_prism_by_channels() -> None:
    names = {
        '`"windows"`': "windows",
        '`"first"`, `dropped = "zero"`, the default': "first, zero",
        '`"first"`, `dropped = "kept"`': "first, kept",
        '`"drawn"`': "drawn",
        '`"all"`': "all",
        "`origdrop`": "origdrop",
    }
    found = {data: rows("prism", f"channels-{data}") for data in ("digits", "fashion-mnist")}
    columns = [(data, column) for data in found for column in ("held_out", "test")]
    for name, *cells, parameters in table("prism", "| `channels` | digits, held-out"):
        for (data, column), cell in zip(columns, cells):
            for seed, value in enumerate(cell.split()):
                where = {"channels": names[name], "seed": str(seed), "size": "1.0"}
                assert value == one(found[data], column, **where), (name, data, seed)
        counts = [one(found[data], "parameters", channels=names[name], seed="0", size="1.0") for data in found]
        assert parameters.replace(",", "") == "; ".join(counts)
    skewed = {data: rows("prism", f"channels-{data}-skewed") for data in ("digits", "fashion-mnist")}
    for name, *cells in table("prism", "| `channels`, skewed data"):
        for (data, column), cell in zip(itertools.product(skewed, ("held_out", "test")), cells):
            for seed, value in enumerate(cell.split()):
                where = {"channels": names[name], "seed": str(seed), "size": "1.0"}
                assert value == one(skewed[data], column, **where), (name, data, seed)


@pytest.mark.parametrize(
    "study, column, values, heading",
    [
        ("local-epochs", "local_epochs", (1, 2, 4), "1 epoch"),
        ("active-clients", "active_clients", (2, 5, 10), "2 clients"),
    ],
)
def test_prism_by_local_epochs_and_active_clients(
    study: str, column: str, values: tuple[int, ...], heading: str
) -> None:
    found = rows("prism", study)
    names = {"FedAvg on the full network": "fedavg", "PriSM": "prism", "PriSM in windows": "prism windows"}
    lines = table("prism", f"| accuracy in % at size 1.0 | {heading}")
    assert len(lines) == 6
    for name, *cells in lines:
        split, method = name.split(", ")
        where = {"split": split.replace("D", "d"), "method": names[method], "size": "1.0"}
        for value, cell in zip(values, cells):
            seeds = [one(found, **where, **{column: str(value)}, seed=seed) for seed in "012"]
            assert said(cell.replace(" ", ","), *seeds), (name, value)


def test_prism_by_sampling() -> None:
    found = rows("prism", "sampling")
    shown = table("prism", "| sampling | at 0.2")
    assert len(shown) == 4
    for name, *cells in shown:
        method = "prism kept" if name == "importance, kappa 4" else f"prism kept {name}"
        for size, cell in zip(("0.2", "1.0"), cells, strict=True):
            of_seeds = [one(found, method=method, size=size, seed=seed) for seed in "012"]
            assert said(cell.replace(" ", ","), *of_seeds), (name, size)


def test_adapters_of_unequal_rank() -> None:
    found = rows("lora", "seeds")
    sizes = ("0.125", "0.25", "0.5", "1.0")
    names = {"FedAvg, whole network": "fedavg", "rank 2 on all devices": "rank 2 for all"}
    tried = rows("lora", "tuning")
    for name, rate, *cells in table("lora", "| method | rate | rank 2"):
        method = names.get(name, name.strip('`"'))
        best = min((row for row in tried if row["method"] == method), key=lambda row: float(row["held_out_perplexity"]))
        assert rate == best["learning_rate"], method
        for size, cell in zip(sizes, cells, strict=True):
            own = [float(row["perplexity"]) for row in found if (row["method"], row["size"]) == (method, size)]
            assert cell == (f"{mean(own):.3f} ± {stdev(own):.3f}" if own else ""), (method, size)
            assert len(own) in (0, 3)


@pytest.mark.parametrize(
    "header, column", [("| width | Split-Mix | paper", "by_test_batch"), ("| width, as it ships", "accuracy")]
)
def test_splitmix_by_width(header: str, column: str) -> None:
    found = rows("splitmix", "widths")
    for width, *cells in table("splitmix", header):
        ours = cells[::2] if column == "by_test_batch" else cells  # beside every one of them the paper's
        for method, cell in zip(("splitmix", "sheterofl", "fedavg each"), ours, strict=True):
            where = {"method": method, "round": "80", "size": width}
            of_seeds = [100 * float(one(found, column, seed=seed, **where)) for seed in "012"]
            assert cell == f"{mean(of_seeds):.1f} ± {stdev(of_seeds):.1f}", where


def test_splitmix_by_batch_norm() -> None:
    found = rows("splitmix", "norms")
    kinds = {"by the batch": "batch", "re-estimated": "calibrated", "tracked": "tracked"}
    shown = table("splitmix", "| batch-norm | initialisation | layers | 0.125 |")
    assert len(shown) == 12
    for norm, start, layers, small, full, *_ in shown:
        where = {"method": f"{kinds[norm]}, {start}, {'plain' if layers == 'as they are' else layers}"}
        column = "by_test_batch" if kinds[norm] == "batch" else "accuracy"
        assert said(small, one(found, column, size="0.125", **where)), where
        assert said(full, one(found, column, size="1.0", **where)), where


def test_splitmix_under_attack() -> None:
    found = rows("splitmix", "robustness-seeds")
    names = {"one client that has all data": "one client with all data", "federation": "splitmix"}
    shown = table("splitmix", "| run | width | robustness 0")
    assert len(shown) == 4
    for name, width, *cells in shown:
        for level, cell in zip(("0.0", "0.2", "0.5", "0.8", "1.0"), cells, strict=True):
            where = {"run": names[name], "size": width, "robustness": level}
            of_seeds = [{"seed": seed, **where} for seed in "012"]
            clean, robust = (mean(float(one(found, key, **own)) for own in of_seeds) for key in ("standard", "robust"))
            assert said(cell, clean, robust), where
    for name, level, clean_cell, robust_cell in table("splitmix", "| network | robustness | clean"):
        where = {"run": name.replace(",", "").replace("FedAvg", "fedavg").replace("OAT", "oat"), "size": "0.125"}
        where["robustness"] = f"{float(level):.1f}" if level else ""
        of_seeds = [{"seed": seed, **where} for seed in "012"]
        assert said(clean_cell, mean(float(one(found, "standard", **own)) for own in of_seeds)), where
        assert said(robust_cell, mean(float(one(found, "robust", **own)) for own in of_seeds)), where


def test_splitmix_by_classes() -> None:
    found = rows("splitmix", "classes")
    lines = (FOLDER / "splitmix" / "README.md").read_text()
    start = lines.index("Accuracy in % on the test samples ([`results/classes.csv`]")
    shown = [line.strip("|").split("|") for line in lines[start:].splitlines() if line.startswith(("| 0.", "| 1."))]
    methods = ("splitmix", "sheterofl", "fedavg each")
    for width, *cells in shown[:4]:
        for method, cell in zip(methods, cells[::2]):
            where = {"method": method, "round": "60", "size": width.strip()}
            assert said(cell, one(found, "by_test_batch", **where)), where
    assert [width.strip() for width, *_ in shown[:4]] == list(WIDTHS)


def test_trust_against_attackers() -> None:
    script = runpy.run_path(str(FOLDER / "trust" / "attacks.py"))
    page = (FOLDER / "trust" / "README.md").read_text()
    assert script["table"](rows("trust", "attacks")) in page
    trials = runpy.run_path(str(FOLDER / "trust" / "trials.py"))
    assert trials["trials_table"]() in page
    assert trials["updates_table"]() in page


def test_trust_and_what_privacy_hides() -> None:
    found = rows("trust", "privacy")
    shown = table("trust", "| noise | epsilon")
    assert len(shown) == len({row["noise"] for row in found})
    for noise, _, accuracy, membership in shown:
        own = [row for row in found if row["noise"] == noise]
        assert said(accuracy, mean(float(row["accuracy"]) for row in own))
        assert said(membership, mean(float(row["membership"]) for row in own))


def test_splitmix_coverage() -> None:
    found = rows("splitmix", "coverage")
    for name, *cells in table("splitmix", "| share ever trained"):
        method = {"Split-Mix": "splitmix", "SHeteroFL": "sheterofl"}[name]
        for domain, cell in zip(("mnist", "mnist-m", "usps"), cells):
            assert said(cell.removesuffix("%"), one(found, "mean", method=method, of="share trained", domain=domain))
    page = (FOLDER / "splitmix" / "README.md").read_text()
    for row in found:
        if row["of"] == "parameters":
            assert f"{int(row['mean']):,}" in page
            assert f"({'spread ' if row['method'] == 'splitmix' else ''}{int(row['spread']):,})" in page
