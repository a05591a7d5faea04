"""The command line: parse, one public call, print."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from anysize import interrupts
from anysize.cli import fleet as fleets
from anysize.cli.arguments import (
    AsJson,
    Best,
    Directory,
    File,
    Robustness,
    Set,
    budget_of,
    items,
    shard_of,
    whole_number,
)
from anysize.cli.printing import (
    aggregation_lines,
    budget_lines,
    bytes_text,
    domains_line,
    out,
    planned_cells,
    print_attacked,
    print_json,
    print_list,
    print_look_up,
    print_missing,
    print_summary,
    print_table,
    privacy_lines,
    say,
    secure_lines,
    statistics_lines,
    ways_lines,
)
from anysize.engines.start import quick_start
from anysize.errors import AnysizeError, UsageError, in_flags
from anysize.runs.progress import Watch, bars, by_size, err, print_notices

if TYPE_CHECKING:
    from anysize.config.tables import ExperimentConfig
    from anysize.engines.workers.pool import WorkerPool
    from anysize.experiment.experiment import Experiment
    from anysize.runs.run import Run
    from anysize.runtime import Choice

app = typer.Typer(
    name="anysize",
    help="Train one model across devices of every size, and deploy it at any size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
)


_INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt


_ParserError: Any = typer.BadParameter.__base__  # the usage error of click; newer typers bring their own copy


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"anysize {version('anysize')}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model across devices of every size, and deploy it at any size."""


@app.command()
def run(
    file: File,
    set_: Set = None,
    out_: Annotated[Path | None, typer.Option("--out", help="The run directory; by default runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the directory.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Where clients run: inprocess, processes or flower.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Note where the time of each round goes.")] = False,
    superlink: Annotated[
        str | None,
        typer.Option("--superlink", metavar="DIR|NAME", help="Run on the fleet of this folder; see `anysize deploy`."),
    ] = None,
) -> None:
    """Run an experiment, write its directory and its report."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    changes = [*(set_ or []), *([] if engine is None else [f"engine.name={engine}"])]
    if superlink is not None:
        if out_ is not None or profile or engine not in (None, "flower"):
            raise UsageError("--superlink runs on a fleet, into its folder; leave out --out and --profile")
        _run_on_fleet(file, changes, superlink, resume, overwrite)
        return
    _run(file, changes, out_, resume, overwrite, profile)


app.add_typer(fleets.app)


app.command()(fleets.server)


app.command()(fleets.join)


@app.command()
def compare(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR...", help="An experiment file, or directories of finished runs.", show_default=False
        ),
    ],
    methods: Annotated[
        str, typer.Option("--methods", help="Names, separated by commas: flanc,heterofl; by default the file's.")
    ] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="0,1,2; by default the file's.")] = "",
    set_: Set = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="The folder of all runs; by default runs/<name>-compare.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Run everything again.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Processes that run cells; by default one per core.", show_default=False),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Run only the I-th of N parts.", show_default=False)
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Run only these cells, such as 'iid/*/seed-0'.", show_default=False
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="The label that differences are taken from.", show_default=False)
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Tell what it cost to reach this metric.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Also write table.tex, .csv, .json or .html.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods under equal conditions; finished runs are reused, stopped ones continue. DIR: its runs."""
    from anysize.cli.comparing import Request, compare_directories, compare_file

    request = Request(
        methods=items(methods),
        seeds=[whole_number("--seeds", text) for text in items(seeds)],
        changes=set_ or [],
        out=out_,
        overwrite=overwrite,
        jobs=jobs,
        shard=shard_of(shard),
        only=only,
        baseline=baseline,
        target=target,
    )
    made = compare_directories(sources, request) if sources[0].is_dir() else compare_file(sources, request, _pool)
    from anysize.cli.comparing import print_comparison
    from anysize.comparisons.files import write_to

    if to is not None:
        write_to(made, to)
    if as_json:
        print_json(made.to_json())
    else:
        print_comparison(made)
    if made.failures:
        raise typer.Exit(1)


