"""What the command line prints, and where."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anysize.runs.progress import by_size

if TYPE_CHECKING:
    from anysize.runs.run import Run

_WIDTH = None if sys.stdout.isatty() else 140  # a file or a pipe has no width


_DOMAINS = 8  # data groups that are listed by name


out = Console(highlight=False, soft_wrap=True, width=_WIDTH)


def print_table(names: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]], again: int = 1) -> None:
    """Print a table; where it is wider than the terminal, its columns go into several, each no wider.

    Args:
        names: the first columns.
        numbers: the other columns; each is wholly in one of the tables.
        rows: the cells; one that ends early is filled with empty ones.
        again: how many of the first columns say what a row is; they begin every table.
    """
    heads = (*names, *numbers)
    filled = [[*row, *[""] * (len(heads) - len(row))] for row in rows]
    widths = [2 + max(cell_len(row[place]) for row in (heads, *filled)) for place in range(len(heads))]
    parts = [list(range(len(names)))]
    for place in range(len(names), len(heads)):
        if sum(widths[one] for one in (*parts[-1], place)) > out.width and place > len(names):
            parts.append(list(range(again)))
        parts[-1].append(place)
    for number, part in enumerate(parts):
        table = Table(box=None, header_style="bold")
        for place in part:
            table.add_column(escape(heads[place]), justify="left" if place < len(names) else "right")
        for row in filled:
            table.add_row(*(escape(row[place]) for place in part))
        out.print("\n" * bool(number), end="")
        out.print(table)


def print_missing(found: Mapping[str, Any]) -> None:
    """Print how often devices were missing, and which ones in the last such round."""
    last = found["last_missing"]
    names = {about["client"]: f"{about['name']}, " for about in found["devices"]}
    say(f"{found['missing']} answers missing so far; at round {last['round']}:")
    for entry in last["missing"]:
        say(f"  {names.get(entry['client'], '')}client {entry['client']} ({entry['task']}): {entry['why']}")
    if found["void"]:
        say(f"rounds that changed nothing, since too few answered: {', '.join(map(str, found['void']))}")


def ways_lines(groups: list[dict[str, Any]]) -> list[str]:
    """Which weights are products of a basis and coefficients, and how device groups compute with them.

    >>> ways_lines([{"name": name, "ways": {"conv2.weight": "compose"}} for name in ("0.5", "1.0")])[-1]
    '  0.5, 1.0: compose conv2.weight'
    """
    names: dict[str, list[str]] = {}  # of the groups, by what they do
    for group in groups:
        by_way: dict[str, list[str]] = {}
        for layer, way in group["ways"].items():
            by_way.setdefault(way, []).append(layer)
        if by_way:
            text = "; ".join(f"{way} {', '.join(layers)}" for way, layers in sorted(by_way.items()))
            names.setdefault(text, []).append(group["name"])
    head = "\nWeights from a basis and coefficients (compose: multiplied out first; mix: applied one after the other):"
    return [head, *(f"  {', '.join(own)}: {text}" for text, own in names.items())] if names else []


def statistics_lines(estimates: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the batch-norm statistics of each size are found, and what travels for them; nothing if none are needed."""
    words = {
        "clients": "estimated by clients that can run it",
        "pieces": "put together from {pieces} that clients can run; no client gets the whole",
        "server": "estimated by the server on its own samples, since no client can run it",
        "batch": "none: no client can run it, so it goes on normalising by its batch",
    }
    lines = []
    for own in estimates:
        number = own["pieces"]
        text = words[own["by"]].format(pieces="one part" if number == 1 else f"{number} parts")
        traffic = f"{bytes_text(own['bytes_down'])} down and {bytes_text(own['bytes_up'])} up"
        lines.append(f"  {own['size']}: {text}" + (f"; {traffic}" if own["bytes_down"] else ""))
    head = "\nBatch-norm statistics of finished networks (bytes: per client that is asked, at an evaluation):"
    return [head, *lines] if lines else []


