"""How close one sentence comes to the number of words that was asked for."""

import re


def close(completion: str, row: dict[str, int]) -> dict[str, float]:
    """1 for one sentence of exactly `num_words` words, 0.2 less for each word too many or too few; else 0."""
    text = completion.strip()
    missed = abs(len(text.split()) - row["num_words"])
    sentence = re.fullmatch(r"[A-Z][^.!?\n]*[.!?]", text) is not None
    return {"reward": max(0.0, 1 - 0.2 * missed) * sentence, "exact": float(sentence and missed == 0)}