@app.command()
def plan(file: File, set_: Set = None, as_json: AsJson = False) -> None:
    """Show what each device group would train, what it costs, and what leaves a device."""
    experiment = _experiment(file, set_ or [])
    from anysize.experiment.plan import plan as make_plan

    with experiment.blamed("planning"):
        made = make_plan(experiment)
    if as_json:
        print_json(made)
        return
    if made["table"] is not None:
        print_look_up(made["table"])
    rows = []
    for group in made["groups"]:
        cells = ["sits out"] if group["sits_out"] is not None else planned_cells(group["sizes"], group["same_as"])
        rows.append([group["name"], str(group["clients"] or "any"), *cells])
    numbers = ("parameters", "MACs", "training MACs", "activations", "bytes down", "bytes up", "shipped")
    print_table(["group", "clients", "size"], numbers, rows)
    for text in budget_lines(made["groups"]):
        say(text)
    say("\nMACs: one forward pass of a sample. Training MACs: a loss and its backward pass, per sample; if the method")
    say("draws a network for every batch, as fjord does, their mean over all that it can draw.")
    say("Activations: held by a training step. Bytes: per client and round. Shipped: inference_bytes of the result.")
    if any(group["same_as"] for group in made["groups"]):
        say("(as A): this group trains the same network as group A.")
    if made["domains"]:
        say(domains_line(made["domains"]))
    for text in ways_lines(made["groups"]):
        say(text)
    if any(len(group["sizes"]) > 1 for group in made["groups"]):
        say("A to B: the smallest and the largest size of a group whose budget changes from round to round.")
    if any(size["mask"] for group in made["groups"] for size in group["sizes"]):
        say("A mask saves bytes, not time: MACs count its zeros, since a dense multiplication computes them too.")
    say("\nLeaves a device: " + "; ".join(made["leaves_the_device"]) + ".")
    trust = (
        *aggregation_lines(made["aggregation"]),
        *secure_lines(made["secure"]),
        *privacy_lines(made["privacy"]),
    )
    for text in trust:
        say(text)
    for text in statistics_lines(made["statistics"]):
        say(text)
    print_notices(made["notices"])


@app.command()
def inspect(file: File, set_: Set = None, as_json: AsJson = False) -> None:
    """Show the model's width groups and removable blocks, and which methods can train it."""
    experiment = _experiment(file, set_ or [])
    from anysize.experiment.inspect import inspect as look

    with experiment.blamed("inspection"):
        found = look(experiment)
    if as_json:
        print_json(found)
        return
    say(found["text"])
    table = Table("method", "can train it", "", box=None, header_style="bold")
    for method in found["methods"]:
        table.add_row(escape(method["name"]), "[green]yes[/]" if method["can"] else "[red]no[/]", escape(method["why"]))
    out.print()
    out.print(table)


