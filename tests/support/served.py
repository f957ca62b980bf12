"""Checkpoints of a tiny model for real inference servers, and the log-probs of Hugging Face's own forward."""

from __future__ import annotations

from pathlib import Path

import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer


def make_checkpoint(folder: Path, *, seed: int, tied: bool = False) -> Path:
    """A tiny model without an end token and with peaked distributions, so that a wrong weight shows."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=64, layers=2, intermediate=128, tie_word_embeddings=tied, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def forward_logp(model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `ids` after `prompt`."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
