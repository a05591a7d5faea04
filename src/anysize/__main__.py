"""`python -m anysize` is the command `anysize`."""

from anysize.cli import main

if __name__ == "__main__":
    main()