def aggregation_lines(about: Mapping[str, Any] | None) -> list[str]:
    """How many attackers the rule of aggregation stands in each size, and what it holds; nothing for a plain mean.

    >>> size = {"size": "1.0", "holders": 5, "stands": 1}
    >>> aggregation_lines({"rule": "krum", "clients": 20, "held_bytes": 4000, "sizes": [size]})[1:]
    ['  1.0: its rarest entries have 5 holders, of which 1 may lie', '  The server holds 20 updates at once, 4.0 kB.']
    >>> aggregation_lines({"rule": "norm-filter", "clients": 20, "held_bytes": 0, "sizes": []})[1].partition("; ")[2]
    'updates of more than twice the bound are left out, if at most 10 clients lie'
    """
    if about is None:
        return []
    lines = [f"\nRule {about['rule']} in a round like the first, {about['clients']} clients:"]
    lines += [
        f"  {own['size']}: its rarest entries have {own['holders']} holders, of which {own['stands']} may lie"
        for own in about["sizes"]
    ]
    if not about["sizes"]:
        far = "none is left out"
        if about["rule"] == "norm-filter":
            far = f"updates of more than twice the bound are left out, if at most {about['clients'] // 2} clients lie"
        lines.append(f"  an attacker moves the mean by no more than its weight times the bound; {far}")
    held = f"The server holds {about['clients']} updates at once, {bytes_text(about['held_bytes'])}."
    return [*lines, f"  {held}" if about["held_bytes"] else "  Updates are folded in one by one."]


def secure_lines(about: Mapping[str, Any] | None) -> list[str]:
    """Which sizes have enough clients for secure sums; nothing without secure aggregation.

    >>> sizes = [{"size": "0.5", "clients": 8, "enough": True}, {"size": "1.0", "clients": 2, "enough": False}]
    >>> secure_lines({"threshold": 3, "sizes": sizes})[1:]
    ['  0.5: 8 clients', '  1.0: 2 clients, too few: what they learn is lost']
    """
    if about is None:
        return []
    head = f"\nThe server learns sums over at least {about['threshold']} clients of one size."
    if any(own["clients"] is None for own in about["sizes"]):
        return [f"{head} A size with fewer devices in a round, or that loses a third of them in it, learns nothing."]
    short = ", too few: what they learn is lost"
    lines = [f"  {own['size']}: {own['clients']} clients{'' if own['enough'] else short}" for own in about["sizes"]]
    return [f"{head} In a round like the first:", *lines]


def privacy_lines(about: Mapping[str, Any] | None) -> list[str]:
    """What a private run spends, and the noise of each size; nothing if it is not private."""
    if about is None:
        return []
    head = (
        f"\nDifferential privacy of every client: epsilon {about['epsilon']:.2f} at delta {about['delta']:g} after "
        f"{about['rounds']} rounds, in each of which a client takes part with probability {about['sampling']:.2g}."
    )
    return [head] + [
        f"  {own['size']}: noise of {own['deviation']:.2g} on its rarest entries, which {own['holders']:g} clients hold"
        for own in about["sizes"]
    ]


def print_look_up(entries: Sequence[Mapping[str, Any]]) -> None:
    """The look-up table, best first."""
    rows = []
    for entry in entries:
        cost = entry["cost"]
        cells = [f"{entry['accuracy']:.4f}", f"{cost['parameters']:,.0f}", count_text(cost["macs"])]
        cells += [count_text(cost["nonzero_macs"]), bytes_text(cost["activation_bytes"]), bytes_text(cost["bytes"])]
        rows.append([shape_text(entry), *cells, f"{cost['latency_ms']:.1f} ms" if "latency_ms" in cost else ""])
    numbers = ("proxy accuracy", "parameters", "MACs", "non-zero", "activations", "bytes", "step")
    print_table(["what could be trained"], numbers, rows)
    say("")


def planned_cells(sizes: Sequence[Mapping[str, Any]], same_as: str | None = None) -> list[str]:
    """What a device group trains, and what that costs: from its smallest size to its largest, if it has several."""
    ends = [_planned(sizes[0]), _planned(sizes[-1])]
    size, *costs = [first if first == last else f"{first} to {last}" for first, last in zip(*ends)]
    return [size if same_as is None else f"{size} (as {same_as})", *costs]


