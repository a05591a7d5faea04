"""What the words say is so: code in the pages runs, commands, keys, files and numbers they name exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

import anysize as az
from anysize import config, methods
from anysize.cli import commands
from anysize.comparisons.cells import cells
from anysize.config.table import tables_in
from anysize.experiment.inspect import inspect
from anysize.experiment.plan import plan
from anysize.records.events import read_events, status
from anysize.runs.experiment import Experiment
from anysize.testing import LAWS
from small import fast_if

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src" / "anysize" / "demo.toml"
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
METHOD_OPTIONS = {field.name for name, _ in methods.methods() for field in fields(methods.make(name))}
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """Everything that a page shows as code: spans, and the lines of blocks."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`]+)`", rest), *(line for block in fenced for line in block.splitlines())]


def script(path: str) -> ModuleType:
    """A script of the project as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_block(text: str, name: str = "page") -> dict[str, Any]:
    """The names that a block defines; its classes must be importable, as dataclasses look their module up."""
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module.__dict__


# Code that runs


def test_readme_python_is_a_dozen_lines_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    assert len(block.strip().splitlines()) <= 13, "the first screen promises a dozen lines"
    assert block.count("rounds=20, evaluate_every=5") == 1
    monkeypatch.chdir(tmp_path)
    made = run_block(block.replace("rounds=20, evaluate_every=5", "rounds=1, evaluate_every=1"))
    assert set(final_accuracies(made["run"])) == {"0.25", "0.5", "0.75", "1.0"}
    assert (tmp_path / "small.onnx").stat().st_size > 0
    assert made["small"][0][0].out_channels == 8, "a quarter of 32 channels"


@pytest.mark.slow
def test_readme_python_runs_twice_shows_progress_and_learns_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "first.py").write_text(block)
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^round (\d+): accuracy 0.25: 0\.\d+", done.stderr, re.MULTILINE) == ["5", "10", "15", "20"]
    monkeypatch.chdir(tmp_path)
    made = run_block(block)
    for accuracies in (ast.literal_eval(done.stdout), final_accuracies(made["run"])):
        assert set(accuracies) == {"0.25", "0.5", "0.75", "1.0"}
        assert min(accuracies.values()) > 0.9, accuracies


def final_accuracies(run: az.Run) -> dict[str, float]:
    """What the run itself noted after its last round."""
    return {size: float(value) for size, value in run.history[-1]["accuracy"].items()}


EXAMPLES = {
    "train_any_module.py": (["--rounds", "1", "--out", "run"], "width 1.0: 28,474 parameters"),
    "custom_method.py": (["--rounds", "1", "--out", "run"], "keeps every law"),
    "deploy_sizes.py": (["--rounds", "1", "--to", "deployed"], "size 0.75 is the largest that fits"),
}


@pytest.mark.parametrize("name", fast_if("custom_method.py".__eq__, EXAMPLES))
def test_examples_run(name: str, tmp_path: Path) -> None:
    arguments, says = EXAMPLES[name]
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_every_example_is_run_by_a_test() -> None:
    assert set(EXAMPLES) == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_toy_method_of_the_page_breaks_the_one_law_that_the_page_names(capsys: pytest.CaptureFixture[str]) -> None:
    run_block("\n".join(blocks(ROOT / "docs" / "own-method.md", "python")))
    said = capsys.readouterr().out
    assert [name for name in LAWS if f"{name}:" in said] == ["order_of_clients"]


def test_listing_of_the_elastic_page_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "elastic.md"
    made = run_block(blocks(page, "python")[0])
    assert capsys.readouterr().out == blocks(page, "text")[0]
    assert made["small"].a.weight.shape == (6, 4, 3, 3)


def test_own_data_and_model_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "own-data-and-model.md"
    mine, live, task = blocks(page, "python")
    (tmp_path / "mine.py").write_text(mine + task)
    (tmp_path / "mine.toml").write_text(blocks(page, "toml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        whole = az.run("mine.toml", overrides=["rounds=1"])
        own = ["rounds=1", "data.name=mine:share", "data.options={}", 'evaluation.on=["clients"]']
        each = az.run("mine.toml", overrides=own, out=tmp_path / "each")
        huber = sys.modules["mine"].Huber()
    finally:
        sys.modules.pop("mine", None)
    assert whole.customize(1.0)[0].out_features == 64, "model.options"
    assert set(each.history[-1]["client_metrics"]) == {"0.25", "0.5", "0.75", "1.0"}
    assert huber.metrics(huber.sums(torch.tensor([1.0]), torch.tensor([3.0]))) == {"error": 2.0, "loss": 1.5}
    run_block(live)


@pytest.mark.slow
def test_hugging_face_page_trains_from_a_file_and_from_live_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("test_hugging_face")
    page = ROOT / "docs" / "hugging-face.md"
    (tmp_path / "reviews.toml").write_text(blocks(page, "toml")[0])
    monkeypatch.chdir(tmp_path)
    files, live, device = blocks(page, "python")
    run_block(files)
    run = az.run("reviews.toml", overrides=["rounds=1"], out=tmp_path / "file")
    assert run.customize(0.5).config.hidden_size == 16
    made = run_block(f"{live}\n{device}")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == "16"
    assert printed[-1] in ("['0']", "['1']")
    assert made["small"].num_parameters() < made["experiment"].model.network.num_parameters() / 2


def test_the_callback_of_the_page_stops_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(ROOT / "docs" / "callbacks.md", "python")
    run = run_block(block)["run"]
    assert run.round < 40
    assert f"round {run.round}: size 0.25 has accuracy 0." in capsys.readouterr().out
    assert "size 0.25 has reached 0.5" in (run.directory / "events.jsonl").read_text().splitlines()[-1]


def write_tutorial(folder: Path) -> list[str]:
    """Writes the files of the tutorial, and returns its other blocks of Python."""
    page = ROOT / "docs" / "tutorial.md"
    network, *others = blocks(page, "python")
    (folder / "digits.toml").write_text(blocks(page, "toml")[0])
    (folder / "mine.py").write_text(network)
    return others


def test_the_tutorial_plans_four_sizes_of_its_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tutorial(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        groups = plan(Experiment.from_config(config.load(tmp_path / "digits.toml")))["groups"]
    finally:
        sys.modules.pop("mine", None)
    assert [(group["name"], group["size"], group["clients"]) for group in groups] == [
        ("camera", "0.25", 3),
        ("phone", "0.5", 3),
        ("tablet", "0.75", 3),
        ("workstation", "1.0", 3),
    ]


@pytest.mark.slow
def test_every_block_of_the_tutorial_runs_and_every_size_learns(tmp_path: Path) -> None:
    python, onnx, runtime = write_tutorial(tmp_path)
    install, *commands_ = [line for block in blocks(ROOT / "docs" / "tutorial.md", "sh") for line in block.splitlines()]
    assert install.startswith("pip install")

    def said(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for line in commands_:
        assert line.startswith("anysize "), line
        said("-m", "anysize", *line.split()[1:])
    assert (tmp_path / "runs" / "digits" / "report.html").is_file()
    accuracy = ast.literal_eval(said("-c", python))
    assert list(accuracy) == ["0.25", "0.5", "0.75", "1.0"]
    assert min(accuracy.values()) > 0.9, accuracy
    assert re.match(r"the camera says \d\n", said("-c", onnx))
    assert re.match(r"at full size \['\d'\]\nat a quarter \['\d'\]\n", said("-c", runtime))


def test_the_engine_of_the_page_runs_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(ROOT / "docs" / "own-engine.md", "python")
    made = run_block(block)
    reference = made["experiment"].run(out="reference")
    states = [(folder / "state.safetensors").read_bytes() for folder in (made["run"].directory, reference.directory)]
    assert states[0] == states[1], "every engine gives the same bits"
    engines: list[Any] = []

    def counting(*given: Any) -> Any:
        engines.append(made["Counting"](*given))
        return engines[-1]

    made["experiment"].run(out="again", engine=counting)
    assert engines[0].answers == 4


def test_networks_are_exported_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    az.Experiment(data="digits", clients=4, model="mlp", method="heterofl", rounds=1).run(out="runs/first")
    (block,) = blocks(ROOT / "docs" / "export.md", "python")
    made = run_block(block)
    assert made["done"].path.stat().st_size == made["done"].size_bytes
    assert (tmp_path / "net.anysize").is_file()


def test_the_page_of_formats_names_every_key_that_a_run_writes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")

    def documented(heading: str) -> set[str]:
        section = re.split(r"^#{2,3} ", page.partition(f"{heading}\n\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        return set(re.findall(r"`\"?(\w+)\"?`", section))

    evaluation = {"on": ["test", "clients"]}
    made = az.Experiment(
        data="digits",
        clients=4,
        model="mlp",
        method="heterofl",
        rounds=1,
        partition={"validation": 0.2},
        evaluation=evaluation,
        engine="inprocess",
    ).run(out=tmp_path / "run", profile=True)
    events = {event["event"]: event for event in read_events(tmp_path / "run" / "events.jsonl")}
    assert set(events["start"]) <= documented("### start")
    assert set(events["round"]) | set(events["round"]["clients"][0]) <= documented("### round")
    assert set(events["start"]["groups"][0]) <= documented("### start") | documented("## Cost")
    assert set(status(tmp_path / "run")) <= documented("### anysize status")
    shown = plan(made.experiment)
    assert set(shown) | set(shown["groups"][0]) <= documented("### anysize plan") | documented("## Cost")
    assert set(inspect(made.experiment)) <= documented("### anysize inspect")


# Words that name things


def test_experiment_page_is_what_the_generator_prints() -> None:
    page = (ROOT / "docs" / "experiment-file.md").read_text(encoding="utf-8")
    assert page == script("docs/generate.py").page(), "run: .venv/bin/python docs/generate.py > docs/experiment-file.md"


def test_every_method_has_a_section_of_fidelity_that_says_how_it_departs() -> None:
    sections = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8").split("\n## ")[1:]
    own = ("fedhm", "prism", "origdrop")  # one paper
    for name, _ in methods.methods():
        found = [section for section in sections if f"`src/anysize/methods/{name}.py`" in section]
        found = found or [section for section in sections if name in own and f"`{name}.py`" in section]
        assert len(found) == 1, name
        assert "Departures" in found[0] or found[0].startswith("Ladder"), name


@pytest.mark.parametrize("name", fast_if("fedavg".__eq__, [name for name, _ in methods.methods()]))
def test_pages_of_methods_are_what_their_generator_prints(name: str) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert page == script("docs/method_pages.py").page(name), "run: .venv/bin/python docs/method_pages.py"


def test_every_method_has_a_page() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == {name for name, _ in methods.methods()}


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in az.__all__ if f":: anysize.{name}\n" not in pages and f"`az.{name}`" not in pages] == []


def test_errors_of_the_page_are_errors_of_the_code() -> None:
    code_ = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = re.sub(r'"\s*f?"', "", code_)
    rows = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Results")[0]
    texts = [
        text for row in re.findall(r"^\| (`[^|]*) \|", rows, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)
    ]
    assert len(texts) > 20
    assert [text for text in texts if text not in said] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_their_options_exist(page: Path) -> None:
    known: Any = typer.main.get_command(commands.app)
    for text in code(page):
        for name, rest in re.findall(r"(?<!import )\banysize ([a-z]+)\b([^`]*)", text):
            assert name in known.commands, f"anysize {name} in: {text}"
            allowed = {option for parameter in parameters(known.commands[name]) for option in parameter.opts}
            strange = set(re.findall(r"(--[a-z][a-z-]*)", rest)) - allowed
            assert not strange, f"{strange} in: {text}"


def parameters(command: Any) -> list[Any]:
    """The parameters of a command, and of those below it."""
    below = getattr(command, "commands", {}).values()
    return [*command.params, *(parameter for other in below for parameter in parameters(other))]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for text in code(page) for name in re.findall(r"\bmake ([a-z-]+)", text)}
    assert named <= targets


def test_every_command_is_in_the_readme() -> None:
    known: Any = typer.main.get_command(commands.app)
    shown = {name for name, command in known.commands.items() if not command.hidden}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in shown if f"anysize {name}" in text} == shown


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_keys_of_the_experiment_file_exist(page: Path) -> None:
    tables = {
        name: next(tables_in(field.annotation), None) for name, field in config.ExperimentConfig.model_fields.items()
    }
    tables = {name: table for name, table in tables.items() if table is not None}
    named = rf"(?<![\w./])({'|'.join(tables)})\.([a-z_]+)(?![\w(/])"
    for text in code(page):
        found = re.findall(named, text) + re.findall(rf"\[({'|'.join(tables)})\] ([a-z_]+)", text)
        for table, key in found:
            known = tables[table]
            assert known is not None
            options = METHOD_OPTIONS if table == "method" else set()
            assert key in {*known.model_fields, *options, "toml", "py", "html", "csv", "json"}, (
                f"{table}.{key} in: {text}"
            )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_toml_of_the_pages_is_a_valid_experiment(page: Path, tmp_path: Path) -> None:
    """Files of budgets are the pages' own; a file of latencies is made."""
    for content in re.findall(r"^```\n(round,.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        (tmp_path / "budgets.csv").write_text(content)
    (tmp_path / "devices" / "cam").mkdir(parents=True)
    measured = "width,depth,latency_ms,method,network,batch_size\n0.5,,4.5,flanc,5f3a,32\n"
    (tmp_path / "devices" / "cam" / "latency.csv").write_text(measured)
    missing = {"data": {"name": "digits", "clients": 40}, "model": {"name": "mlp"}, "method": {"name": "flanc"}}
    for block in blocks(page, "toml"):
        config.from_dict(missing | tomllib.loads(block), folder=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} in {page.name}"
        assert not anchor or anchor in anchors(file), f"{target} in {page.name}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page: Path) -> None:
    for text in code(page):
        for path in re.findall(r"(?<![\w/.])(?:src|tests|examples|docs)/[\w/.-]*\w", text):
            assert (ROOT / path).exists(), f"{path} in {page.name}"


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text] == []


