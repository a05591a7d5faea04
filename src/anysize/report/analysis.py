"""Figures of a method's state: the arrays of `Method.describe` after each evaluated round.

An array is called "kind/item". Some kinds have a special figure here; any other is drawn by its shape: single numbers
as curves over rounds, rows of numbers as lines, matrices as heat maps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from anysize.report.charts import Axis, Figure, Lines, capital, finite, heat_map, line, looks, round_axis
from anysize.report.record import Record

Array = NDArray[np.float64]
ByRound = Mapping[int, Array]  # an item's arrays after each evaluated round, in order
Drawer = Callable[[Record, str, Mapping[str, ByRound]], list[Figure]]

_LARGEST_GRAM = 64  # vectors; of a larger Gram matrix only the entries' distribution is drawn, as in FLANC's Fig. 6
_BINS = 40
_LARGEST_MAP = 128  # rows and columns; of a larger matrix the first ones are drawn, and the CSV has all


def build(record: Record) -> list[Figure]:
    """One or more figures for every kind of array that the method described."""
    return [
        figure
        for kind, items in by_kind(record.analysis).items()
        for figure in DRAWN.get(kind, by_shape)(record, kind, items)
    ]


def by_kind(analysis: Mapping[int, Mapping[str, Array]]) -> dict[str, dict[str, dict[int, Array]]]:
    """Arrays by kind, item and round.

    >>> by_kind({2: {"gram/conv": np.eye(1)}})
    {'gram': {'conv': {2: array([[1.]])}}}
    """
    kinds: dict[str, dict[str, dict[int, Array]]] = {}
    for round_, arrays in analysis.items():
        for name, array in arrays.items():
            kind, _, item = name.partition("/")
            kinds.setdefault(kind, {}).setdefault(item or kind, {})[round_] = array
    return kinds


def by_shape(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """Curves over rounds for single numbers, lines for rows of numbers, a heat map for every matrix."""
    latest = {item: rounds[max(rounds)] for item, rounds in items.items()}
    dimensions = {array.ndim for array in latest.values()}
    figures = []
    if 0 in dimensions:
        figures.append(over_rounds(record, kind, {i: items[i] for i in items if latest[i].ndim == 0}))
    if 1 in dimensions:
        figures.append(profiles(record, kind, {i: array for i, array in latest.items() if array.ndim == 1}))
    return figures + [
        matrix(kind, item, array.reshape(len(array), -1)) for item, array in latest.items() if array.ndim >= 2
    ]


def over_rounds(record: Record, kind: str, items: Mapping[str, ByRound], caption: str = "") -> Figure:
    """One curve per item over the evaluated rounds."""
    curves = tuple(
        line(item, list(rounds), [float(a) for a in rounds.values()], look)
        for (item, rounds), look in zip(items.items(), looks(record, list(items)))
    )
    rows = tuple((r, item, finite(float(a))) for item, rounds in items.items() for r, a in rounds.items())
    return Figure(
        name=f"analysis-{kind}-over-rounds",
        section="analysis",
        title=f"{capital(kind)} over rounds",
        caption=caption,
        keys=("round", "item", kind),
        rows=rows,
        chart=Lines(curves, round_axis(), Axis(kind), legend=""),
        height=340,
        wide=True,
    )


def profiles(record: Record, kind: str, items: Mapping[str, Array]) -> Figure:
    """One line per item through its numbers, after the last evaluated round."""
    lines = tuple(
        line(item, list(range(len(array))), array.tolist(), look)
        for (item, array), look in zip(items.items(), looks(record, list(items)))
    )
    rows = tuple((item, i, finite(float(value))) for item, array in items.items() for i, value in enumerate(array))
    return Figure(
        name=f"analysis-{kind}",
        section="analysis",
        title=capital(kind),
        caption="",
        keys=("item", "index", kind),
        rows=rows,
        chart=Lines(lines, Axis("index", whole=True), Axis(kind), legend=""),
        height=340,
        wide=True,
    )


def matrix(kind: str, item: str, array: Array, caption: str = "") -> Figure:
    """A matrix as a heat map; the CSV has every entry."""
    shown = array[:_LARGEST_MAP, :_LARGEST_MAP]
    if shown.shape != array.shape:
        caption = f"{caption} The first {shown.shape[0]} x {shown.shape[1]} of {array.shape[0]} x {array.shape[1]}."
    rows = tuple((i, j, finite(float(value))) for (i, j), value in np.ndenumerate(array))
    return Figure(
        name=f"analysis-{kind}-{item}".replace("/", "-"),
        section="analysis",
        title=f"{capital(kind)}, {item}",
        caption=caption.strip(),
        keys=("row", "column", kind),
        rows=rows,
        chart=heat_map(shown.tolist(), Axis("column", whole=True), Axis("row", whole=True)),
        height=340,
    )


def gram(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """How far each basis is from an orthonormal one: over rounds, entry by entry, and as heat maps if small."""
    distances = {
        item: {r: np.sqrt(np.mean((array - np.eye(len(array))) ** 2)) for r, array in rounds.items()}
        for item, rounds in items.items()
    }
    latest = {item: rounds[max(rounds)] for item, rounds in items.items()}
    entries = {item: array[~np.eye(len(array), dtype=bool)] for item, array in latest.items() if len(array) > 1}
    drift = over_rounds(
        record, "distance", distances, "Root mean square of the Gram matrix minus the identity; 0 is orthonormal."
    )
    figures = [replace(drift, name=f"analysis-{kind}-over-rounds", title="Distance of the basis from orthonormal")]
    if entries:
        words = "inner product of two basis vectors"
        title, caption = "Inner products of different basis vectors", "All at 0 in an orthogonal basis."
        figures.append(histograms(record, f"{kind}-entries", title, words, entries, caption))
    small = {item: array for item, array in latest.items() if len(array) <= _LARGEST_GRAM}
    return figures + [matrix(kind, item, array) for item, array in small.items()]


def coefficients(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """The mean absolute coefficient of every composed fragment, by width, a figure per layer."""
    layers: dict[str, dict[str, Array]] = {}
    for item, rounds in items.items():
        width, _, layer = item.partition("/")
        layers.setdefault(layer or item, {})[width] = rounds[max(rounds)]
    layers = {layer: {width: own[width] for width in record.by_size(own)} for layer, own in layers.items()}
    words = "mean absolute coefficient"
    caption = "One per fragment of every output. At 0 a fragment would be pruned; away from 0 the basis is shared."
    return [
        histograms(record, f"{kind}-{layer}", f"Coefficients, {layer}", words, arrays, caption, legend="size")
        for layer, arrays in layers.items()
    ]


def histograms(
    record: Record,
    name: str,
    title: str,
    words: str,
    items: Mapping[str, Array],
    caption: str = "",
    legend: str = "",
) -> Figure:
    """The distribution of each item's numbers over common bins, as the fraction that falls into each bin."""
    values = np.concatenate([array.ravel() for array in items.values()])
    values = values[np.isfinite(values)]
    edges = np.histogram_bin_edges(values if len(values) else np.zeros(1), bins=_BINS)
    middles = (edges[1:] + edges[:-1]) / 2
    parts = {item: np.histogram(array, edges)[0] / max(array.size, 1) for item, array in items.items()}
    lines = tuple(
        replace(line(item, middles.tolist(), part.tolist(), look), marked=False)
        for (item, part), look in zip(parts.items(), looks(record, list(parts)))
    )
    rows = tuple(
        (item, float(low), float(high), float(share))
        for item, part in parts.items()
        for low, high, share in zip(edges, edges[1:], part)
    )
    share = Axis("share of all", exact=lambda value: f"{value:.3f}", from_zero=True)
    return Figure(
        name=f"analysis-{name}".replace("/", "-"),
        section="analysis",
        title=title,
        caption=caption,
        keys=("item", "from", "to", "part"),
        rows=rows,
        chart=Lines(lines, Axis(words), share, legend=legend),
        height=320,
        wide=not legend,
    )


