"""Data in: rows from files, prompts and supervised examples as tokens, and turns joined by tokens."""

from rlkit._util.elsewhere import elsewhere
from rlkit.data.chat import end_of_turn_id, render, stop_token_ids, turn_tokens
from rlkit.data.examples import Example, sft_examples
from rlkit.data.load import load_rows
from rlkit.data.order import batch_indices, batches, epoch_order
from rlkit.data.prompts import Prompt, prompt_messages, rl_prompts

__all__ = [
    "Example",
    "Prompt",
    "batch_indices",
    "batches",
    "end_of_turn_id",
    "epoch_order",
    "load_rows",
    "prompt_messages",
    "render",
    "rl_prompts",
    "sft_examples",
    "stop_token_ids",
    "turn_tokens",
]

__getattr__ = elsewhere(__name__)
