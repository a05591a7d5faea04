"""The speed table of the README, made from results.json: `python benchmarks/table.py` writes it between its marks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
START, END = "<!-- speed table -->\n", "<!-- end of speed table -->"


def table(results: Mapping[str, Any]) -> str:
    """The table in Markdown: what was measured, how much, and what is asked for."""
    lines = ["| what | measured | aim |", "| --- | ---: | ---: |"]
    lines += [f"| {what} | {measured} | {asked} |" for what, measured, asked in rows(results)]
    about = results["machine"]
    where = f"{about['processor']}, {about['cores']} cores, PyTorch {about['torch']}"
    when = " and ".join(sorted(set(results["dates"].values())))
    return "\n".join([*lines, "", f"Measured on {when} by `make bench`: {where}.", ""])


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(what, measured, asked) of every figure that the results hold."""
    for name, found in results.get("against_plain_torch", {}).items():
        yield f"standard job, {name}: faster than a plain PyTorch loop", _times(found["times_faster"]), "1.8 x"
    for name, found in results.get("against_flower", {}).items():
        if name == "missing":
            continue
        yield f"standard job, {name}: faster than Flower's simulation", _times(found["times_faster"]), "2 x"
        yield "the same, start-up included", _times(found["times_faster_with_start"]), "3 x"
    if idle := results.get("overhead_100_idle_clients"):
        yield "round of 100 idle clients, 1 MB each way: in process", _ms(idle["in_process_seconds"]), "at most 20 ms"
        yield "the same with two workers", _ms(idle["two_workers_seconds"]), "at most 60 ms"
    if memory := results.get("memory"):
        rounds = [memory[f"round_of_{count}_mb"] for count in (10, 100, 1000)]
        apart = max(rounds) / min(rounds) - 1
        yield "server memory with 10, 100 and 1,000 clients in a round: apart by", f"{apart:.1%}", "at most 10 %"
        million = memory["million_clients"]
        above = max(0.0, million["start_seconds"])  # the clock's noise may leave less than nothing
        yield "start with 1,000,000 registered clients, above an empty run", f"{above:.1f} s", "2 s"
        yield "the same: memory", f"{million['above_empty_mb']:.0f} MB", "200 MB"
    for name, by_width in results.get("step_ms_by_width", {}).items():
        measured = " / ".join(f"{value:.1f}" for value in by_width.values())
        yield f"a client's step, {name}, at width {' / '.join(by_width)}", f"{measured} ms", "falls with width"
    for name, found in results.get("evaluation", {}).items():
        yield f"evaluation of all widths, part of a run, {name}", f"{found['share_of_run']:.1%}", "under 10 %"
    for name, found in results.get("stacking", {}).items():
        yield f"ten small clients stacked, {name}: faster than one by one", _times(found["times_faster"]), ""


def shown(page: str, results: Mapping[str, Any]) -> str:
    """The page with the table of the results between its marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START.strip()} ... {END}")
    return before + start + table(results) + end + after


def write(page: Path = ROOT / "README.md") -> None:
    """Puts the table of results.json into the page."""
    text = shown(page.read_text(encoding="utf-8"), json.loads(RESULTS.read_text()))
    page.write_text(text, encoding="utf-8")


def _times(ratio: float) -> str:
    return f"{ratio:.1f} x"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    write()
