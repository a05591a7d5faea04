"""Prints docs/experiment-file.md from the code: every key of the experiment file, with type, default and meaning.

python docs/generate.py > docs/experiment-file.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import PlainValidator
from pydantic.fields import FieldInfo

from anysize.config.table import Table
from anysize.config.tables import ExperimentConfig
from anysize.config.values import range_words
from anysize.data import sources
from anysize.methods import make, methods
from anysize.methods.training import Tricks
from anysize.models import registry

INTRODUCTION = """\
# The experiment file

Every key of an experiment file, with its type, its default and what it means. This page is generated from the code.

An experiment is a TOML file with one table per subject. It must set `data.name`, `model.name`, `method.name`, and
`data.clients` unless the split is natural. `anysize run FILE --set key=value` changes a key for one run; a dot joins
table and key: `--set training.learning_rate=0.1`. anysize refuses an unknown key and names the closest one; it reports
all problems of a file together.

"absent" means that the file leaves the key out.

The complete file, every default written out, is `config.toml` in the run directory. It also holds the options of the
method, the model and the data set, and the tricks of the method's paper. So `anysize run config.toml` is the same
experiment, whatever the defaults of a later version are. A key that is absent even there is not set, or it is an option
of your own code whose default TOML cannot hold (None, an object). To try another method or model, start from your own
short file: the complete one would give it the tricks and options of the first.
"""

NOTES: Mapping[str, str] = {
    "data": 'With the name `"devices"` every device has its own data, and the experiment is for '
    "[fleets](deployment.md). "
    'In simulation a function `"module:function"` can give each device\'s share: [own data](own-data-and-model.md).',
    "method": "The method's own options are keys beside the name. They are listed [below](#options-of-the-methods).",
    "tricks": "Any method takes any trick. The defaults of each method are listed [below](#tricks-by-method).",
    "callbacks": "[Callbacks](callbacks.md) has examples, and what your own are given.",
    "track": "[Callbacks](callbacks.md#tensorboard-weights--biases-mlflow) lists the options of each.",
    "engine": "Clients run `inprocess`, in worker `processes`, or on the simulation of `flower`, with the same bits. "
    "Flower is an extra, `pip install '.[flower]'` in a checkout; it starts Ray here, or uses the cluster that "
    "`RAY_ADDRESS` names, and trains `workers` clients at a time. The environment variable `ANYSIZE_ENGINE` sets the "
    "engine for files that name none. A live network or task, or a method defined in the main script, runs in this "
    "process. anysize refuses an accelerator that PyTorch does not find. `round_timeout`, `min_clients` and "
    "`void_rounds` are for [fleets](deployment.md).",
}
"""What the fields do not say, by table."""


REPEATED = ("devices.groups", "devices.budgets", "compare.methods")
"""Tables of which a file may have several."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *map(section, tables(ExperimentConfig)), options_of_methods(), tricks_by_method()]
    parts += [options_of("models", "model.options", registry._MODELS, ("input_shape", "classes"))]
    parts += [options_of("data sets", "data.options", sources._SOURCES)]
    return "\n".join(parts)


def tables(table: type[Table]) -> Iterator[type[Table]]:
    """The table and all tables below it, in the order of the file."""
    yield table
    for field in table.model_fields.values():
        for below in tables_in(field.annotation):
            yield from tables(below)


def tables_in(annotation: Any) -> Iterator[type[Table]]:
    """The tables that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for argument in get_args(annotation):
        yield from tables_in(argument)


def section(table: type[Table]) -> str:
    """The heading, the note and the keys of one table."""
    title = f"[[{table.table}]]" if table.table in REPEATED else f"[{table.table}]"
    heading = f"## `{title}`" if table.table else "## The top level"
    summary = (inspect.getdoc(table) or "").split("\n>>>")[0].strip() if table.table else "Before any table."
    meanings = meanings_of(table)
    keys = [(name, field) for name, field in table.model_fields.items() if is_key(table, name, field)]
    rows = [row(name, field, meanings.get(name, "")) for name, field in keys]
    note = [NOTES[table.table], ""] if table.table in NOTES else []
    return "\n".join(
        [heading, "", summary, "", *note, "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def is_key(table: type[Table], name: str, field: FieldInfo) -> bool:
    """Whether a field is a key to write, not a table with a separate section or the method's flat options."""
    top_table = not table.table and any(True for _ in tables_in(field.annotation))
    return not top_table and (table.table, name) != ("method", "options")


