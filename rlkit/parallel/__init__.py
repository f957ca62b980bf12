"""Several processes: meshes, collectives, and attention, experts and layers over ranks.

`is_first` and `on_rank0` are for what one process does for all, such as a file that it writes.
"""

from rlkit._util.ranks import is_first, on_rank0

__all__ = ["is_first", "on_rank0"]
