"""`python -m anysize.cli` is the command line."""

from anysize.cli.commands import main

main()