@app.command()
def customize(
    directory: Directory,
    to: Annotated[
        Path | None, typer.Option("--to", help="net.onnx, .pt2, .pte, .safetensors, or a folder/.", show_default=False)
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="A trained size's label, or any width.")] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", metavar="UNIT=AMOUNT", help="inference_bytes=4e6, macs=...")
    ] = None,
    robustness: Robustness = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="net.anysize: all sizes (or --size 0.1,0.5) in one file.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", help="What reads the bundle: torch or onnx (needs no PyTorch).")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Of the bundle's large weights: float32, float16 or int8.")
    ] = None,
    latency: Annotated[bool, typer.Option("--latency", help="State each size's latency on this machine.")] = False,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the bundle with this ed25519 key (PEM).")
    ] = None,
    best: Best = False,
) -> None:
    """Cut a run's model to a size and write it as a file, or write all sizes as one."""
    from anysize.exports.formats import check_path
    from anysize.exports.formats import export as write
    from anysize.exports.packing import PRECISIONS
    from anysize.runs.run import load

    if (to is None) == (bundle is None):
        raise UsageError("give either --to net.onnx (or another ending) or --bundle net.anysize")
    if bundle is not None:
        if budget or robustness is not None:
            raise UsageError("--bundle takes sizes by name, with every robustness; leave out --budget and --robustness")
        for option, value, allowed in (("runtime", runtime, ("torch", "onnx")), ("precision", precision, PRECISIONS)):
            if value not in (None, *allowed):
                raise UsageError(f"--{option} {value}: allowed: {', '.join(allowed)}")
        options: dict[str, Any] = {"latency": latency, "key": sign}
        options |= {name: value for name, value in (("runtime", runtime), ("precision", precision)) if value}
        made = load(directory, best=best)
        _say_best(made, best)
        _bundle(made, bundle, size.split(",") if size is not None else None, options)
        return
    assert to is not None
    if runtime or precision or latency or sign:
        raise UsageError("--runtime, --precision, --latency and --sign belong to --bundle")
    if (size is None) == (not budget):
        raise UsageError("--to takes one size: give either --size 0.5 or --budget inference_bytes=1e6")
    check_path(to)
    limit = budget_of(budget or []) if size is None else None
    made = load(directory, best=best)
    _say_best(made, best)
    chosen = made.fitting(limit) if limit is not None else made.size(size or "")
    if made.has_adapters and not to.suffix:
        done = made.adapter(to, chosen.label)
        say(f"{done.path}: size {chosen.label}, {bytes_text(done.size_bytes)}; peft.PeftModel.from_pretrained opens it")
        say(f"read back and compared with PyTorch: outputs differ by at most {done.difference:.2g}")
        return
    about = {"run": made.config.name, "size": chosen.label, "width": chosen.width, "round": made.round}
    about |= {} if robustness is None else {"robustness": robustness}
    with err.status(f"writing {escape(str(to))}"):
        network = made.customize(chosen.label, robustness=robustness)
        done = write(network, to, made.experiment.signature, about | {"data": made.experiment.signature.to_json()})
    parameters = sum(parameter.numel() for parameter in network.parameters())
    say(f"{done.path}: size {chosen.label}, {parameters:,} parameters, {bytes_text(done.size_bytes)}")
    say(f"read back and compared with PyTorch: outputs differ by at most {done.difference:.2g}")
    if done.length is not None:
        say(f"it takes texts of exactly {done.length} tokens: the network's code, or this format, fixes their number")
    if chosen.label not in {offered.label for offered in made.offered}:
        metric = made.experiment.task.metric
        say(f"width {chosen.width} was never trained; its {metric}: anysize evaluate {directory} --size {size}")


app.command("export", hidden=True)(customize)


def _say_best(made: Run, best: bool) -> None:
    if best:
        say(f"the best round on held-out data: {made.round}")


def _bundle(made: Run, path: Path, sizes: list[str] | None, options: dict[str, Any]) -> None:
    with err.status(f"writing {escape(str(path))}"):
        done = made.bundle(path, sizes, **options)
    labels = ", ".join(sizes or [offered.label for offered in made.offered])
    module = "onnx_runtime" if options.get("runtime") == "onnx" else "runtime"
    load = f"anysize.{module}.load('{path.name}')"
    say(f"{done.path}: sizes {labels}, {bytes_text(done.size_bytes)}; on a device: {load}")
    say(f"read back and compared with PyTorch: outputs differ by at most {done.difference:.2g}")
    if options.get("precision", "float32") != "float32":
        _say_loss(import_module(f"anysize.{module}").load(path).choices, made.experiment.task.metric)


def _say_loss(choices: Iterable[Choice], metric: str) -> None:
    """What fewer bits cost each size on the test set, if there was one."""
    for choice in choices:
        if metric in choice.metrics and metric in choice.float32:
            level = "" if choice.robustness is None else f", robustness {choice.robustness:g}"
            now, before = choice.metrics[metric], choice.float32[metric]
            say(f"  size {choice.size}{level}: {metric} {now:.4f}, in float32 {before:.4f}")


