"""What is not collected: the doctests of a file that needs an extra, where that is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") and find_spec("ray") else ["src/anysize/engines/flower.py"]
