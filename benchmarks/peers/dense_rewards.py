"""Rewards that differ within nearly every group, so that no step is without signal."""


def digits(completion: str, row: dict) -> float:
    """The share of digits in their place; `answer` is the sorted digits."""
    return sum(map(str.__eq__, completion, row["answer"])) / len(row["answer"])


def brevity(completion: str, row: dict) -> float:  # noqa: ARG001
    """1 for an empty answer, less 0.001 a character."""
    return 1 - len(completion) / 1000
