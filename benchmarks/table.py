"""The speed table of the README, made from results.json: `python benchmarks/table.py` writes it between its marks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PEERS = ROOT / "benchmarks" / "peers.json"
START, END = "<!-- speed table -->\n", "<!-- end of speed table -->"


def table(results: Mapping[str, Any]) -> str:
    """The table in Markdown, and where and when it was measured."""
    lines = ["| what | measured |", "| --- | ---: |"]
    lines += [f"| {what} | {measured} |" for what, measured in rows(results)]
    about = results["machine"]
    where = f"{about['processor']}, {about['cores']} cores, PyTorch {about['torch']}"
    when = " and ".join(sorted(set(results["dates"].values())))
    beside = json.loads(PEERS.read_text())["environment"]["started"][:10]
    when = f"{when} by `make bench`, and beside other simulators on {beside} by `benchmarks/peers.py`"
    more = "All figures: [bench](benchmarks/results.json), [peers](benchmarks/peers.json)."
    return "\n".join([*lines, "", f"Measured on {when}: {where}. {more}", ""])


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, measured): the figures that tell most, as far as the results hold them."""
    for part, rival in (("against_plain_torch", "a plain PyTorch loop"), ("against_flower", "Flower's simulation")):
        found = {name: own for name, own in results.get(part, {}).items() if name != "missing"}
        if found:
            faster = [f"{own['times_faster']:.1f} x" for own in found.values()]
            yield f"standard job, {' / '.join(found)}: faster than {rival}", " / ".join(faster)
    rivals = {
        "flower": "Flower's simulation with two workers",
        "pfl": "pfl-research in one process",
        "plain": "a plain PyTorch loop in one process",
    }
    found = json.loads(PEERS.read_text())
    for name, rival in rivals.items():
        if name not in found:
            continue
        ours, own = found["anysize"], found[name]
        faster = f"{own['round_seconds'] / ours['round_seconds']:.1f} x"
        start = f"{ours['rest_seconds']:.0f} / {own['rest_seconds']:.0f} s"
        memory = f"{ours['memory_mb']:.0f} / {own['memory_mb']:.0f} MB"
        what = f"FedAvg, two workers, beside {rival}: faster a round; start and end; memory"
        yield what, f"{faster}; {start}; {memory}"
    if steps := results.get("step_ms_by_width"):
        by_width = steps["heterofl"]
        milliseconds = " / ".join(f"{value:.1f}" for value in by_width.values())
        yield f"a client's step, heterofl, at width {' / '.join(by_width)}", f"{milliseconds} ms"
    if idle := results.get("overhead_100_idle_clients"):
        seconds = [idle["in_process_seconds"], idle["two_workers_seconds"]]
        both = " / ".join(f"{1000 * value:.0f}" for value in seconds)
        yield "round of 100 idle clients, 1 MB each way: in process / with two workers", f"{both} ms"
    if memory := results.get("memory"):
        rounds = [memory[f"round_of_{count}_mb"] for count in (10, 100, 1000)]
        yield (
            "server memory with 10 / 100 / 1,000 clients in a round",
            f"{' / '.join(f'{amount:.0f}' for amount in rounds)} MB",
        )


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


if __name__ == "__main__":
    write()
