"""Rewards that differ within nearly every group, so that no step is without signal."""


def digits(completion: str, row: dict) -> float:
    """The share of digits in their place; `answer` is the sorted digits."""
    return sum(map(str.__eq__, completion, row["answer"])) / len(row["answer"])


def vowels(completion: str, row: dict) -> float:  # noqa: ARG001
    """The share of vowels among the letters: nothing that a few steps learn, so lengths stay as they are."""
    letters = [x for x in completion.lower() if x.isalpha()]
    return sum(x in "aeiou" for x in letters) / max(1, len(letters))
