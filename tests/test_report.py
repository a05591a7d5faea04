"""The report: numbers in tables and CSVs are those of the files, and the page is whole and safe."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import small
from anysize import report
from anysize.errors import CheckpointError
from anysize.records.directory import finite_json, write_analysis
from anysize.records.events import history, read_events
from anysize.report.charts import ACCENT, Axis, Bars, Figure, Series
from anysize.report.colours import ON_DARK, ON_LIGHT, palette
from anysize.report.page import render
from anysize.report.record import read
from pages import Page, charts, page_of, rows

LABELS = ["0.25", "0.5", "1.0"]
PARAMETERS = [33_482, 1_219_594, 11_173_962]


def cost(index: int) -> dict[str, int]:
    return {
        "parameters": PARAMETERS[index],
        "macs": 1000 * (index + 1),
        "training_macs": 3000 * (index + 1),
        "activation_bytes": 64_000_000 + index,
        "bytes_down": 1_234_567 + index,
        "bytes_up": 765_433 + index,
    }


def start(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "event": "start",
        "name": "demo",
        "method": "flanc",
        "method_options": {"orthogonality": 10.0},
        "model": "small-cnn",
        "data": "digits",
        "rounds": 4,
        "seed": 7,
        "metric": "accuracy",
        "higher_is_better": True,
        "sizes": [{"label": label, "width": float(label), **cost(i)} for i, label in enumerate(LABELS)],
        "groups": [
            {"name": f"group {label}", "label": label, "size": label, "clients": 2, "capacity": float(label)}
            | {"budget": None, **cost(i)}
            for i, label in enumerate(LABELS)
        ],
        "partition": {
            "clients": 4,
            "classes": 3,
            "class_names": ["cat", "dog", "eel"],
            "samples": [10, 11, 12, 13],
            "histogram": [[10, 0, 0], [0, 11, 0], [0, 0, 12], [5, 5, 3]],
        },
        "notices": ["one notice"],
    }
    return event | changes


def round_event(
    number: int, metric: str = "accuracy", scores: list[float] | None = None, **more: Any
) -> dict[str, Any]:
    """A round in which client 0 of the small group and client 2 of the large one took part."""
    event: dict[str, Any] = {
        "event": "round",
        "round": number,
        "train_loss": 2.0 / number,
        "bytes_down": 100 * number,
        "bytes_up": 10 * number,
        "seconds": 1.0,
        "clients": [
            {"client": 0, "group": "group 0.25", "size": "0.25", "samples": 10, "loss": 1.0},
            {"client": 2, "group": "group 1.0", "size": "1.0", "samples": 12, "loss": 1.0},
        ],
    }
    if scores is not None:
        event[metric] = dict(zip(LABELS, scores))
        event["metrics"] = {label: {metric: score, "loss": score / 3} for label, score in zip(LABELS, scores)}
    return event | more


END = {"event": "end", "round": 4, "seconds": 41.0}
FINISHED = [
    start(),
    round_event(1),
    round_event(2, scores=[0.5, 0.6, 0.7], virtual_seconds=1.5),
    round_event(3),
    round_event(4, scores=[0.1 + 0.2, 0.9123456789, 0.8]),
    END,
]


def save(directory: Path, events: list[dict[str, Any]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(finite_json(event)) + "\n" for event in events)
    (directory / "events.jsonl").write_text(lines, encoding="utf-8")
    return directory


def test_the_sizes_csv_has_every_digit_of_the_last_evaluation(tmp_path: Path) -> None:
    report.write(save(tmp_path, FINISHED))
    sizes = rows(tmp_path, "sizes")
    assert [row["size"] for row in sizes] == LABELS
    assert [float(row["accuracy"]) for row in sizes] == [0.1 + 0.2, 0.9123456789, 0.8]
    assert [float(row["loss"]) for row in sizes] == [(0.1 + 0.2) / 3, 0.9123456789 / 3, 0.8 / 3]
    for index, row in enumerate(sizes):
        assert {key: int(row[key]) for key in cost(index)} == cost(index)


def test_the_trade_off_has_a_curve_per_size_and_every_digit(tmp_path: Path) -> None:
    def points(base: float) -> list[dict[str, float | None]]:
        return [{"robustness": level, "standard": base - level / 3, "robust": level / 7} for level in (0.0, 0.2, 1.0)]

    robust = {label: points(base) for label, base in zip(LABELS, (0.7, 0.8, 0.9))}
    events = [start(), round_event(1, scores=[0.1, 0.2, 0.3], robust=robust), round_event(2)]
    page = page_of(save(tmp_path, events))
    for name in ("trade-off", "robustness"):
        found = [
            (row["size"], *(float(row[k]) for k in ("robustness", "standard", "robust")))
            for row in rows(tmp_path, name)
        ]
        assert found == [(label, *point.values()) for label, own in robust.items() for point in own]
    curves = charts(tmp_path)["trade-off"].series
    assert [curve.name for curve in curves] == LABELS
    assert [curve.x for curve in curves] == [tuple(point["robust"] for point in own) for own in robust.values()]
    assert [curve.y for curve in curves] == [tuple(point["standard"] for point in own) for own in robust.values()]
    assert curves[0].labels == ("0", "0.2", "1")
    assert len(page.told["trade-off"]["points"]) == 9


def test_a_method_without_a_choice_of_robustness_is_one_point_and_no_attack_is_no_section(tmp_path: Path) -> None:
    point = [{"robustness": None, "standard": 0.5, "robust": 0.25}]
    one = save(tmp_path / "one", [start(), round_event(1, scores=[0.1, 0.2, 0.3], robust={"0.5": point})])
    (curve,) = charts(one)["trade-off"].series
    assert (curve.x, curve.y, curve.joined) == ((0.25,), (0.5,), False)
    assert "Robustness" not in page_of(save(tmp_path / "none", FINISHED)).text


def test_the_size_table_shows_human_units_and_keeps_the_exact_number_in_the_title(tmp_path: Path) -> None:
    shown = page_of(save(tmp_path, FINISHED)).row("0.5")
    plain = [(text.replace("\N{NARROW NO-BREAK SPACE}", " "), title) for text, title in shown]
    assert plain == [
        ("0.5", None),
        ("0.9123", "0.9123456789"),
        ("0.3041", str(0.9123456789 / 3)),
        ("1.22 M", "1219594"),
        ("2.00 K", "2000"),
        ("6.00 K", "6000"),
        ("64.0 MB", "64000001"),
        ("1.23 MB", "1234568"),
        ("765 kB", "765434"),
    ]


def test_the_last_evaluation_is_shown_also_where_an_earlier_one_was_better(tmp_path: Path) -> None:
    page = page_of(
        save(tmp_path, [start(), round_event(1, scores=[0.9, 0.9, 0.9]), round_event(2, scores=[0.5, 0.4, 0.3])])
    )
    assert [page.row(label)[1][0] for label in LABELS] == ["0.5000", "0.4000", "0.3000"]
    assert [row["accuracy"] for row in rows(tmp_path, "against-macs")] == ["0.5", "0.4", "0.3"]
    assert "after round 2" in page.text


def test_the_curve_over_rounds_has_the_values_of_its_csv(tmp_path: Path) -> None:
    report.write(save(tmp_path, FINISHED))
    expected = {
        (event["round"], label): score for event in FINISHED for label, score in event.get("accuracy", {}).items()
    }
    table = rows(tmp_path, "over-rounds")
    assert {(int(row["round"]), row["size"]): float(row["accuracy"]) for row in table} == expected
    assert list(table[0]) == ["round", "size", "accuracy", "loss"]
    curves = charts(tmp_path)["over-rounds"].series
    drawn = {(x, curve.name): y for curve in curves for x, y in zip(curve.x, curve.y)}
    assert drawn == expected


@pytest.mark.parametrize(
    "name, of",
    [
        ("parameters", lambda size: size["parameters"]),
        ("macs", lambda size: size["macs"]),
        ("bytes", lambda size: size["bytes_down"] + size["bytes_up"]),
    ],
)
def test_costs_are_drawn_on_a_logarithmic_axis_against_the_last_evaluation(tmp_path: Path, name: str, of: Any) -> None:
    report.write(save(tmp_path, FINISHED))
    last = FINISHED[4]["accuracy"]
    expected = [(size["label"], of(size), last[size["label"]]) for size in FINISHED[0]["sizes"]]
    table = rows(tmp_path, f"against-{name}")
    assert [(row["size"], int(row[name]), float(row["accuracy"])) for row in table] == expected
    chart = charts(tmp_path)[f"against-{name}"]
    assert chart.x.log
    assert list(zip(chart.series[0].x, chart.series[0].y)) == [(x, y) for _, x, y in expected]


def test_traffic_adds_up_over_all_rounds_also_those_without_evaluation(tmp_path: Path) -> None:
    report.write(save(tmp_path, FINISHED))
    table = rows(tmp_path, "against-traffic")
    at = {int(row["round"]): int(row["bytes"]) for row in table}
    assert at == {2: 110 + 220, 4: 110 + 220 + 330 + 440}


def test_virtual_time_adds_up_and_ends_where_a_round_has_none(tmp_path: Path) -> None:
    timed = [
        start(),
        *(round_event(n, scores=[0.1, 0.2, 0.3], virtual_seconds=n * 0.5) for n in (1, 2)),
        round_event(3),
    ]
    timed.append(round_event(4, scores=[0.1, 0.2, 0.3], virtual_seconds=9.0))
    report.write(save(tmp_path, timed))
    assert {int(row["round"]): float(row["virtual_seconds"]) for row in rows(tmp_path, "against-virtual-time")} == {
        1: 0.5,
        2: 1.5,
    }


def test_there_is_no_figure_of_virtual_time_without_speeds(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, [start(), round_event(1, scores=[0.1, 0.2, 0.3])]))
    assert "against-virtual-time" not in page.told
    assert not (tmp_path / "report" / "against-virtual-time.csv").exists()


def test_groups_count_participations_and_samples(tmp_path: Path) -> None:
    report.write(save(tmp_path, FINISHED))
    table = {row["group"]: row for row in rows(tmp_path, "groups")}
    counts = {name: (int(row["participations"]), int(row["samples"])) for name, row in table.items()}
    assert counts == {"group 0.25": (4, 40), "group 0.5": (0, 0), "group 1.0": (4, 48)}
    assert table["group 1.0"]["size"] == "1.0"
    assert int(table["group 1.0"]["bytes_up"]) == cost(2)["bytes_up"]
    assert "budget" not in table["group 1.0"]


def test_a_group_whose_devices_changed_size_says_how_often(tmp_path: Path) -> None:
    parts = [{"client": 0, "group": "group 0.25", "size": size, "samples": 1} for size in ("0.25", "0.5", "0.5")]
    report.write(save(tmp_path, [start(), round_event(1, clients=parts)]))
    assert rows(tmp_path, "groups")[0]["size"] == "0.25 (1×), 0.5 (2×)"


def test_a_group_that_was_not_announced_is_counted(tmp_path: Path) -> None:
    parts = [{"client": 0, "group": "late", "size": "0.25", "samples": 5}]
    report.write(save(tmp_path, [start(), round_event(1, clients=parts)]))
    late = rows(tmp_path, "groups")[-1]
    assert (late["group"], late["participations"], late["samples"], late["parameters"]) == ("late", "1", "5", "")


def test_budgets_are_shown_in_units(tmp_path: Path) -> None:
    group = {"name": "camera", "size": "0.25", "clients": 3, "capacity": None} | cost(0)
    one_group = start(groups=[group | {"budget": {"activation_bytes": 64_000_000, "macs": 5e6}}])
    page = page_of(save(tmp_path, [one_group]))
    words = page.row("camera")[3][0].replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert words == "activations ≤ 64.0 MB, MACs ≤ 5.00 M"
    assert json.loads(rows(tmp_path, "groups")[0]["budget"]) == {"activation_bytes": 64_000_000, "macs": 5e6}


def test_a_repeated_round_counts_once_and_the_last_one_counts(tmp_path: Path) -> None:
    events = [
        start(),
        round_event(1, scores=[0.1, 0.1, 0.1]),
        round_event(2, scores=[0.2, 0.2, 0.2]),
        {"event": "resume", "round": 1},
        round_event(2, scores=[0.3, 0.3, 0.3]),
        END,
    ]
    report.write(save(tmp_path, events))
    over = {(row["round"], row["size"]): float(row["accuracy"]) for row in rows(tmp_path, "over-rounds")}
    assert over == {("1", label): 0.1 for label in LABELS} | {("2", label): 0.3 for label in LABELS}
    assert [row["participations"] for row in rows(tmp_path, "groups")] == ["2", "0", "2"]
    assert {row["bytes"] for row in rows(tmp_path, "against-traffic")} == {"110", "330"}


def test_rounds_after_the_state_a_run_was_resumed_from_are_left_out(tmp_path: Path) -> None:
    events = [start(), round_event(1), round_event(2, scores=[0.2, 0.2, 0.2]), {"event": "resume", "round": 1}]
    page = page_of(save(tmp_path, events))
    assert "running at round 1" in page.text
    assert "No evaluation yet" in page.text


def test_the_head_says_what_was_run_and_that_it_ended(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, FINISHED))
    for words in ("demo", "flanc", "small-cnn on digits", "4 clients", "4 rounds", "seed 7", "finished in 41.0 s"):
        assert words in page.text
    assert "one notice" in page.text


def test_a_run_that_goes_on_after_its_end_is_running(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, [*FINISHED, {"event": "resume", "round": 4}, round_event(5)]))
    assert "running at round 5" in page.text
    assert "5 rounds" in page.text
    assert "finished" not in page.text


def test_a_run_without_rounds_has_its_costs_and_its_partition(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, [start()]))
    assert set(page.told) == {"labels", "samples"}
    assert page.row("0.25")[1] == ("–", None)
    assert "running at round 0" in page.text


def test_a_run_without_evaluations_shows_its_training_loss(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, [start(), round_event(1), round_event(2)]))
    assert charts(tmp_path)["training-loss"].series[0].y == (2.0, 1.0)
    assert "over-rounds" not in page.told
    assert "No evaluation yet" in page.text


def test_perplexity_is_said_to_be_better_when_lower(tmp_path: Path) -> None:
    plain = start(metric="perplexity", higher_is_better=False, partition={"clients": 9, "samples": [1] * 3})
    scores = [123.456789, 99.5, 12.25]
    page = page_of(save(tmp_path, [plain, round_event(1, metric="perplexity", scores=scores)]))
    assert "lower perplexity is better" in page.text
    assert "higher" not in page.text.lower()
    assert "Perplexity over rounds" in page.text
    assert page.row("0.25")[1] == ("123.46", "123.456789")
    assert [float(row["perplexity"]) for row in rows(tmp_path, "sizes")] == scores
    assert "labels" not in page.told
    assert "The first 3 of 9 clients." in page.text


def test_one_size_and_one_group_are_enough(tmp_path: Path) -> None:
    only = start(sizes=start()["sizes"][:1], groups=start()["groups"][:1], partition=None)
    page = page_of(save(tmp_path, [only, round_event(1, scores=[0.5])]))
    assert page.row("0.25")[1][0] == "0.5000"
    assert "over-rounds" in page.told


def test_the_partition_is_the_histogram_of_the_start_event(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, FINISHED))
    histogram = FINISHED[0]["partition"]["histogram"]
    names = FINISHED[0]["partition"]["class_names"]
    table = {(int(row["client"]), row["class"]): int(row["samples"]) for row in rows(tmp_path, "labels")}
    assert table == {(i, name): row[k] for i, row in enumerate(histogram) for k, name in enumerate(names)}
    assert charts(tmp_path)["labels"].z == tuple(zip(*histogram))
    assert page.told["labels"]["cells"] == [[str(samples) for samples in column] for column in zip(*histogram)]
    assert (page.told["labels"]["x"][3], page.told["labels"]["y"][2]) == ("client 3", "class eel")
    assert [int(row["samples"]) for row in rows(tmp_path, "samples")] == [10, 11, 12, 13]


def test_clients_own_metrics_come_from_the_latest_round(tmp_path: Path) -> None:
    scores = {"group 0.25": {"mean": 0.812345, "worst_decile": 0.6, "spread": 0.1, "clients": 2}}
    events = [*FINISHED[:4], round_event(4, scores=[0.1, 0.2, 0.3], client_metrics=scores)]
    lines = [
        "round,client,group,size,samples,accuracy,loss",
        "2,0,group 0.25,0.25,3,0.1,1.0",
        "4,0,group 0.25,0.25,3,0.7,1.0",
        "4,1,group 0.25,0.25,4,0.8,1.0",
        "4,0,group 0.25,0.25,3,0.75,1.0",  # a resumed run wrote it again
        "5,0,group 0.25,0.25,3,0.9,1.0",  # no such round in the events
        "4,1,group 0.25,0.25,4,0.",  # torn
    ]
    save(tmp_path, events)
    (tmp_path / "clients.csv").write_text("\n".join(lines))
    page = page_of(tmp_path)
    table = [
        (row["round"], row["client"], row["samples"], row["accuracy"]) for row in rows(tmp_path, "client-distribution")
    ]
    assert table == [("4", "0", "3", "0.75"), ("4", "1", "4", "0.8")]
    assert [float(rows(tmp_path, "client-metrics")[0][key]) for key in ("mean", "worst_decile", "spread")] == [
        0.812345,
        0.6,
        0.1,
    ]
    assert "Clients’ own held-out data" in page.text


def test_a_damaged_line_of_clients_csv_is_named(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    (tmp_path / "clients.csv").write_text("round,client,group,size,samples,accuracy,loss\n4,0,a,0.25,3,good,1\n")
    with pytest.raises(CheckpointError, match=r"clients\.csv, line 2 is damaged: score"):
        report.write(tmp_path)


def test_a_client_without_held_out_samples_is_listed_and_not_drawn(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    (tmp_path / "clients.csv").write_text(
        "round,client,group,size,samples,accuracy,loss\r\n4,0,group 0.25,0.25,0,,\r\n4,1,group 0.25,0.25,3,0.5,1\r\n"
    )
    report.write(tmp_path)
    assert [row["accuracy"] for row in rows(tmp_path, "client-distribution")] == ["", "0.5"]
    assert charts(tmp_path)["client-distribution"].boxes[0].values == (0.5,)


def test_a_clients_csv_of_another_metric_is_refused(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    (tmp_path / "clients.csv").write_text("round,client,group,size,samples,perplexity,loss\n")
    with pytest.raises(CheckpointError, match="no column 'accuracy'"):
        report.write(tmp_path)


def test_a_metric_that_is_not_finite_leaves_a_gap_in_the_curve_and_in_the_csv(tmp_path: Path) -> None:
    report.write(save(tmp_path, [start(), round_event(1, scores=[math.nan, math.inf, 0.5])]))
    assert [curve.y for curve in charts(tmp_path)["over-rounds"].series] == [(None,), (None,), (0.5,)]
    assert [row["accuracy"] for row in rows(tmp_path, "sizes")] == ["", "", "0.5"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, FINISHED[:3])
    path = tmp_path / "events.jsonl"
    whole = path.read_bytes()
    torn = json.dumps(round_event(3, note="é"), ensure_ascii=False).encode()
    for cut in (1, 20, torn.index("é".encode()) + 1):
        path.write_bytes(whole + torn[:cut])
        assert read_events(path) == FINISHED[:3]
    assert "running at round 2" in page_of(tmp_path).text


@pytest.mark.parametrize("damage", [b"{not json", b"[1, 2]", b'{"round": 3}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, damage: bytes) -> None:
    path = save(tmp_path, FINISHED) / "events.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CheckpointError, match=r"events\.jsonl, line 3 is damaged"):
        read_events(path)


def test_a_round_without_its_number_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    save(tmp_path, [start(), round_event(1), {"event": "round"}])
    for reader in (report.write, history):
        with pytest.raises(CheckpointError, match=r"events\.jsonl, line 3 is damaged: round = None"):
            reader(tmp_path)


def test_the_report_and_the_history_count_the_same_rounds(tmp_path: Path) -> None:
    lost = [round_event(number, train_loss=9.0) for number in (1, 2, 3, 4)]
    again = [{"event": "resume", "round": 1}, round_event(2, train_loss=1.0), round_event(2, train_loss=2.0)]
    save(tmp_path, [start(), *lost, *again])
    expected = [(1, 9.0), (2, 2.0)]
    assert [(event["round"], event["train_loss"]) for event in history(tmp_path)] == expected
    assert [(round_.round, round_.train_loss) for round_ in read(tmp_path).rounds] == expected


def test_a_value_of_the_wrong_kind_is_an_error_that_lists_all_of_them(tmp_path: Path) -> None:
    save(tmp_path, [start(rounds="many", seed="x"), round_event(1)])
    with pytest.raises(CheckpointError, match=r"line 1 is damaged: rounds: .*; seed: "):
        report.write(tmp_path)


def test_unknown_events_and_keys_are_ignored(tmp_path: Path) -> None:
    later = [{"event": "weather", "rain": True}]
    assert read(save(tmp_path, [start(new=1), *later, round_event(1, new=[2])])).rounds[0].round == 1


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*events\.jsonl.*anysize run"):
        report.write(tmp_path)
    save(tmp_path, [round_event(1)])
    with pytest.raises(CheckpointError, match="no start event"):
        report.write(tmp_path)


def test_a_damaged_environment_is_named(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    (tmp_path / "environment.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"environment\.json is damaged"):
        report.write(tmp_path)


HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&lt;%{x}"


def hostile_run(directory: Path) -> Path:
    group = {"name": HOSTILE, "size": HOSTILE, "clients": 1, "budget": {HOSTILE: 1}} | cost(0)
    begin = start(
        name=HOSTILE,
        method=HOSTILE,
        model=HOSTILE,
        data=HOSTILE,
        metric=HOSTILE,
        sizes=[{"label": HOSTILE, **cost(0)}],
        groups=[group],
        notices=[HOSTILE],
        partition={"clients": 1, "class_names": [HOSTILE], "samples": [1], "histogram": [[1]]},
    )
    own = {HOSTILE: {"mean": 0.5, "worst_decile": 0.5, "spread": 0.0, "clients": 1}}
    event = round_event(1, client_metrics=own) | {HOSTILE: {HOSTILE: 0.5}, "metrics": {HOSTILE: {HOSTILE: 0.5}}}
    devices = {"event": "devices", "round": 1, "devices": [{"client": 0, "name": HOSTILE, "group": HOSTILE}]}
    absent = {"missing": [{"client": 0, "why": HOSTILE, "task": HOSTILE}]}
    save(directory, [begin, devices, event | absent])
    (directory / "config.toml").write_text(f"name = '''{HOSTILE}'''")
    (directory / "environment.json").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    with (directory / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "client", "group", "size", "samples", HOSTILE, "loss"])
        writer.writerow([1, HOSTILE, HOSTILE, HOSTILE, 1, 0.5, 0.5])
    return directory


def test_everything_that_comes_from_files_is_escaped(tmp_path: Path) -> None:
    page = page_of(hostile_run(tmp_path))
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len([attributes for attributes in scripts if not attributes]) == 1  # the page's own
    assert page.text.count(HOSTILE) >= 9  # readers see the names as they are
    assert HOSTILE in page.row(HOSTILE)[0][0]


def test_every_figure_is_well_formed_whatever_its_names_are(tmp_path: Path) -> None:
    hostile = hostile_run(tmp_path)
    report.write(hostile)
    files = sorted((hostile / "report").glob("*.svg"))
    assert [path.stem for path in files] == sorted(charts(hostile))
    for path in files:
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(path).getroot().iter()}
        assert tags <= {"svg", "g", "path", "rect", "circle", "polygon", "text"}


def test_the_words_of_a_figure_cannot_end_the_element_that_holds_them(tmp_path: Path) -> None:
    words = "</script><!--&amp;"
    drawn = Bars((Series(words, (0,), (1,), ACCENT),), Axis("", names=(words,)), Axis(""))
    page = Page(render(read(save(tmp_path, FINISHED)), [], [Figure("raw", "rounds", "raw", "", (), (), drawn)]))
    assert page.told == {"raw": {"points": [[0.5, None, f"{words}\n{words}: 1"]]}}


def test_only_the_pages_own_scripts_may_run_and_nothing_is_fetched(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, FINISHED))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert re.findall(r"script-src ([^;]*)", policy)[0].count("'sha256-") == 1
    assert not any("src" in attributes for _, attributes in page.tags)
    links = [attributes["href"] for tag, attributes in page.tags if "href" in attributes]
    assert links
    assert all((tmp_path / str(link)).is_file() for link in links)


def test_every_figure_and_table_links_to_its_csv(tmp_path: Path) -> None:
    page = page_of(save(tmp_path, FINISHED))
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    written = {f"report/{path.name}" for path in (tmp_path / "report").iterdir()}
    assert links == written
    assert {f"report/{name}.{kind}" for name in page.told for kind in ("csv", "svg")} <= written


def test_a_figure_draws_each_value_at_its_place(tmp_path: Path) -> None:
    report.write(save(tmp_path, FINISHED))
    root = ElementTree.parse(tmp_path / "report" / "over-rounds.svg").getroot()
    left, top, right, bottom = map(float, root.attrib["data-area"].split())
    marks = [e for e in root.iter("{http://www.w3.org/2000/svg}circle") if e.get("r") == "4"]
    places = [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in marks]
    # The smallest size has circles: 0.5 after round 2 and 0.3 after round 4; all scores lie between 0.3 and 0.912.
    low, high = 0.1 + 0.2, 0.9123456789
    expected = [(2, 0.5), (4, low)]
    assert places == [
        (
            pytest.approx(left + round_ / 4 * (right - left), abs=0.1),
            pytest.approx(bottom - (value - low) / (high - low) * (bottom - top), abs=0.1),
        )
        for round_, value in expected
    ]


def test_the_page_is_smaller_than_a_megabyte_with_a_thousand_rounds_and_clients(tmp_path: Path) -> None:
    rounds = [round_event(n, scores=[1 / n, 2 / n, 3 / n]) for n in range(1, 1001)]
    crowd = {"clients": 1000, "samples": [10] * 200, "histogram": [[n % 7] * 10 for n in range(200)]}
    save(tmp_path, [start(partition=crowd), *rounds])
    lines = [f"1000,{n},group {LABELS[n % 3]},{LABELS[n % 3]},3,{n / 1000},1.0" for n in range(1000)]
    (tmp_path / "clients.csv").write_text("\n".join(["round,client,group,size,samples,accuracy,loss", *lines, ""]))
    assert report.write(tmp_path).stat().st_size < 1_000_000


def test_groups_and_legends_are_in_order_of_size_with_the_colour_of_the_size(tmp_path: Path) -> None:
    turned = start(groups=start()["groups"][::-1])
    own = {f"group {label}": {"mean": 0.5, "spread": 0.1, "clients": 2} for label in LABELS[::-1]}
    save(tmp_path, [turned, round_event(1, scores=[0.1, 0.2, 0.3], client_metrics=own)])
    lines = [f"1,{n},group {label},{label},3,0.5,1.0" for n, label in enumerate(LABELS[::-1])]
    (tmp_path / "clients.csv").write_text("\n".join(["round,client,group,size,samples,accuracy,loss", *lines, ""]))
    page, drawn = page_of(tmp_path), charts(tmp_path)
    groups = [f"group {label}" for label in LABELS]
    colours = [f"var(--size-{place})" for place in range(3)]
    for table in ("groups", "client-metrics"):
        assert [row["group"] for row in rows(tmp_path, table)] == groups
    assert [(line.name, line.look[0]) for line in drawn["client-rounds"].series] == list(zip(groups, colours))
    assert [(box.name, box.colour) for box in drawn["client-distribution"].boxes] == list(zip(groups, colours))
    assert [(line.name, line.look[0]) for line in drawn["over-rounds"].series] == list(zip(LABELS, colours))
    assert [own for own, _ in drawn["by-size"].series[0].looks] == colours
    swatches = [str(a["style"]).removeprefix("background: ") for _, a in page.tags if a.get("class") == "swatch"]
    assert swatches == colours * 3


def test_coefficients_of_a_size_have_its_colour(tmp_path: Path) -> None:
    directory = save(tmp_path, [start(), round_event(1)])
    write_analysis(directory, 1, {f"coefficients/{label}/conv": torch.rand(5) for label in LABELS[::-1]})
    lines = charts(directory)["analysis-coefficients-conv"].series
    assert [(line.name, line.look[0]) for line in lines] == [
        (label, f"var(--size-{place})") for place, label in enumerate(LABELS)
    ]


def test_config_and_environment_are_on_the_page(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    (tmp_path / "config.toml").write_text("[data]\nname = 'digits & more'\n")
    (tmp_path / "environment.json").write_text(json.dumps({"torch": "2.13", "hardware": {"cores": 2}}))
    page = page_of(tmp_path)
    assert "[data] name = 'digits & more'" in page.text
    assert page.row("hardware.cores") == [("hardware.cores", None), ("2", None)]


def test_the_same_files_give_the_same_report_and_leave_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, FINISHED)
    first = report.write(tmp_path).read_bytes()
    assert report.write(tmp_path).read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "report", "report.html"]
    assert {path.suffix for path in (tmp_path / "report").iterdir()} == {".csv", ".svg"}


def luminance(colour: str) -> float:
    """Relative luminance by the definition of the web's accessibility guidelines."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("sizes", [1, 2, 4, 9])
