"""The colours of the pages, for light and for dark screens."""

from __future__ import annotations

LIGHT = {
    "page": "#f7f7f5",
    "surface": "#ffffff",
    "ink": "#1c1f23",
    "soft": "#5a616b",
    "line": "#d3d6da",
    "grid": "#ebecee",
    "accent": "#3b6ea5",
    "good": "#1e7a4c",
    "wait": "#8a5a00",
    "series-0": "#0072b2",
    "series-1": "#c65200",
    "series-2": "#00815e",
    "series-3": "#b0558a",
    "series-4": "#8a6d00",
    "series-5": "#2f7fb5",
    "series-6": "#6b4c9a",
    "series-7": "#5f6670",
}
DARK = {
    "page": "#111418",
    "surface": "#191d23",
    "ink": "#e6e8eb",
    "soft": "#a0a8b3",
    "line": "#3a414b",
    "grid": "#272d35",
    "accent": "#79a8dc",
    "good": "#5fce95",
    "wait": "#e0b050",
    "series-0": "#5fb0e8",
    "series-1": "#f08a4b",
    "series-2": "#3fcf9f",
    "series-3": "#e59cc6",
    "series-4": "#e3c04a",
    "series-5": "#8fd0f7",
    "series-6": "#b59ae0",
    "series-7": "#a0a8b3",
}
HEAT_LEVELS = 33
"""Colours of a heat map, from the smallest to the largest value."""
_HEAT_ON_LIGHT = ("#f1f2f4", "#2f9a94", "#3b0f53")
_HEAT_ON_DARK = ("#20262d", "#2a858c", "#fde725")
# Anchors of viridis, dark to light: even steps in lightness, and safe for colour-blind readers.
_VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
# The range of the scale with a contrast of at least 3 to 1 to the page; the largest size stands out most.
ON_LIGHT = (0.58, 0.0)
ON_DARK = (0.4, 1.0)


def variables(sizes: int) -> tuple[dict[str, str], dict[str, str]]:
    """All colours of a page by name, for light and for dark screens, with one for each of so many sizes."""
    light = LIGHT | _numbered("size", palette(sizes, ON_LIGHT)) | _numbered("heat", _heat(_HEAT_ON_LIGHT))
    dark = DARK | _numbered("size", palette(sizes, ON_DARK)) | _numbered("heat", _heat(_HEAT_ON_DARK))
    return light, dark


def palette(sizes: int, span: tuple[float, float]) -> list[str]:
    """One colour per size, smallest first, evenly spaced along a range of viridis.

    >>> palette(2, (0.0, 1.0))
    ['#440154', '#fde725']
    """
    first, last = span
    steps = max(sizes - 1, 1)
    # A single size takes the end that stands out most.
    positions = [last - (last - first) * (sizes - 1 - index) / steps for index in range(sizes)]
    return [_between(_VIRIDIS, position) for position in positions]


def _heat(anchors: tuple[str, ...]) -> list[str]:
    return [_between(anchors, level / (HEAT_LEVELS - 1)) for level in range(HEAT_LEVELS)]


def _numbered(name: str, colours: list[str]) -> dict[str, str]:
    return {f"{name}-{index}": colour for index, colour in enumerate(colours)}


def _between(anchors: tuple[str, ...], position: float) -> str:
    """The colour at a position from 0 (the first anchor) to 1 (the last), between the two nearest anchors."""
    place = position * (len(anchors) - 1)
    low = min(int(place), len(anchors) - 2)
    start, end = (bytes.fromhex(anchor[1:]) for anchor in anchors[low : low + 2])
    return "#" + bytes(round(a + (b - a) * (place - low)) for a, b in zip(start, end)).hex()