@app.command()
def evaluate(
    directory: Directory,
    size: Annotated[
        list[str] | None, typer.Option("--size", help="A label or a width; repeatable; by default all trained.")
    ] = None,
    robustness: Robustness = None,
    attack: Annotated[
        str | None, typer.Option("--attack", help="Also under attack: pgd or auto.", show_default=False)
    ] = None,
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Measure every size of a run, finished or not, on the test set, and under attack if asked."""
    from anysize.runs.run import load

    if attack not in (None, "pgd", "auto"):
        raise UsageError(f"--attack {attack}: allowed: pgd, auto")
    made = load(directory, best=best)
    metric = made.experiment.task.metric
    with err.status("evaluating"), made.experiment.blamed("evaluation"):
        metrics = made.evaluate(size or None, robustness)
        attacked = made.attack(size or None, robustness, "auto" if attack == "auto" else "pgd") if attack else {}
    if as_json:
        more = {"attack": attack, "robust": attacked} if attack else {}
        by_size = {label: m[metric] for label, m in metrics.items()}
        print_json({"metric": metric, metric: by_size, "metrics": metrics} | more)
        return
    _say_best(made, best)
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    table = Table("size", *names, box=None, header_style="bold")
    for label, values in metrics.items():
        table.add_row(escape(label), *(f"{values[name]:.4f}" for name in names))
    out.print(table)
    if attack:
        print_attacked(metric, attack, attacked)


@app.command()
def report(directory: Directory) -> None:
    """Write the run's report.html again."""
    from anysize.report import write

    say(str(write(directory)))


@app.command()
def status(directory: Directory, as_json: AsJson = False) -> None:
    """Show the progress of a run."""
    from anysize.records.events import status as look

    found = look(directory)
    if as_json:
        print_json(found)
        return
    say(f"{found['name']}: round {found['round']} of {found['rounds']}, {found['state']}")
    if found["stopped"]:
        say(f"stopped: {found['stopped']}")
    if found["best"] is not None:
        say(f"best round, which --best takes: {found['best']}")
    if found["latest"]:
        say(f"{found['metric']} at round {found['evaluated']}: {by_size(found['latest'])}")
    if found["clients_latest"]:
        means = by_size({group: values["mean"] for group, values in found["clients_latest"].items()})
        say(f"{found['metric']} on the clients' own data at round {found['clients_evaluated']}: {means}")
    if found["devices"]:
        listed = ", ".join(f"{about['name']} ({about['group']})" for about in found["devices"])
        say(f"{len(found['devices'])} devices: {listed}")
    if found["last_missing"]:
        print_missing(found)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods."""
    from anysize.methods import methods as known

    print_list(known(), as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models."""
    from anysize.models import models as known

    print_list(known(), as_json)


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """List the data sets that can be loaded here: bundled, found as files, or to be downloaded."""
    from anysize.data import datasets as known
    from anysize.data import without_files

    print_list(known(), as_json)
    if not as_json and (missing := without_files()):
        needed = "; ".join(f"{name} ({', '.join(files)})" for name, files in missing.items())
        print_notices([f"known, but without their files in {_data_folder()}: {needed}"])


@app.command()
def demo(
    out_: Annotated[Path, typer.Option("--out", help="The folder of its runs.")] = Path("runs/demo"),
) -> None:
    """Train one network across 20 devices of four sizes, and FedAvg beside it, and export two of the sizes."""
    file = Path(str(files("anysize") / "demo.toml"))
    out.print("20 devices of four sizes learn to read two-digit numbers together; nobody shares an image.\n")
    began = time.perf_counter()
    from anysize.cli.comparing import print_unfinished
    from anysize.cli.demo import first_run, print_rows, write_networks
    from anysize.comparisons.compare import compare as run_all

    made = run_all(file, out=out_, overwrite=True, progress=True)
    print_rows(made)
    if made.failures:
        print_unfinished(made)
        raise typer.Exit(1)
    seconds = time.perf_counter() - began
    say(f"\n{len(made.outcomes)} runs of {made.rounds} rounds in {seconds:.0f} s; they are in {out_}")
    say(f"the comparison: {out_ / 'compare.html'}")
    say(f"the first run's report: {first_run(made) / 'report.html'}\n")
    write_networks(made)


def main() -> None:
    """Run the command line; a user's mistake ends in one or two lines and exit code 2."""
    quick_start()
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(args=arguments, standalone_mode=False) or 0
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except _ParserError as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        saved = arguments[:1] in (["run"], ["compare"])
        again = "the same command" if arguments[:1] == ["compare"] else "--resume"
        err.print(f"stopped{f'; the checkpoint is complete, continue with {again}' if saved else ''}", style="yellow")
        code = interrupts.exit_code()
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _verdict(error)
        err.print(f"error: {message}", style="red", markup=False)
    gc.freeze()  # the process ends now, so the garbage collector need not search its objects
    sys.exit(code)


def _verdict(error: Exception) -> tuple[str, int]:
    """The text for an error, and the exit code: 2 if the user can solve it, 1 for a bug in anysize."""
    if isinstance(error, AnysizeError):
        return in_flags(str(error)), 2
    if isinstance(error, OSError):
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), 2
    if isinstance(error, MemoryError):
        return "out of memory; lower training.batch_size, evaluation.batch_size or the largest capacity", 2
    reason = str(error).split("\n", 1)[0]
    return f"{type(error).__name__}: {reason} (a bug in anysize; --debug shows where)", 1