def needed_kernels(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """How many of its principal kernels each layer needs, over rounds; each array is (needed, total)."""
    needed = {
        f"{_layer(item)}, {int(rounds[max(rounds)][1])} kernels": {r: np.asarray(a[0]) for r, a in rounds.items()}
        for item, rounds in items.items()
    }
    caption = (
        "How many principal kernels it takes to approximate each layer: two to the entropy of its singular values. A "
        "layer that needs most of its kernels loses expressiveness if only the top ones are trained."
    )
    figure = over_rounds(record, "principal kernels needed", needed, caption)
    return [replace(figure, name=f"analysis-{kind}", keys=("round", "layer", kind))]


def kernel_draws(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """How many clients per round trained each kernel, against its singular value; each array is (values, draws)."""
    latest = {_layer(item): rounds[max(rounds)] for item, rounds in items.items()}
    values = {layer: (array[0] / max(array[0].max(), 1e-30)).tolist() for layer, array in latest.items()}
    marks = tuple(
        replace(line(layer, values[layer], array[1].tolist(), look), joined=False, marked=True)
        for (layer, array), look in zip(latest.items(), looks(record, list(latest)))
    )
    rows = tuple(
        (layer, kernel, finite(float(value)), finite(float(draws)))
        for layer, array in latest.items()
        for kernel, (value, draws) in enumerate(array.T)
    )
    across = Axis("singular value / the layer's largest", from_zero=True)
    clients = Axis("clients per round", from_zero=True)
    return [
        Figure(
            name=f"analysis-{kind}",
            section="analysis",
            title="Clients that had each principal kernel",
            caption=(
                "Number of clients that trained the kernel in a round, as the mean over all rounds, by its place among "
                "the layer's singular values after the last evaluated round."
            ),
            keys=("layer", "kernel", "singular_value", "clients_a_round"),
            rows=rows,
            chart=Lines(marks, across, clients, legend="", together=False),
            height=340,
            wide=True,
        )
    ]


def feature_rank(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """How many directions each layer's outputs have, over rounds; rows of an array are keep ratios, see `PriSM`."""
    needed = {
        f"{_layer(item)}, {int(rounds[max(rounds)][0][1])} of {int(rounds[max(rounds)][0][2])} kernels": {
            r: np.asarray(array[0][-1]) for r, array in rounds.items()
        }
        for item, rounds in items.items()
    }
    caption = (
        "How many directions it takes to approximate the outputs of each layer on a few test samples, with the most "
        "important kernels of the smallest size. There cannot be more of them than kernels, so that outputs are "
        "redundant if there are more channels. The CSV has all sizes, and the ranks of both factors and of the outputs."
    )
    rows = tuple(
        (round_, _layer(item), *(finite(float(value)) for value in row))
        for item, rounds in items.items()
        for round_, array in rounds.items()
        for row in array
    )
    keys = ("round", "layer", "keep", "kernels", "channels", "rank_maps", "rank_kernels", "rank_outputs", "needed")
    figure = over_rounds(record, "directions needed", needed, caption)
    return [replace(figure, name=f"analysis-{kind}", title="Directions of the outputs", keys=keys, rows=rows)]


def feature_overlap(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """How far the outputs of two kernels of a layer are from orthogonal, over rounds."""
    caption = (
        "The largest cosine between the outputs of two principal kernels, on a few test samples. It is 0 up to "
        "rounding after the kernels were decomposed, and grows until they are again."
    )
    figure = over_rounds(record, "overlap", {_layer(item): rounds for item, rounds in items.items()}, caption)
    return [replace(figure, name=f"analysis-{kind}", title="Overlap of the kernels' features")]


def kernel_features(record: Record, kind: str, items: Mapping[str, ByRound]) -> list[Figure]:
    """A sample and what single kernels make of it, as pictures."""
    caption = "A test sample and what the most important kernels of the first such layer make of it."
    return [matrix(kind, _layer(item), rounds[max(rounds)], caption) for item, rounds in items.items()]


def _layer(item: str) -> str:
    """The layer's name from its weight's: without the ending, and without the prefix of a normalised network."""
    return item.removesuffix(".weight").removeprefix("network.")


# The kinds that have a special figure.
DRAWN: dict[str, Drawer] = {
    "gram": gram,
    "coefficients": coefficients,
    "needed_kernels": needed_kernels,
    "kernel_draws": kernel_draws,
    "feature_rank": feature_rank,
    "feature_overlap": feature_overlap,
    "kernel_features": kernel_features,
}
