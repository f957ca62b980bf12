"""A reward and an environment in the form that the README of rl4llm prints, with bodies of our own."""

from functools import partial
from typing import Any

import torch
from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState


class CustomReward(BaseRewardFunction):
    def __init__(self, name: str = "custom_reward_name", **kwargs):
        super().__init__(name)

    def __call__(self, messages: list[ChatMessage], ground_truth: str | float | int, **kwargs: dict[str, Any]) -> float:
        completion = messages[-1].content
        return len(completion) / 100 + float(str(ground_truth) in completion)


class NumMessages(BaseRewardFunction):
    def __init__(self, name: str = "num_messages"):
        super().__init__(name)

    def __call__(self, messages, ground_truth, **kwargs):
        return float(len(messages))


class CustomEnv(BaseMDPEnv):
    @torch.inference_mode()
    def _run_interaction_loop(
        self, env_state: EnvState, llm: Any, sampling_params: dict[str, Any], **kwargs: dict[str, Any] | None
    ) -> EnvState:
        for turn in range(self.max_steps):
            prompts = self._convert_to_batch_prompts(env_state)
            answers = llm.generate(prompts=prompts, sampling_params=sampling_params)
            for state, answer in zip(env_state.sample_states, answers, strict=True):
                state.messages.append(ChatMessage(role="assistant", content=answer["text"]))
                state.done = turn + 1 == self.max_steps
                if not state.done:
                    state.messages.append(ChatMessage(role="user", content="Are you sure?"))
        return env_state


reward = CustomReward("accuracy_reward")
two_turns = partial(CustomEnv, max_steps=2)
