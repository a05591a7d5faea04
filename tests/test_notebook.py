"""A run in Python: how it shows itself, as numbers, as a figure, in a notebook; and errors in the words of Python."""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import anysize as az
import small
from anysize.errors import AnysizeError, CheckpointError
from anysize.records.events import by_round_and_size, status
from anysize.runs import progress

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_run.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    made = small.experiment(evaluate_every=2, evaluation={"on": ["test", "clients"]})
    return made.run(tmp_path_factory.mktemp("runs") / "a<b")


def test_a_run_shows_itself_with_a_line_for_each_size(run: az.Run) -> None:
    first, head, *sizes = repr(run).splitlines()
    assert first.startswith(f"Run {run.directory}: flanc, mlp on digits, after round 3 of 3 rounds, finished")
    assert head.split() == ["size", "accuracy", "parameters", "MACs", "down", "up"]
    last = run.history[-1]["accuracy"]
    assert [tuple(line.split()[:2]) for line in sizes] == [(s, f"{a:.4f}") for s, a in last.items()]
    shown = run._repr_html_()
    assert "a&lt;b" in shown
    assert "a<b" not in shown
    assert all(f"<td>{value:.4f}</td>" in shown for value in last.values())


def test_a_frame_has_a_row_for_each_round_and_size(run: az.Run) -> None:
    pandas = pytest.importorskip("pandas")
    frame = run.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(zip(frame["round"], frame["size"])) == [(n, size) for n in (1, 2, 3) for size in ("0.5", "1.0")]
    for row, event in zip(frame.to_dict("records"), [e for e in run.history for _ in range(2)]):
        assert row["train_loss"] == event["train_loss"]
        if "metrics" in event:
            assert {name: row[name] for name in ("accuracy", "loss")} == event["metrics"][row["size"]]
            assert row["held_out"] == pytest.approx(event["client_metrics"][row["size"]]["mean"])
        else:
            assert math.isnan(row["accuracy"])
            assert math.isnan(row["held_out"])


def test_a_plot_is_the_reports_figure_with_a_line_for_each_size(run: az.Run, tmp_path: Path) -> None:
    run.report()
    plot = run.plot()
    (drawn,) = [path for path in (run.directory / "report").glob("*.svg") if path.read_text() == plot._repr_svg_()]
    points = [line.split(",")[:3] for line in drawn.with_suffix(".csv").read_text().splitlines()[1:]]
    expected = {(str(e["round"]), size, a) for e in run.history for size, a in e.get("accuracy", {}).items()}
    assert {(number, size, float(accuracy)) for number, size, accuracy in points} == expected
    assert plot.save(tmp_path / "plot.svg").read_text() == plot.svg


def test_there_is_nothing_to_plot_before_the_first_evaluation(tmp_path: Path) -> None:
    made = small.experiment(rounds=2, evaluate_every=2)
    started = made.run(tmp_path / "run")
    events = (started.directory / "events.jsonl").read_text().splitlines(keepends=True)
    (started.directory / "events.jsonl").write_text(events[0])
    with pytest.raises(AnysizeError, match="has no evaluation yet"):
        started.plot()


@pytest.mark.parametrize(
    "old, new", [('"metric"', '"metrix"'), ('"label"', '"labels"'), ('"mean": 0', '"mean": "x", "a": 0')]
)
def test_a_frame_of_damaged_events_is_refused(run: az.Run, tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "events.jsonl").write_text((run.directory / "events.jsonl").read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=r"events\.jsonl is damaged"):
        by_round_and_size(tmp_path)
    if old == '"metric"':
        (tmp_path / "config.toml").write_text((run.directory / "config.toml").read_text())
        with pytest.raises(CheckpointError, match=r"events\.jsonl is damaged"):
            status(tmp_path)


def test_the_columns_of_a_frame_have_one_order_and_what_nobody_asked_for_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    run = small.experiment(rounds=2, evaluate_every=2).run(tmp_path / "run")
    expected = ["round", "size", "accuracy", "loss", "train_loss", "bytes_down", "bytes_up", "seconds"]
    assert list(run.frame().columns) == expected


def test_wrong_arguments_are_answered_by_the_names_that_a_user_knows() -> None:
    with pytest.raises(TypeError, match=r"^Experiment\.__init__\(\) got an unexpected keyword argument 'callbacks'"):
        az.Experiment(data="digits", clients=2, model="mlp", method="fedavg", callbacks=[])  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match=r"load\(None\): give the path of a run directory"):
        az.load(None)  # type: ignore[arg-type]


def test_a_run_writes_its_report(run: az.Run) -> None:
    (run.directory / "report.html").unlink(missing_ok=True)
    assert run.report() == run.directory / "report.html"
    assert (run.directory / "report.html").is_file()


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    run: az.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anysize.config.extras.find_spec", lambda name: None)
    with pytest.raises(AnysizeError, match=r"run\.frame\(\) needs pandas, not installed: pip install"):
        run.frame()


def test_errors_speak_of_arguments_in_python_and_of_flags_on_the_command_line(
    run: az.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        small.experiment().run(run.directory)
    assert "continue it with resume=True, choose another folder with out=, or replace it with overwrite=True" in str(
        error.value
    )
    code, _, said = small.call(monkeypatch, capsys, "run", small.file(tmp_path), "--out", run.directory)
    assert code == 2
    assert "continue it with --resume, choose another folder with --out, or replace it with --overwrite" in said


class Display:
    """What the kernel of a notebook shows in the place of one output."""

    def __init__(self, shown: Any, display_id: bool) -> None:
        assert display_id
        self.pages = [shown._repr_html_()]

    def update(self, shown: Any) -> None:
        self.pages.append(shown._repr_html_())


def test_a_notebook_shows_a_bar_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displays: list[Display] = []

    def display(shown: Any, display_id: bool = False) -> Display:
        displays.append(Display(shown, display_id))
        return displays[-1]

    shell = ModuleType("IPython")
    shell.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    part = ModuleType("IPython.display")
    part.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    made = small.experiment(rounds=2).run(tmp_path / "run")
    (bar,) = displays
    assert 'round 1/2 <progress value="1" max="2">' in "".join(bar.pages)
    assert 'round 2/2 <progress value="2" max="2">' in bar.pages[-1]
    assert f"1.0: {made.history[-1]['accuracy']['1.0']:.3f}" in bar.pages[-1]


def test_ipython_at_a_prompt_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ModuleType("IPython")
    prompt.get_ipython = lambda: SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", prompt)
    assert not progress.in_notebook()


def test_the_notebook_of_the_examples_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are not stored: they would grow old"
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources[0].count("rounds=20") == 1
    sources[0] = sources[0].replace("rounds=20", "rounds=4")
    names: dict[str, Any] = {}
    shown = [_executed(source, names) for source in sources]
    assert set(shown[2]["size"]) == {"0.25", "0.5", "0.75", "1.0"}
    assert shown[3]._repr_svg_().startswith("<svg")
    assert set(shown[4]) == {"0.25"}
    assert shown[5].is_file()


def _executed(source: str, names: dict[str, Any]) -> Any:
    """What the last line of a cell gives, as a notebook shows it; None if it is no expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