def row(name: str, field: FieldInfo, meaning: str) -> str:
    """One line of a table of keys."""
    return cells(f"`{name}`", described(field.annotation, field.metadata), default_of(field), meaning)


def meanings_of(table: type[Table]) -> dict[str, str]:
    """The string below each field of a table, own or inherited, on one line.

    Pydantic can read them too, whenever the class is made: half of the time that an experiment file takes to load.
    """
    found: dict[str, str] = {}
    for kind in reversed(table.__mro__[: table.__mro__.index(Table) + 1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def cells(*texts: str) -> str:
    """A line of a markdown table."""
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def default_of(field: FieldInfo) -> str:
    """The default as TOML writes it."""
    if field.is_required():
        return "required"
    if field.default_factory not in (None, dict):
        return "by machine"  # this page must be the same on all of them
    value = field.get_default(call_default_factory=True)
    return "absent" if value is None else f"`{toml(value)}`"


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    return "{}" if isinstance(value, Mapping) else repr(value)


def described(annotation: Any, metadata: list[Any]) -> str:
    """A type in words, with what its validators demand."""
    for entry in metadata:
        if isinstance(entry, PlainValidator):  # it replaces the type: only it knows
            return asked(entry).removeprefix("a ")
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return described(inner, [*more, *metadata])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return " or ".join(described(kind, metadata) for kind in kinds)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{toml(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of: {described(get_args(annotation)[0], [])}"
    words = {int: "integer", float: "number", bool: "true or false", str: "string"}.get(annotation, "table")
    range_ = range_words(metadata)
    return f"{words}, {range_}" if range_ else words


def asked(validator: PlainValidator) -> str:
    """What the validator of a number says when it is given -1, which every range here refuses."""
    try:
        validator.func(-1)  # type: ignore[call-arg]
    except ValueError as error:
        return str(error).removeprefix("must be ")
    return ""


def options_of_methods() -> str:
    """The hyperparameters of every method."""
    lines = ["## Options of the methods", "", "These are keys of `[method]`, beside the name.", ""]
    lines += ["| method | key | default | meaning |", "| --- | --- | --- | --- |"]
    for name, _ in methods():
        kind: Any = type(make(name))
        meanings = attributes_of(kind)
        for field in dataclasses.fields(kind):
            lines.append(cells(f"`{name}`", f"`{field.name}`", f"`{toml(made(field))}`", meanings[field.name]))
    return "\n".join([*lines, ""])


def made(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def attributes_of(kind: type) -> dict[str, str]:
    """The entries of the "Attributes:" part of a class's docstring."""
    text = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def tricks_by_method() -> str:
    """What each method does where a trick is absent from the file."""
    names = [name for name, _ in methods()]
    lines = [
        "## Tricks by method",
        "",
        "If a key of `[tricks]` is absent, a method does what its paper or its authors' code does.",
        "",
    ]
    lines += [cells("key", *(f"`{name}`" for name in names)), cells(*["---"] * (len(names) + 1))]
    for field in dataclasses.fields(Tricks):
        lines.append(cells(f"`{field.name}`", *(f"`{toml(getattr(make(name).paper, field.name))}`" for name in names)))
    return "\n".join([*lines, ""])


def options_of(what: str, key: str, known: Mapping[str, Callable[..., Any]], given: tuple[str, ...] = ()) -> str:
    """The options of every model or data set, read from the functions that take them."""
    lines = [
        f"## Options of the {what}",
        "",
        f"These are keys of the table `{key}`.",
        "",
        "| name | options |",
        "| --- | --- |",
    ]
    for name, function in sorted(known.items()):
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
        options = [f"`{p.name} = {'absent' if p.default is None else toml(p.default)}`" for p in parameters]
        lines.append(cells(f"`{name}`", ", ".join(options) or "none"))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
