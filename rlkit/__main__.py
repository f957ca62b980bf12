"""`python -m rlkit` is the command `rlkit`."""

from rlkit.scripts.cli import main

if __name__ == "__main__":
    main()
