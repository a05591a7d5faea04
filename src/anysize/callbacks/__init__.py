"""Callbacks: what a run tells while it goes on, and how it is stopped.

>>> from anysize.callbacks import Callback, RunView
>>> class Enough(Callback):
...     def on_evaluation(self, run: RunView) -> None:
...         if run.evaluations[-1].held_out_mean > 0.95:
...             run.stop("good enough")
"""

from anysize.callbacks.base import Callback, Evaluation, RunView, Wishes
from anysize.callbacks.choosing import EarlyStopping, KeepBest
from anysize.callbacks.named import of_config
from anysize.callbacks.tracking import MLflow, TensorBoard, Tracker, WandB

__all__ = [
    "Callback",
    "EarlyStopping",
    "Evaluation",
    "KeepBest",
    "MLflow",
    "RunView",
    "TensorBoard",
    "Tracker",
    "WandB",
    "Wishes",
    "of_config",
]
