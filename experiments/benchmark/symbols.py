"""The task of the confirmation's text: the next symbol at every position, judged by accuracy as the pictures are."""

from __future__ import annotations

from anysize.tasks import NextToken


class Symbols(NextToken):
    """The next symbol, by the fraction of positions at which it is the most likely one."""

    metric = "accuracy"
    higher_is_better = True
