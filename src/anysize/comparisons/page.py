"""One HTML page of a comparison."""

from __future__ import annotations

from anysize.comparisons.comparison import Comparison


def render(made: Comparison) -> str:
    """The whole page."""
    return "<!DOCTYPE html>\n"
