"""The classes that the README of rl4llm imports, as far as its printed forms use them (commit 0180bd3)."""

from abc import ABC, abstractmethod

import torch
from pydantic import BaseModel


class ChatMessage(BaseModel):
    role: str
    content: str


class SampleState(BaseModel):
    messages: list[ChatMessage]
    ground_truth: str | float | int
    done: bool = False


class EnvState(BaseModel):
    sample_states: list[SampleState]


class BaseRewardFunction(ABC):
    def __init__(self, name):
        self.name = name

    @abstractmethod
    def __call__(self, messages, ground_truth, **kwargs): ...


class BaseMDPEnv:
    def __init__(
        self, dataset, tokenizer, reward_functions, batch_size, group_size, max_steps=1, tool_schemas=None,
        reward_transform_fn=None,
    ):  # fmt: skip
        if not all(isinstance(function, BaseRewardFunction) for function in reward_functions):
            raise ValueError("reward_functions must be instances of BaseRewardFunction")
        if not {"messages", "ground_truth"} <= {*dataset.column_names} or batch_size < 1:
            raise ValueError("a data set of messages and ground_truth is needed, and a batch")
        self.tokenizer, self.tool_schemas = tokenizer, tool_schemas
        self.reward_functions, self.transform = reward_functions, reward_transform_fn
        self.group_size, self.max_steps = group_size, max_steps

    def _prepare_initial_state(self, raw_batch):
        pairs = zip(raw_batch["messages"], raw_batch["ground_truth"], strict=True)
        return EnvState(
            sample_states=[
                SampleState(messages=[ChatMessage(**m) for m in messages], ground_truth=truth)
                for messages, truth in pairs
                for _ in range(self.group_size)
            ]
        )

    def _convert_to_batch_prompts(self, env_state):
        said = [[m.model_dump() for m in state.messages] for state in env_state.sample_states]
        return [self.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in said]

    def _calculate_rewards(self, states):
        parts = {f.name: torch.tensor([f(s.messages, s.ground_truth) for s in states]) for f in self.reward_functions}
        return self.transform(parts) if self.transform else next(iter(parts.values())), parts
