"""What is not collected: the doctests of files that need an extra, where that is not installed."""

from importlib.util import find_spec

_FLOWER = find_spec("flwr") is not None

collect_ignore = [] if _FLOWER and find_spec("ray") else ["src/anysize/engines/flower.py"]
collect_ignore_glob = [] if _FLOWER else ["src/anysize/deploy/*.py", "src/anysize/engines/flower_records.py"]