def test_size_colours_stand_out_from_the_page_and_are_in_order_of_lightness(sizes: int) -> None:
    on_white = [1.05 / (luminance(colour) + 0.05) for colour in palette(sizes, ON_LIGHT)]
    on_dark = [(luminance(colour) + 0.05) / (luminance("#191d23") + 0.05) for colour in palette(sizes, ON_DARK)]
    for contrast in (on_white, on_dark):
        assert len(contrast) == sizes
        assert min(contrast) >= 3
        assert contrast == sorted(contrast)


def test_what_a_method_describes_is_drawn_by_its_shape_with_every_value_in_a_csv(tmp_path: Path) -> None:
    directory = save(tmp_path, [start(), round_event(1), round_event(2)])
    for number, value in ((1, 0.5), (2, 0.25)):
        arrays = {"spread/all": torch.tensor(value), "sigma/conv": torch.arange(3.0), "gram/conv": torch.eye(2) * value}
        write_analysis(directory, number, arrays)
    page = report.write(directory).read_text()
    assert 'id="analysis"' in page
    csv_of = {path.name: path.read_text() for path in (directory / "report").glob("analysis-*.csv")}
    assert csv_of["analysis-spread-over-rounds.csv"] == "round,item,spread\n1,all,0.5\n2,all,0.25\n"
    assert csv_of["analysis-sigma.csv"].splitlines()[-1] == "conv,2,2.0"
    assert csv_of["analysis-gram-conv.csv"].splitlines()[1:] == ["0,0,0.25", "0,1,0.0", "1,0,0.0", "1,1,0.25"]