def _experiment(file: Path, overrides: Sequence[str]) -> Experiment:
    """The experiment in a file; its mistakes show before PyTorch is loaded."""
    from anysize.config.files import load
    from anysize.config.names import check_names

    config = load(file, overrides)
    check_names(config)
    from anysize.experiment.experiment import Experiment

    return Experiment.from_config(config)


def _data_folder() -> str:
    """The first folder in which data files are looked for."""
    from anysize.data.files import search_folders

    return str(search_folders()[0])


def _pool(config: ExperimentConfig) -> AbstractContextManager[WorkerPool | None]:
    """The worker processes of an experiment that uses them; started now, they load PyTorch while this process does."""
    from anysize.engines.workers.pool import WorkerPool

    return WorkerPool(config.engine.workers) if config.engine.name == "processes" else nullcontext()


def _run(
    file: Path, overrides: Sequence[str], directory: Path | None, resume: bool, overwrite: bool, profile: bool = False
) -> Run:
    from anysize.config.files import load
    from anysize.config.names import check_names

    config = load(file, overrides)
    check_names(config)
    with _pool(config) as pool:
        from anysize.experiment.experiment import Experiment
        from anysize.report import write
        from anysize.report.tables import times
        from anysize.runs.runner import run as run_experiment

        experiment = Experiment.from_config(config)
        began = time.perf_counter()
        options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "profile": profile, "pool": pool}
        with bars() as progress:
            watch = Watch(progress, config.rounds)
            made = run_experiment(experiment, out=directory, on_event=watch, **options)
        seconds = time.perf_counter() - began
    print_summary(made)
    say(f"\n{times(made.round - watch.before, 'round')} in {seconds:.0f} s; the run is in {made.directory}")
    say(f"the report: {write(made.directory)}")
    return made


def _run_on_fleet(file: Path, overrides: Sequence[str], superlink: str, resume: bool, overwrite: bool) -> None:
    from anysize.config.files import load
    from anysize.deploy.submit import submit

    config = load(file, [*overrides, "engine.name=flower"])
    began = time.perf_counter()
    with bars() as progress:
        watch = Watch(progress, config.rounds)
        directory = submit(config, superlink, resume=resume, overwrite=overwrite, on_event=watch)
    seconds = time.perf_counter() - began
    from anysize.report.tables import times

    say(f"{times(config.rounds, 'round')}, this time in {seconds:.0f} s; on the server the run is in {directory}")
