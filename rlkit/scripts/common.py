"""Moved since rlkit 0.1: `rlkit.scripts.args` (flags) and `rlkit.scripts.start`."""

from rlkit._moved import moved

__getattr__ = moved(__name__, {
    "in rlkit.scripts.args": "Model Data Examples Lora",
    "in rlkit.scripts.start": "begin check_device load_policies load_tokenizer offline function_of own_loss where",
})  # fmt: skip
