"""The typed scripts: `rlkit grpo`, `python -m rlkit.scripts.grpo` and `torchrun -m rlkit.scripts.grpo` are the same."""
