"""A reward of rl-max: a subclass of `BaseReward` under `@register_reward`, both here as its src/rewards.py has them."""

from pydantic import BaseModel, Field

REGISTRY = {}


def register_reward(cls):
    REGISTRY[cls().name] = cls
    return cls


class BaseReward(BaseModel):
    name: str = Field(...)
    weight: float = 1.0
    min_value: float = 0.0
    max_value: float = 1.0

    def score(self, prompt: str, completion: str, metadata: dict) -> float:
        raise NotImplementedError

    def normalized_score(self, prompt: str, completion: str, metadata: dict) -> float:
        raw = min(max(self.score(prompt, completion, metadata), self.min_value), self.max_value)
        return (raw - self.min_value) / (self.max_value - self.min_value)


@register_reward
class LengthReward(BaseReward):
    name: str = "length"
    max_value: float = 500.0

    def score(self, prompt: str, completion: str, metadata: dict) -> float:
        return float(len(completion))
