"""Moved since rlkit 0.1: `rlkit.data.rows` and `rlkit.compat.rows`."""

from rlkit._moved import moved

_ROWS = "PROMPT CONVERSATION RESPONSE PAIR LABELLED TEXT SFT Form Turn read_rows check_columns prompt_messages drop"
__getattr__ = moved(__name__, {"in rlkit.data.rows": _ROWS, "rlkit.compat.rows.read": "with_prompt rl_row source_of"})
