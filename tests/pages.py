"""The report of a run as a reader sees it: its text, its tables and its figures."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from anysize import report
from anysize.report.record import read

VOID = {"meta", "br", "link", "img", "hr", "input"}


def rows(directory: Path, name: str) -> list[dict[str, str]]:
    with (directory / "report" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """Checks that tags nest, and keeps what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[tuple[str, str | None]]] = []
        self.words: list[str] = []
        self.told: dict[str, Any] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append(("", dict(attrs).get("title")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script" and self.tags[-1][1].get("type") == "application/json":
            self.told[str(self.tags[-1][1]["id"]).removeprefix("told-")] = json.loads(data)
        if inside in ("script", "style"):
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            shown, title = self.cells[-1][-1]
            self.cells[-1][-1] = (shown + data, title)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def row(self, first: str) -> list[tuple[str, str | None]]:
        """The cells of the first row that begins so."""
        return next(cells for cells in self.cells if cells[0][0] == first)


def charts(directory: Path) -> dict[str, Any]:
    """What each figure of a run's report draws."""
    return {figure.name: figure.chart for figure in report.figures_of(read(directory))}


def page_of(directory: Path) -> Page:
    return Page(report.write(directory).read_text(encoding="utf-8"))