# Facts


def test_the_demo_table_is_made_from_the_measured_results() -> None:
    made, text = script("experiments/demo/table.py"), (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == made.shown(text, made.table()), "run: .venv/bin/python experiments/demo/table.py"
    page = (ROOT / "experiments" / "demo" / "README.md").read_text(encoding="utf-8")
    assert page == made.shown(page, made.choice()), "run: .venv/bin/python experiments/demo/table.py"


def test_costs_of_the_measured_results_are_those_of_the_demo() -> None:
    keys = ("parameters", "macs", "bytes_down", "bytes_up")
    counted = {
        (cell.label, group["size"]): [group[key] for key in keys]
        for cell in cells(config.load(DEMO))
        for group in plan(Experiment.from_config(cell.config))["groups"]
    }
    for row in script("experiments/demo/table.py").rows():
        assert [int(row[key]) for key in keys] == counted[row["method"], row["size"]]
    assert len(config.load(DEMO).compare.methods) == 3  # type: ignore[union-attr]


def test_the_speed_table_is_made_from_the_measured_results() -> None:
    made, text = script("benchmarks/table.py"), (ROOT / "README.md").read_text(encoding="utf-8")
    results = json.loads(made.RESULTS.read_text())
    assert text == made.shown(text, results), "run: .venv/bin/python benchmarks/table.py"
    assert set(results["dates"]) == set(results) - {"dates", "machine"}


def test_tables_of_the_scaling_page_are_made_from_the_measured_results() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for name in ("fleet", "scaling", "device_memory"):
        made = script(f"benchmarks/{name}.py")
        shown = re.findall(rf"<!-- {name} table -->\n(.*?)\n<!-- end of {name} table -->", text, re.DOTALL)
        assert shown == [made.table(json.loads(made.OUT.read_text()))], f"run: python benchmarks/{name}.py --table"


def test_the_way_of_one_board_runs_from_its_file_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment lays out a fleet; a narrower network, trained in this process, gives the bundle that is fitted."""
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    text = page.split("## One board, from measure to fit")[1]
    file = tmp_path / "boards.toml"
    file.write_text(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)[0])
    command = "deploy init fleet boards.toml --port 8462 --device board=1.0 --device van=1.0"
    assert command in text
    monkeypatch.chdir(tmp_path)
    subprocess.run(
        [sys.executable, "-m", "anysize", *command.split(), "--data", "anysize.deploy.example:digits"], check=True
    )
    given = config.load(tmp_path / "fleet" / "experiment.toml")
    run = az.Experiment(
        data="digits",
        clients=3,
        model={"name": given.model.name, "options": {"channels": [8, 16, 32]}},
        method=given.method.name,
        devices={"capacities": list(given.devices.capacities or ())},
        training={"local_steps": 1},
        rounds=1,
        engine={"name": "inprocess"},
    ).run(tmp_path / "run")
    run.bundle(tmp_path / "net.anysize")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    made = run_block(textwrap.dedent(block))
    assert set(made["times"]) == {"0.25", "0.5", "1.0"}
    assert made["small"] == "1.0"


def test_the_table_of_onnx_bundles_is_made_from_the_measured_results() -> None:
    made = script("benchmarks/onnx_bundles.py")
    assert made.table(json.loads(made.OUT.read_text())) in (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")


def test_tables_of_the_speed_page_are_made_from_the_measured_results() -> None:
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for name in ("steps", "schedule", "precision", "large_states", "peers", "starts"):
        made = script(f"benchmarks/{name}.py")
        shown = re.findall(rf"<!-- {name} table -->\n(.*?)\n<!-- end of {name} table -->", text, re.DOTALL)
        assert shown == [made.table(json.loads(made.OUT.read_text()))], f"run: python benchmarks/{name}.py --table"


def test_privacy_page_lists_what_the_plan_of_the_demo_lists() -> None:
    leaves = plan(Experiment.from_config(config.load(DEMO)))["leaves_the_device"]
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert f"Leaves a device: {'; '.join(leaves)}." in page


def test_laws_of_the_page_are_the_laws() -> None:
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## The laws")[2], re.MULTILINE)
    assert rows == list(LAWS), "the table of laws in docs/own-method.md names other laws than anysize.testing"


def test_resume_page_names_what_a_resumed_run_may_change() -> None:
    from anysize.runs.resuming import MAY_CHANGE

    page = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    sentence = re.search(r"A resumed run may change (.*?), and nothing else", page, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`\[?(\w+)\]?`", sentence[1])) == set(MAY_CHANGE)


def test_the_architecture_page_lists_the_rooms_in_the_order_of_the_layers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^  (\w+)/", page.partition("```")[2].partition("```")[0], re.MULTILINE)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    layers = [name.removeprefix("anysize.") for line in contract["layers"] for name in line.split(" | ")]
    assert rooms == [name for name in layers if (ROOT / "src" / "anysize" / name).is_dir()]