def budget_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each device group that has a budget.

    >>> budget_lines([{"name": "cam", "budget": {"macs": 2e6, "inference_bytes": 40000, "latency_ms": 5.0}}])
    ['', 'Budget, cam: macs 2.0 M, inference_bytes 40.0 kB, latency_ms 5.']
    """
    lines = []
    for group in groups:
        limits = (f"{unit} {_limit_text(unit, limit)}" for unit, limit in (group["budget"] or {}).items())
        lines += [f"Budget, {group['name']}: {', '.join(limits)}."] if group["budget"] else []
    return ["", *lines] if lines else []


def _limit_text(unit: str, limit: float) -> str:
    if unit == "latency_ms":
        return f"{limit:g}"
    return bytes_text(limit) if unit.endswith("bytes") else count_text(limit)


def domains_line(domains: Mapping[str, int]) -> str:
    """Which data groups there are, and how many clients have each; of many, the first."""
    first = list(domains.items())[:_DOMAINS]
    more = f" and {len(domains) - len(first)} more" if len(domains) > len(first) else ""
    return f"Clients by data group: {', '.join(f'{name} {clients}' for name, clients in first)}{more}."


def _planned(size: Mapping[str, Any]) -> list[str]:
    counts = [count_text(size[key]) for key in ("macs", "training_macs")]
    return [
        shape_text(size),
        f"{size['parameters']:,}",
        *counts,
        *(bytes_text(size[key]) for key in ("activation_bytes", "bytes_down", "bytes_up", "inference_bytes")),
    ]


def shape_text(size: Mapping[str, Any]) -> str:
    """A size in words: its width, and depth and mask where it has them."""
    parts = [repr(float(size["width"]))] if size["width"] != 1 or size["depth"] is None else []
    parts += [f"depth {size['depth']}"] if size["depth"] is not None else []
    return ", ".join([*parts, *([f"mask {size['mask']:g}"] if size["mask"] else [])])


def print_attacked(metric: str, attack: str, attacked: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The metric on clean and on attacked samples, a line for each size and level of robustness."""
    table = Table("size", "robustness", f"{metric}, clean", f"under {attack}", box=None, header_style="bold")
    for label, rows in attacked.items():
        for row in rows:
            level = "-" if row["robustness"] is None else f"{row['robustness']:g}"
            table.add_row(escape(label), level, f"{row['standard']:.4f}", f"{row['robust']:.4f}")
    out.print(table)


def print_summary(made: Run) -> None:
    history = made.history
    metric = made.experiment.task.metric
    final: Mapping[str, float] = next((event[metric] for event in reversed(history) if metric in event), {})
    table = Table("size", box=None, header_style="bold")
    for column in ("parameters", "MACs", "bytes per round", metric):
        table.add_column(column, justify="right")
    for size in made.sizes:
        cost = made.cost(size)
        value = f"{final[size.label]:.4f}" if size.label in final else "-"
        table.add_row(escape(size.label), f"{cost.parameters:,}", count_text(cost.macs), bytes_text(cost.bytes), value)
    out.print(table)
    judged: Mapping[str, Any] = next(
        (event["client_metrics"] for event in reversed(history) if "client_metrics" in event), {}
    )
    if judged:
        means = by_size({group: values["mean"] for group, values in judged.items()})
        out.print(f"\nmean {metric} of the clients on their own held-out shares: {escape(means)}")


def print_list(known: Sequence[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in known])
        return
    width = max(len(name) for name, _ in known)
    for name, summary in known:
        out.print(f"[bold]{escape(name.ljust(width))}[/]  {escape(summary)}")


def say(text: str) -> None:
    """Print text that may hold a user's names: nothing in it is read as markup."""
    out.print(text, markup=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def bytes_text(amount: float) -> str:
    return _scaled(amount, ("B", "kB", "MB", "GB", "TB"))


def count_text(amount: float) -> str:
    return _scaled(amount, ("", "K", "M", "G", "T"))


def _scaled(amount: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if amount < 1000:
            return f"{amount:.0f} {unit}".strip() if unit == units[0] else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} {units[-1]}"
