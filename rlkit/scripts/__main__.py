"""`python -m rlkit.scripts` is the command `rlkit`."""

from rlkit.scripts.cli import main

main()
