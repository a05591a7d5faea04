"""The figures of a comparison against numpy, and against runs counted by hand."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest

import small
from anysize.comparisons.comparison import MEAN, Comparison, tabulate
from anysize.comparisons.files import write
from anysize.comparisons.outcomes import Outcome
from anysize.comparisons.page import render
from anysize.comparisons.statistics import at_cost, best, first_reached, paired, spread
from anysize.comparisons.tuning import Choice
from anysize.comparisons.writing import to_csv, to_latex
from anysize.config.compare import CompareConfig
from anysize.errors import ConfigError

RANDOM = np.random.default_rng(0)


def test_spread_is_numpys_mean_and_sample_deviation() -> None:
    values = RANDOM.random(7).tolist()
    found = spread(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert spread([0.5]).std is None
    assert math.isnan(spread([0.5, math.nan]).mean)


def test_paired_differences_are_those_of_the_seeds_that_both_have() -> None:
    ours, theirs = RANDOM.random(4), RANDOM.random(4)
    found = paired(dict(enumerate(ours)), {seed: value for seed, value in enumerate(theirs) if seed != 2})
    gaps = np.delete(ours - theirs, 2)
    assert (found.mean, found.std, found.count) == (pytest.approx(gaps.mean()), pytest.approx(gaps.std(ddof=1)), 3)
    # What seeds have in common does not count: here the values scatter, their differences do not.
    assert paired({0: 0.1, 1: 0.9}, {0: 0.0, 1: 0.8}).std == pytest.approx(0.0)


def test_the_value_at_a_cost_is_numpys_interpolation_and_none_outside() -> None:
    costs, values = RANDOM.permutation(np.array([3.0, 5.0, 9.0, 20.0])), RANDOM.random(4)
    order = np.argsort(costs)
    for cost in (3.0, 4.2, 5.0, 8.9, 19.0, 20.0):
        expected = np.interp(cost, costs[order], values[order])
        assert at_cost(costs.tolist(), values.tolist(), cost) == pytest.approx(expected)
    assert at_cost(costs.tolist(), values.tolist(), 2.9) is None
    assert at_cost(costs.tolist(), values.tolist(), 20.1) is None
    assert at_cost([4, 4], [0.1, 0.3], 4) == pytest.approx(0.2)


def test_the_best_round_and_the_first_at_the_target_follow_the_metrics_direction() -> None:
    curve = [(1, 3.0), (2, math.nan), (3, 1.0), (4, 2.0)]
    assert best(curve, higher_is_better=False) == (3, 1.0)
    assert best(curve, higher_is_better=True) == (1, 3.0)
    assert first_reached(curve, 2.0, higher_is_better=False) == 3
    assert first_reached(curve, 2.5, higher_is_better=True) == 1
    assert first_reached(curve, 5.0, higher_is_better=True) is None


def outcome(label: str, seed: int, values: dict[str, list[float]], more: dict[str, Any] | None = None) -> Outcome:
    """A run of two rounds with two clients each, whose every figure is known."""
    config = small.config(**({"seed": seed, "rounds": 2, "training": {"local_epochs": 3}} | (more or {})))
    costs = {"0.5": 10, "1.0": 40}
    sizes = [
        {"label": size, "training_macs": cost, "bytes_down": cost, "bytes_up": cost, "activation_bytes": cost}
        for size, cost in costs.items()
    ]
    clients = [{"client": 4, "size": "0.5", "samples": 5}, {"client": 1, "size": "1.0", "samples": 7}]
    rounds = [
        {"round": number, "bytes_down": 100, "bytes_up": 50, "clients": clients}
        | {"accuracy": {size: curve[number - 1] for size, curve in values.items()}}
        for number in (1, 2)
    ]
    start = {"metric": "accuracy", "higher_is_better": True, "sizes": sizes, "groups": []}
    return Outcome(f"{label}/seed-{seed}", Path(label), "", label, config, start, rounds)


@pytest.fixture
def made() -> Comparison:
    """Two methods with two seeds."""
    runs = [
        outcome("a", 0, {"0.5": [0.6, 0.4], "1.0": [0.6, 0.8]}),
        outcome("a", 1, {"0.5": [0.2, 0.5], "1.0": [0.5, 0.7]}),
        outcome("b", 0, {"0.5": [0.1, 0.3], "1.0": [0.9, 0.5]}, {"tricks": {"masked_loss": True}}),
        outcome("b", 1, {"0.5": [0.1, 0.2], "1.0": [0.2, 0.4]}, {"tricks": {"masked_loss": True}}),
    ]
    return tabulate(runs, CompareConfig(baseline="b", target=0.6), Path("."))


def test_rows_have_the_last_round_and_the_best_apart(made: Comparison) -> None:
    row = made.row("a", "0.5")
    assert row is not None
    assert (row.values, row.best_values) == ((0.4, 0.5), (0.6, 0.5))
    assert row.std == pytest.approx(np.std([0.4, 0.5], ddof=1))
    whole = made.row("a")
    assert whole is not None
    assert whole.values == pytest.approx((0.6, 0.6))
    assert whole.best_values == pytest.approx((0.6, 0.6))


def test_differences_to_the_baseline_are_taken_seed_by_seed(made: Comparison) -> None:
    gaps = {d.size: d for d in made.differences}
    assert {d.method for d in made.differences} == {"a"}
    assert gaps["1.0"].mean == pytest.approx(0.3)
    assert gaps["1.0"].std == pytest.approx(0.0)
    assert gaps[MEAN].mean == pytest.approx(np.mean([0.6 - 0.4, 0.6 - 0.3]))
    assert gaps[MEAN].std == pytest.approx(np.std([0.2, 0.3], ddof=1))


def test_the_cost_to_a_target_is_that_of_all_rounds_until_it_was_reached(made: Comparison) -> None:
    by_key = {(entry.method, entry.size): entry for entry in made.reached}
    full = by_key["a", "1.0"]  # in round 1 with seed 0, in round 2 with seed 1
    macs = 3 * (5 * 10 + 7 * 40)  # of one round: three epochs, what each client has, what its size costs
    assert (full.reached, full.rounds, full.bytes, full.training_macs) == (2, 1.5, 225, 1.5 * macs)
    assert (by_key["b", "1.0"].reached, by_key["b", "1.0"].rounds) == (1, None)
    assert by_key["b", "0.5"].reached == 0


def test_equal_cost_is_interpolated_between_a_methods_sizes() -> None:
    dear = outcome("dear", 0, {"0.5": [0.5, 0.5], "1.0": [0.9, 0.9]})
    for size in dear.start["sizes"]:
        size["training_macs"] = {"0.5": 20, "1.0": 60}[size["label"]]
    cheap = outcome("cheap", 0, {"0.5": [0.4, 0.4], "1.0": [0.8, 0.8]})
    found = tabulate([cheap, dear], CompareConfig(baseline="cheap"), Path(".")).equal_cost
    at = {(entry.method, entry.cost): entry.mean for entry in found if entry.unit == "training_macs"}
    assert at == {("cheap", 10): 0.4, ("cheap", 40): 0.8, ("dear", 10): None, ("dear", 40): pytest.approx(0.7)}
    assert {entry.cost for entry in found if entry.unit == "bytes"} == {20, 80}


def test_statements_say_what_differs_and_what_does_not(made: Comparison) -> None:
    text = "\n".join(made.statements)
    assert "Not equal: tricks.masked_loss = absent for a; true for b." in text
    assert "Equal, as the runs wrote it down: 2 rounds, and with equal seeds the same clients" in text
    assert "Equal: the traffic of all rounds, within 1 %." in text
    assert "training.learning_rate" not in text
    other = outcome("c", 0, {"0.5": [0.1, 0.2]})
    other.rounds[1]["clients"].append({"client": 9, "size": "0.5", "samples": 1})
    more = tabulate([*made.outcomes, other], CompareConfig(), Path(".")).statements
    assert any("Not equal: who took part in which round (c)" in line for line in more)
    assert any("Not equal: the number of finished seeds, from 1 to 2" in line for line in more)


def test_statements_name_the_tuned_values_and_what_they_were_chosen_by() -> None:
    runs = [
        outcome(name, 0, {"1.0": [0.1, 0.2]}, {"training": {"learning_rate": rate}}) for name, rate in RATES.items()
    ]
    tried = tuple(({"training.learning_rate": rate}, 0.5) for rate in (0.1, 0.2))
    choices = {("", name): Choice({"training.learning_rate": rate}, tried, 0, 40) for name, rate in RATES.items()}
    (line,) = [line for line in tabulate(runs, CompareConfig(), Path("."), choices).statements if "Tuned" in line]
    assert "training.learning_rate, one of 0.1, 0.2" in line
    assert "held-out data, with seed 0 alone and 40 rounds: 0.1 for a; 0.2 for b." in line


RATES = {"a": 0.1, "b": 0.2}


def test_csv_has_a_line_per_row_and_a_column_per_seed(made: Comparison) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert [float(line["mean"]) for line in lines] == [row.mean for row in made.rows]
    assert [float(line["accuracy seed 1"]) for line in lines] == [row.values[1] for row in made.rows]
    assert [float(line["best seed 0"]) for line in lines] == [row.best_values[0] for row in made.rows]


def test_json_has_null_for_a_run_that_has_diverged(made: Comparison) -> None:
    runs = [outcome("a", 0, {"1.0": [0.1, math.nan]}), outcome("a", 1, {"1.0": [0.1, 0.2]})]
    stored = tabulate(runs, CompareConfig(), Path(".")).to_json()
    assert stored["rows"][0]["mean"] is None
    assert stored["rows"][0]["values"] == [None, 0.2]
    assert made.to_json()["rows"][0] == {
        key: list(v) if isinstance(v, tuple) else v for key, v in asdict(made.rows[0]).items()
    }


def test_latex_is_a_booktabs_table_with_the_best_in_bold(made: Comparison) -> None:
    text = to_latex(made)
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert rule in text
    deviation = 100 * statistics.stdev([0.8, 0.7])
    assert f"$\\mathbf{{75.0}} \\pm {deviation:.1f}$" in text
    assert text.count("\\mathbf") == 3
    assert all(line.count("&") == 3 for line in text.splitlines() if line.endswith("\\\\"))


def test_runs_that_cannot_be_compared_are_refused() -> None:
    a, b = outcome("a", 0, {"1.0": [0.1, 0.2]}), outcome("b", 0, {"1.0": [0.1, 0.2]})
    b.start["metric"] = "loss"
    with pytest.raises(ConfigError, match="compare runs of one kind"):
        tabulate([a, b], CompareConfig(), Path("."))
    with pytest.raises(ConfigError, match="are both a with seed 0"):
        tabulate([a, a], CompareConfig(), Path("."))
    with pytest.raises(ConfigError, match="unknown baseline 'c'"):
        tabulate([a], CompareConfig(baseline="c"), Path("."))
    with pytest.raises(ConfigError, match="no run is finished"):
        tabulate([], CompareConfig(), Path("."))


# The page


def page_of(made: Comparison) -> ElementTree.Element:
    """The body of the page, which must be well-formed."""
    text = render(made)
    assert "<script" not in text
    assert "http" not in re.sub(r'http-equiv="', "", text)  # nothing is fetched
    body = text[text.index("<body>") : text.index("</html>")].replace("&nbsp;", " ")
    return ElementTree.fromstring(body)


def test_the_page_draws_every_method_with_an_error_bar_of_one_deviation(made: Comparison) -> None:
    body = page_of(made)
    plots = {svg.get("aria-label"): svg for svg in body.iter("svg") if svg.get("class") == "figure"}
    assert set(plots) == {
        "mean of sizes in ",
        "accuracy by size in ",
        "accuracy by traffic in ",
        "accuracy over the rounds in ",
    }
    titles = [title.text for title in plots["accuracy by size in "].iter("title")]
    assert titles == [
        "a, 0.5: 45.0 ± 7.1 (seed 0: 0.4000, seed 1: 0.5000)",
        "a, 1.0: 75.0 ± 7.1 (seed 0: 0.8000, seed 1: 0.7000)",
        "b, 0.5: 25.0 ± 7.1 (seed 0: 0.3000, seed 1: 0.2000)",
        "b, 1.0: 45.0 ± 7.1 (seed 0: 0.5000, seed 1: 0.4000)",
    ]
    # On the vertical axis a bar is as long as two deviations, measured by the distance of two points.
    points = list(plots["accuracy by size in "].iter("g"))
    heights = [float(group.find("circle").get("cy")) for group in points]  # type: ignore[union-attr, arg-type]
    top, bottom = map(float, re.match(r"M\S+ (\S+)V([\d.]+)", points[0].find("path").get("d")).groups())  # type: ignore[union-attr, arg-type]
    per_unit = (heights[0] - heights[1]) / (0.75 - 0.45)
    assert bottom - top == pytest.approx(2 * statistics.stdev([0.4, 0.5]) * per_unit, abs=0.3)


def test_the_page_escapes_names_and_links_to_files_that_exist(tmp_path: Path) -> None:
    runs = [outcome("<b>&'\"a", seed, {"0.5": [0.1, 0.2], "1.0": [0.3, 0.4]}) for seed in (0, 1)]
    made = tabulate(runs, CompareConfig(baseline="<b>&'\"a", target=0.1), tmp_path)
    write(made)
    body = page_of(made)
    assert not list(body.iter("b"))[1:]  # only the one of the header
    links = {link.get("href") or "" for link in body.iter("a")}
    files = {link for link in links if not link.startswith("#") and "seed-" not in link and link != "a"}
    assert {"compare.csv", "compare/curves.csv", "compare/target.csv"} <= files
    assert [link for link in files if link.endswith(".csv") and not (tmp_path / link).is_file()] == []


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        "a | b",
        "a & b",
        "a_b",
        "100 %",
        "two\nlines\n\nthree",
        "x, y",
        "=1+1",
        "\\input{x}",
    ],
)
def test_names_of_methods_and_settings_do_no_harm_in_any_file(tmp_path: Path, name: str) -> None:
    runs = [outcome(label, seed, {"1.0": [0.3, 0.4]}) for label in (name, "b") for seed in (0, 1)]
    runs = [replace(run, setting=name) for run in runs]
    made = tabulate(runs, CompareConfig(), tmp_path)
    write(made)
    body = page_of(made)
    assert name.split() == "".join(body.find(".//h2").itertext()).split()  # type: ignore[union-attr]
    for path in (tmp_path / "compare.csv", tmp_path / "compare" / "curves.csv"):
        rows = list(csv.DictReader(path.open(newline="")))
        assert {row["method"].removeprefix("'") for row in rows} == {name, "b"}
        assert not [cell for row in rows for cell in row.values() if cell.startswith("=")]
    lines = to_latex(made).splitlines()
    table = lines[lines.index("\\toprule") : lines.index("\\bottomrule")]
    assert sum(line.replace("\\&", "").count("&") == 2 for line in table) == 3  # the head and both methods
    assert all(line.startswith("\\") or line.endswith("\\\\") for line in table)
    assert not re.search(r"(?<!\\)[%#_$](?!\\)", table[2] + table[3].partition("$")[0])
    assert "\\input" not in "".join(table)


def test_a_comparison_shows_itself_as_a_small_table_in_which_long_names_are_cut(tmp_path: Path) -> None:
    runs = [
        outcome(label, seed, {"0.5": [0.1, 0.2 + seed / 10], "1.0": [0.3, 0.4]})
        for label in ("<b>", "x" * 300)
        for seed in (0, 1)
    ]
    made = tabulate(runs, CompareConfig(), tmp_path)
    title, head, first, second = repr(made).splitlines()
    assert title == f"Comparison {tmp_path}: accuracy in percent on the test set after 2 rounds, seeds 0, 1"
    assert head.split() == ["method", "0.5", "1.0", "mean", "of", "sizes"]
    assert first.split() == ["<b>", "25.0", "±", "7.1", "40.0", "±", "0.0", "32.5", "±", "3.5"]
    assert second.split()[0] == "x" * 39 + "…"
    shown = ElementTree.fromstring(made._repr_html_())
    assert [cell.text for cell in shown.iter("th")] == ["method", "0.5", "1.0", "mean of sizes"]
    assert [row[0].text for row in shown.iter("tr")][1:] == ["<b>", "x" * 39 + "…"]
    unfinished = replace(made, missing=("a/seed-0",), seeds=(0,), rounds=1)
    assert repr(unfinished).splitlines()[0].endswith("after 1 round, seed 0, 1 not finished")


def test_long_names_break_in_tables_headings_and_legends_of_the_page(tmp_path: Path) -> None:
    run = replace(outcome("x" * 300, 0, {"1.0": [0.3, 0.4]}), directory=tmp_path / "a")
    text = render(tabulate([run], CompareConfig(), tmp_path))
    assert (
        ".scroll tbody tr > :first-child { white-space: normal; overflow-wrap: break-word; max-width: 320px; }" in text
    )
    assert ".legend li, h1, h2, nav a { overflow-wrap: anywhere; }" in text


def test_a_link_to_a_run_in_a_folder_of_any_name_leads_there(tmp_path: Path) -> None:
    run = replace(outcome("a", 0, {"1.0": [0.3, 0.4]}), directory=tmp_path / "run #1, 50 %")
    body = page_of(tabulate([run], CompareConfig(), tmp_path))
    links = [link.get("href") or "" for link in body.iter("a")]
    assert "run #1, 50 %" in [unquote(link) for link in links]
    assert not [link for link in links if "#" in link[1:]]
