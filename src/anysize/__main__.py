"""The command `anysize`, also as `python -m anysize`."""

from anysize import interrupts


def main() -> None:
    """Runs the command line; a signal that comes while it is still loaded ends it in one line too."""
    interrupts.command()
    from anysize.cli.commands import main as command_line

    command_line()


if __name__ == "__main__":
    main()
