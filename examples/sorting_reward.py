"""The demo's reward: are the digits sorted?"""


def score(completion: str, row: dict) -> float:
    """1 for exactly the answer, 0 for anything else."""
    return float(completion == row["answer"])
