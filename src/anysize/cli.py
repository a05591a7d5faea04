"""The command line: parse, one public call, print."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from anysize.errors import AnysizeError

if TYPE_CHECKING:
    from anysize.run import Run

app = typer.Typer(
    name="anysize",
    help="Train one model across devices of every size, and deploy it at any size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_WIDTH = None if sys.stdout.isatty() else 140  # a file or a pipe has no width of its own
out = Console(highlight=False, soft_wrap=True, width=_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True)

File = Annotated[Path, typer.Argument(help="The experiment file.", show_default=False)]
Directory = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Train one model across devices of every size, and deploy it at any size."""


@app.command()
def run(
    file: File,
    set_: Set = None,
    out_: Annotated[Path | None, typer.Option("--out", help="The run directory; by default runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
) -> None:
    """Run an experiment, write its directory and its report."""
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    _run(file, set_ or [], out_, resume, overwrite)


@app.command()
def plan(file: File, set_: Set = None, as_json: AsJson = False) -> None:
    """Show what each device group would train, what it costs, and what leaves a device."""
    from anysize.planning import plan as make_plan

    made = make_plan(_experiment(file, set_ or []))
    if as_json:
        _print_json(made)
        return
    table = Table("group", "clients", "width", box=None, header_style="bold")
    for column in ("parameters", "MACs", "training MACs", "activations", "bytes down", "bytes up"):
        table.add_column(column, justify="right")
    for group in made["groups"]:
        cells = [f"{group['parameters']:,}", *(_count(group[key]) for key in ("macs", "training_macs"))]
        cells += [_bytes(group[key]) for key in ("activation_bytes", "bytes_down", "bytes_up")]
        table.add_row(group["name"], str(group["clients"]), f"{group['width']:g}", *cells)
    out.print(table)
    out.print(
        "\nMACs: one forward pass of one sample. Training MACs: loss and backward, per sample. Bytes: per client and round."
    )
    out.print("\nLeaves a device: " + "; ".join(made["leaves_the_device"]) + ".")
    _print_notices(made["notices"])


@app.command()
def inspect(file: File, set_: Set = None, as_json: AsJson = False) -> None:
    """Show the model's width groups, and which methods can train it."""
    from anysize.inspection import inspect as look

    found = look(_experiment(file, set_ or []))
    if as_json:
        _print_json(found)
        return
    out.print(found["text"], markup=False)
    out.print()
    for method in found["methods"]:
        mark = "[green]yes[/]" if method["can"] else "[red]no[/] "
        out.print(f"{method['name']:<10} {mark}  {method['why']}")


@app.command()
def customize(
    directory: Directory,
    to: Annotated[Path, typer.Option("--to", help="net.onnx, net.pt2 or net.safetensors.", show_default=False)],
    size: Annotated[str | None, typer.Option("--size", help="A trained size's label, or any width.")] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", metavar="UNIT=AMOUNT", help="inference_bytes=4e6, macs=...")
    ] = None,
) -> None:
    """Cut a run's model to a size and write it as a file."""
    import anysize as az
    from anysize.customize import export as write

    made = az.load(directory)
    if (size is None) == (not budget):
        raise click.UsageError("give --size or --budget, one of the two")
    chosen = made.size(size) if size is not None else made.fitting(_budget(budget or []))
    network = made.customize(chosen.label if size is None else size)
    about = {"run": made.config.name, "size": chosen.label, "width": chosen.width, "round": made.round}
    done = write(network, to, made.experiment.signature, about | {"data": made.experiment.signature.to_json()})
    parameters = sum(parameter.numel() for parameter in network.parameters())
    out.print(f"{done.path}: size {chosen.label}, {parameters:,} parameters, {_bytes(done.size_bytes)}")
    out.print(f"checked against PyTorch: outputs differ by at most {done.difference:.2g}")
    if chosen.label not in {trained.label for trained in made.sizes}:
        out.print(
            f"width {chosen.width:g} was never trained; see its accuracy with: anysize evaluate {directory} --size {size}"
        )


app.command("export", hidden=True)(customize)


@app.command()
def evaluate(
    directory: Directory,
    size: Annotated[
        list[str] | None, typer.Option("--size", help="A label or a width; repeatable; by default all trained.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every size of a run, finished or not, on the test set."""
    import anysize as az

    made = az.load(directory)
    metric = made.experiment.task.metric
    with err.status("evaluating"):
        metrics = made.evaluate(size or None)
    if as_json:
        _print_json({"metric": metric, metric: {label: m[metric] for label, m in metrics.items()}, "metrics": metrics})
        return
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    table = Table("size", *names, box=None, header_style="bold")
    for label, values in metrics.items():
        table.add_row(label, *(f"{values[name]:.4f}" for name in names))
    out.print(table)


@app.command()
def report(directory: Directory) -> None:
    """Write the run's report.html anew."""
    from anysize.report import write

    out.print(f"{write(directory)}")


@app.command()
def status(directory: Directory, as_json: AsJson = False) -> None:
    """Show how far a run is."""
    from anysize.run import status as look

    found = look(directory)
    if as_json:
        _print_json(found)
        return
    out.print(f"{found['name']}: round {found['round']} of {found['rounds']}, {found['state']}")
    if found["latest"]:
        out.print(f"{found['metric']} at round {found['evaluated']}: {_by_size(found['latest'])}")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods."""
    from anysize.methods import methods as known

    _print_list(known(), as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models."""
    from anysize.models import models as known

    _print_list(known(), as_json)


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the data sets."""
    from anysize.data import datasets as known

    _print_list(known(), as_json)


@app.command()
def demo(
    out_: Annotated[Path, typer.Option("--out", help="The run directory.")] = Path("runs/demo"),
) -> None:
    """Train FLANC across 20 devices of four sizes on handwritten digits, and export two of the networks."""
    from anysize.customize import export as write

    file = Path(str(files("anysize") / "demo.toml"))
    out.print("20 devices of four sizes learn handwritten digits together; nobody shares an image.\n")
    made = _run(file, [], out_, resume=False, overwrite=True)
    out.print()
    for label in ("0.25", "1.0"):
        path = out_ / f"net-{label}.onnx"
        with err.status(f"exporting {path}"):
            done = write(made.customize(label), path, made.experiment.signature, {"size": label})
        out.print(
            f"{path}: {_bytes(done.size_bytes)}, checked in onnxruntime: outputs differ by at most {done.difference:.1g}"
        )


def main() -> None:
    """Runs the command line; a user's mistake ends in one or two lines and exit code 2."""
    debug = "--debug" in sys.argv
    try:
        code = app(args=[argument for argument in sys.argv[1:] if argument != "--debug"], standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = 2
    except AnysizeError as error:
        if debug:
            traceback.print_exc()
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        err.print("stopped; every finished round is saved, go on with --resume", style="yellow")
        code = 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        kind = type(error).__name__
        err.print(
            f"error: {kind}: {error} (this is a bug; --debug shows where)", style="red", markup=False, soft_wrap=True
        )
        code = 1
    sys.exit(code)


def _experiment(file: Path, overrides: Sequence[str]) -> Any:
    from anysize.config import load
    from anysize.experiment import Experiment

    return Experiment.from_config(load(file, overrides))


def _run(file: Path, overrides: Sequence[str], directory: Path | None, resume: bool, overwrite: bool) -> Run:
    import anysize as az
    from anysize.report import write

    experiment = _experiment(file, overrides)
    began = time.perf_counter()
    columns = [
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=err, disable=not err.is_terminal) as progress:
        watch = _Watch(progress, experiment.config.rounds)
        made = az.run(experiment, out=directory, resume=resume, overwrite=overwrite, on_event=watch)
    page = write(made.directory)
    _print_summary(made)
    out.print(f"\n{experiment.config.rounds} rounds in {time.perf_counter() - began:.0f} s; the report is {page}")
    return made


class _Watch:
    """Shows events as a live bar on a terminal, as lines elsewhere."""

    def __init__(self, progress: Progress, rounds: int) -> None:
        self._progress = progress
        self._bar = progress.add_task("rounds", total=rounds, note="")
        self._metric = "accuracy"

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._metric = event["metric"]
            _print_notices(event["notices"])
        if kind == "resume":
            self._progress.update(self._bar, completed=event["round"])
        if kind == "round":
            self._progress.update(self._bar, completed=event["round"])
            self._show(event)

    def _show(self, event: Mapping[str, Any]) -> None:
        if self._metric not in event:
            return
        note = _by_size(event[self._metric])
        self._progress.update(self._bar, note=f"{self._metric} {note}")
        if not err.is_terminal:
            err.print(f"round {event['round']}: {self._metric} {note}")


def _print_summary(made: Run) -> None:
    history = made.history
    metric = made.experiment.task.metric
    final = next((event[metric] for event in reversed(history) if metric in event), {})
    table = Table("size", box=None, header_style="bold")
    for column in ("parameters", "MACs", "bytes per round", metric):
        table.add_column(column, justify="right")
    for size in made.sizes:
        cost = made.cost(size)
        value = f"{final[size.label]:.4f}" if size.label in final else "-"
        table.add_row(size.label, f"{cost.parameters:,}", _count(cost.macs), _bytes(cost.bytes), value)
    out.print(table)


def _print_list(known: Sequence[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        _print_json([{"name": name, "summary": summary} for name, summary in known])
        return
    width = max(len(name) for name, _ in known)
    for name, summary in known:
        out.print(f"[bold]{name:<{width}}[/]  {summary}")


def _print_notices(notices: Sequence[str]) -> None:
    for notice in notices:
        err.print(f"note: {notice}", style="yellow", markup=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _by_size(values: Mapping[str, float]) -> str:
    return "  ".join(f"{label}: {value:.3f}" for label, value in values.items())


def _bytes(amount: float) -> str:
    return _scaled(amount, ("B", "kB", "MB", "GB", "TB"))


def _count(amount: float) -> str:
    return _scaled(amount, ("", "K", "M", "G", "T"))


def _scaled(amount: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if amount < 1000:
            return f"{amount:.0f} {unit}".strip() if unit == units[0] else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} {units[-1]}"


def _budget(pairs: Sequence[str]) -> Any:
    from anysize.devices import Budget
    from anysize.errors import ConfigError, unknown

    amounts: dict[str, float] = {}
    for pair in pairs:
        unit, _, text = pair.partition("=")
        if unit not in Budget.__dataclass_fields__:
            raise ConfigError(unknown("unit of a budget", unit, Budget.__dataclass_fields__))
        amounts[unit] = _number(pair, text)
    return Budget(**amounts)


def _number(pair: str, text: str, convert: Callable[[str], float] = float) -> float:
    try:
        return convert(text)
    except ValueError:
        raise click.UsageError(
            f"--budget {pair}: '{text}' is not a number; write for example inference_bytes=4e6"
        ) from None


if __name__ == "__main__":
    main()
