"""1 if the last number of the completion is the answer."""

import re


def correct(completion: str, row: dict[str, str]) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [row["answer"]])
