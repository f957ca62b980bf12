"""The share of digits in their place."""


def score(completion: str, row: dict) -> float:
    """`answer` is the sorted digits."""
    return sum(map(str.__eq__, completion, row["answer"])) / len(row["answer"])
