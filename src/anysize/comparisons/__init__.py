"""Comparisons: several methods under equal conditions, each cell a run, and what came out of them as tables and a page.

`cells` says which runs there are, `working` brings them to their end, `jobs` lets several processes do so, `outcomes`
reads finished runs, `statistics` and `fairness` judge them, `comparison` is the result and `page` shows it.
"""
