"""A taskset of verifiers 0.4 with two weighted rewards."""

import verifiers.v1 as vf
from verifiers.v1.utils.decorators import reward

__all__ = ["Sums"]


class Data(vf.TaskData):
    """A sum."""

    answer: str = ""


class Sum(vf.Task[Data]):
    """A question."""

    @reward
    async def right(self, trace) -> float:
        """Whether the answer is in the reply."""
        return float(self.data.answer in trace.last_reply)

    @reward(weight=0.5)
    async def brief(self, trace) -> float:
        """Whether the reply is short."""
        return 1.0 if len(trace.last_reply) < 30 else 0.25


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """Two sums."""

    def load(self):
        """The questions."""
        for i in (2, 3):
            yield Sum(Data(prompt=f"What is {i}+1?", answer=str(i + 1)))
