"""The command line."""

from anysize.cli.commands import main

__all__ = ["main"]