def test_principal_kernels_are_drawn_over_rounds_and_against_their_singular_values(tmp_path: Path) -> None:
    directory = save(tmp_path, [start(), round_event(1), round_event(2)])
    for number, needed in ((1, 3.5), (2, 2.5)):
        arrays = {
            "needed_kernels/network.conv.weight": torch.tensor([needed, 4.0]),
            "kernel_draws/network.conv.weight": torch.tensor([[8.0, 4.0, 2.0, 0.0], [3.0, 2.0, 1.5, 0.5]]),
        }
        write_analysis(directory, number, arrays)
    report.write(directory)
    csv_of = {path.name: path.read_text() for path in (directory / "report").glob("analysis-*.csv")}
    assert csv_of["analysis-needed_kernels.csv"].splitlines() == [
        "round,layer,needed_kernels",
        '1,"conv, 4 kernels",3.5',
        '2,"conv, 4 kernels",2.5',
    ]
    assert csv_of["analysis-kernel_draws.csv"].splitlines()[:3] == [
        "layer,kernel,singular_value,clients_a_round",
        "conv,0,8.0,3.0",
        "conv,1,4.0,2.0",
    ]


# Runs that are judged on the clients ----------------------------------------------------------------


@pytest.fixture(scope="module")
def judged_by_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of six clients that is judged on what each of them holds out, and on nothing else."""
    directory = tmp_path_factory.mktemp("run") / "run"
    options = {"on": ["clients"], "clients": 4}
    small.experiment(evaluation=options, engine={"name": "inprocess"}).run(directory)
    return directory


def own_rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_that_is_judged_on_clients_alone_shows_how_good_each_size_is(judged_by_clients: Path) -> None:
    page = page_of(judged_by_clients)
    assert "6 clients" in page.text
    assert "No evaluation yet" not in page.text
    assert "A size is judged by the clients that train it" in page.text
    by_size: dict[tuple[int, str], list[float]] = {}
    for row in own_rows(judged_by_clients):
        by_size.setdefault((int(row["round"]), row["size"]), []).append(float(row["accuracy"]))
    means = {place: sum(values) / len(values) for place, values in by_size.items()}
    assert {number for number, _ in means} == {1, 2, 3}
    found = {(int(row["round"]), row["size"]): float(row["accuracy"]) for row in rows(judged_by_clients, "over-rounds")}
    assert found == pytest.approx(means)
    last = {row["size"]: float(row["accuracy"]) for row in rows(judged_by_clients, "sizes") if row["accuracy"]}
    assert last == pytest.approx({size: mean for (number, size), mean in means.items() if number == 3})
    assert "loss" not in rows(judged_by_clients, "sizes")[0]  # events have no such mean
    assert {"over-rounds", "against-macs", "against-traffic"} <= set(page.told)
    assert "client-rounds" not in page.told  # the same curves once more
    assert "Devices" not in page.text


def test_the_page_agrees_with_the_events_to_the_last_digit(judged_by_clients: Path) -> None:
    page_of(judged_by_clients)
    events = [event for event in read_events(judged_by_clients / "events.jsonl") if event["event"] == "round"]
    told = {(e["round"], name): score["mean"] for e in events for name, score in e["client_metrics"].items()}
    found = {(int(row["round"]), row["size"]): float(row["accuracy"]) for row in rows(judged_by_clients, "over-rounds")}
    assert found == told


def group_scores(**means: tuple[float, int]) -> dict[str, Any]:
    return {name: {"mean": mean, "worst_decile": 0.0, "spread": 0.0, "clients": n} for name, (mean, n) in means.items()}


def test_a_size_that_two_groups_train_has_the_mean_over_all_their_clients(tmp_path: Path) -> None:
    groups = [{"name": name, "size": "0.5", "clients": None} | cost(1) for name in ("camera", "phone")]
    begin = start(groups=groups, partition={"clients": 0})
    judged = group_scores(camera=(0.5, 1), phone=(0.9, 3))
    report.write(save(tmp_path, [begin, round_event(1, client_metrics=judged)]))
    assert [float(row["accuracy"]) for row in rows(tmp_path, "over-rounds")] == [pytest.approx((0.5 + 3 * 0.9) / 4)]
    curves = charts(tmp_path)["client-rounds"].series
    assert {curve.name: curve.y for curve in curves} == {"camera": (0.5,), "phone": (0.9,)}


def test_the_spread_over_all_clients_of_a_size_is_drawn_and_listed(tmp_path: Path) -> None:
    own = {"camera": [0.1, 0.3], "phone": [0.8, 0.9, 1.0]}
    groups = [{"name": name, "size": "0.5", "clients": None} | cost(1) for name in own]
    judged = {
        name: {"mean": statistics.fmean(v), "worst_decile": min(v), "spread": statistics.pstdev(v), "clients": len(v)}
        for name, v in own.items()
    }
    events = [round_event(n, client_metrics=judged) for n in (1, 2)]
    report.write(save(tmp_path, [start(groups=groups, partition={"clients": 0}), *events]))
    expected = statistics.pstdev(own["camera"] + own["phone"])
    assert [float(row["spread"]) for row in rows(tmp_path, "over-rounds")] == [pytest.approx(expected)] * 2
    assert float(rows(tmp_path, "sizes")[1]["spread"]) == pytest.approx(expected)
    assert 'class="band"' in (tmp_path / "report" / "over-rounds.svg").read_text()


def test_with_a_test_set_the_clients_own_metrics_have_curves_of_their_own(tmp_path: Path) -> None:
    events = [
        round_event(n, scores=[0.1, 0.2, 0.3], client_metrics=group_scores(**{"group 0.25": (n / 10, 2)}))
        for n in (1, 2)
    ]
    page = page_of(save(tmp_path, [start(), *events]))
    assert [(int(r["round"]), r["group"], float(r["accuracy"])) for r in rows(tmp_path, "client-rounds")] == [
        (1, "group 0.25", 0.1),
        (2, "group 0.25", 0.2),
    ]
    assert [row["accuracy"] for row in rows(tmp_path, "sizes")] == ["0.1", "0.2", "0.3"]
    assert "A size is judged by the clients" not in page.text


def test_devices_are_shown_by_name_with_what_each_found_last(tmp_path: Path) -> None:
    met = [{"client": c, "name": name, "group": "group 0.25"} for c, name in enumerate(["board", "cam", "van"])]
    moved = {"client": 2, "name": "van", "group": "group 1.0"}
    missing = {"missing": [{"client": 1, "why": "too late", "task": "train"}]}
    events = [
        start(partition={"clients": 0, "samples": []}),
        {"event": "devices", "round": 1, "devices": met},
        round_event(1, client_metrics=group_scores(**{"group 0.25": (0.5, 2)})),
        {"event": "devices", "round": 2, "devices": [moved]},
        round_event(2, client_metrics=group_scores(**{"group 1.0": (0.7, 1)}), **missing),
    ]
    save(tmp_path, events)
    lines = ["round,client,group,size,samples,accuracy,loss"]
    lines += ["1,0,group 0.25,0.25,,0.4,1.5", "1,2,group 0.25,0.25,,0.6,1.25", "2,2,group 1.0,1.0,,0.7,1.0"]
    (tmp_path / "clients.csv").write_text("\n".join([*lines, ""]))
    page = page_of(tmp_path)
    assert "3 devices" in page.text
    assert [list(row.values()) for row in rows(tmp_path, "devices")] == [
        ["board", "group 0.25", "0.4", "1.5", "1", "2", "0", "0"],
        ["cam", "group 0.25", "", "", "", "0", "1", "1"],
        ["van", "group 1.0", "0.7", "1.0", "2", "2", "0", "2"],
    ]
    assert [cell for cell, _ in page.row("board")] == ["board", "group 0.25", "0.4000", "1.5000", "1", "2", "0", "0"]
    assert [row["device"] for row in rows(tmp_path, "missing")] == ["cam"]
    assert "most often from cam (1×)" in page.text
    assert {row["group"]: row["clients"] for row in rows(tmp_path, "groups")}["group 1.0"] == "2"  # as announced
    points = [point for box in charts(tmp_path)["client-distribution"].boxes for point in box.titles]
    assert points == ["van"]  # of the latest round


def test_devices_that_nobody_announced_are_counted(tmp_path: Path) -> None:
    groups = [{"name": "0.25", "size": "0.25", "clients": None} | cost(0)]
    met = [{"client": c, "name": f"cam-{c}", "group": "0.25"} for c in range(3)]
    begin = start(groups=groups, partition={"clients": 0, "samples": []})
    page = page_of(save(tmp_path, [begin, {"event": "devices", "round": 1, "devices": met}]))
    assert rows(tmp_path, "groups")[0]["clients"] == "3"
    assert "3 devices" in page.text
    assert "No evaluation yet" in page.text
