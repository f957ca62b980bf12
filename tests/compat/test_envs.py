"""Environments of RL2 and rl4llm through `rlkit.compat.envs`, and what `adapted` recognises.

rl4llm runs as a stand-in, and (marked slow) with its own classes where it is installed.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
from foreign import BOTH, user_says, with_row
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.compat import envs
from rlkit.compat.rewards import adapted
from rlkit.data.prompts import rl_prompts
from rlkit.rewards.scoring import scorer
from rlkit.rollout.groups import sample_group
from rlkit.rollout.limits import limited

MORE = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


async def rl2_step(state, action, extra_info):
    """After README.md of rl-square 0.0.2; its second state drops the end of turn, its third starts anew."""
    turn = extra_info["turn"] = extra_info.get("turn", 0) + 1
    states = {1: state + action + MORE, 2: state + action + "\n<information>x</information>\n", 3: "summary: "}
    return {
        "next_state": states.get(turn), "reward": 0.25, "score": float(turn == 4), "done": turn == 4,
        "extra_info": extra_info,
    }  # fmt: skip


async def rl2_env_step(sample):
    """After envs/searchr1.py of RL2 at 9161ede."""
    sample.metrics["length"].append(len(sample.action_text))
    turn = sample.sample["extra_info"]["turn"] = sample.turn
    states = {1: sample.state_text + sample.action_text + MORE, 3: "summary: "}
    state = states.get(turn, sample.state_text + sample.action_text + "\n<information>x</information>\n")
    return {"next_state": None if turn == 4 else state, "reward": 0.25, "done": turn == 4}


@pytest.mark.parametrize("step", [rl2_step, rl2_env_step])
async def test_rl2(step):
    tokenizer = tokenizer_with("chatml")
    prompt = with_row(tokenizer, {"prompt": "question", "extra_info": {"answer": 1}})
    for env in (envs.rl2(step, tokenizer), envs.adapted(step, tokenizer)):
        script = Script(tokenizer, "a", " b ", "c", "d")
        pieces = await env(prompt, script)
        check_exact(pieces, script.calls)
        assert len(pieces) == 2
        assert tokenizer.decode(pieces[0].ids) == (
            "a" + MORE + " b <|im_end|>\n<information>x</information>\nc<|im_end|>"  # the end of turn is there once
        )
        assert tokenizer.decode(pieces[1].prompt_ids) == "summary: "
        assert [p.reward for p in pieces] == [1.0, 1.0]
        assert pieces[1].score == 1.0
        assert prompt.row == {"prompt": "question", "extra_info": {"answer": 1}}, "the samples of a group share it"
    if step is rl2_env_step:
        assert pieces[1].info["metrics"] == {"length": 1.5}


async def test_rl2_rewards_of_turns_a_reset_and_a_missing_state():
    tokenizer = tokenizer_with("chatml")
    prompt = with_row(tokenizer, {"prompt": "question"})
    env = envs.rl2(rl2_step, tokenizer, token_rewards=True)
    pieces = await env(prompt, Script(tokenizer, "a", " b ", "c", "d"))
    assert [p.reward for p in pieces] == [0.0, 0.0]
    assert [[r for r in p.token_rewards if r] for p in pieces] == [[0.25] * 3, [0.25]]
    cut = limited(envs.rl2(rl2_step, tokenizer), max_turns=2)
    pieces = await cut(prompt, Script(tokenizer, "a", " b "))
    assert (pieces[0].reward, pieces[0].truncated) == (0.5, True)

    async def reset(extra_info):
        return "a game: ", {**extra_info, "turn": 2}

    env = envs.rl2(rl2_step, tokenizer, reset=reset)
    script = Script(tokenizer, "c", "d")
    pieces = await env(prompt, script)
    check_exact(pieces, script.calls)
    assert [tokenizer.decode(p.prompt_ids) for p in pieces] == ["a game: ", "summary: "]

    async def no_state(state, action, extra_info):
        return {"next_state": None, "reward": 0.0, "score": 0.0, "done": False, "extra_info": extra_info}

    for opening, message in (
        ("a game: ", r"the pair \(state, extra_info\), got 'a game"),
        (({}, {}), "must be text, got dict"),
    ):
        env = envs.rl2(rl2_step, tokenizer, reset=lambda extra_info, opening=opening: opening)
        with pytest.raises(TypeError, match=message):
            await env(prompt, Script(tokenizer))
    with pytest.raises(TypeError, match="next_state must be text where done is false, got None") as raised:
        await sample_group(prompt, [Script(tokenizer, "a")], env=envs.rl2(no_state, tokenizer))
    assert raised.value.__notes__ == ["in an episode of row 1"]


async def test_rl2_interact_and_reward_fn():
    """After envs/searchr1.py of RL2 at 71efce7."""
    tokenizer = tokenizer_with("chatml")

    def interact(messages):
        found = re.findall(r"<search>(.*?)</search>", messages[-1]["content"])
        return [{"role": "tool", "content": f"about {query}"} for query in found]

    def reward_fn(messages, answer):
        return float(messages[-1]["content"] == answer) + 0.1 * len(messages)

    for wrong in (5, "again", {"role": "user", "content": "again"}, [5]):
        env = envs.interact(lambda messages, wrong=wrong: wrong, tokenizer)
        with pytest.raises(ValueError, match="interact must return a list of messages to add, got"):
            await env(prompt_of(tokenizer), Script(tokenizer, "a"))
    score = scorer(adapted(reward_fn), tokenizer=tokenizer, timeout_s=30.0)
    for env in (envs.interact(interact, tokenizer), envs.adapted(interact, tokenizer)):
        scripts = [Script(tokenizer, "<search>x</search><search>y</search>", "42"), Script(tokenizer, "41")]
        group = await sample_group(prompt_of(tokenizer), scripts, env=env, score=score)
        for t, script in zip(group, scripts, strict=True):
            check_exact([t], script.calls)
        assert [t.reward for t in group] == pytest.approx([1.0 + 0.1 * 5, 0.1 * 2])
        assert [m["content"] for m in group[0].info["messages"]][2:4] == ["about x", "about y"]


class ToolLoop:
    """After `BaseMDPEnv` and `SglToolMDPEnv` of rl4llm at 0180bd3: prompts as text, contents stripped."""

    def __init__(self, tokenizer, reward_functions, reward_transform_fn, max_steps):
        self.tokenizer, self.reward_functions, self.max_steps = tokenizer, reward_functions, max_steps
        self.transform = reward_transform_fn

    def _prepare_initial_state(self, raw_batch):
        group = [
            SimpleNamespace(messages=[SimpleNamespace(**m) for m in messages], ground_truth=truth, done=False)
            for messages, truth in zip(raw_batch["messages"], raw_batch["ground_truth"], strict=True)
            for _ in range(2)
        ]
        return SimpleNamespace(sample_states=group)

    def _calculate_rewards(self, states):
        parts = {f.name: [f(s.messages, s.ground_truth) for s in states] for f in self.reward_functions}
        return self.transform(parts), parts

    def _run_interaction_loop(self, env_state, llm, sampling_params):
        for _ in range(self.max_steps):
            for state in env_state.sample_states:
                if state.done:
                    continue
                text = self.tokenizer.apply_chat_template(
                    [vars(m) for m in state.messages], tokenize=False, add_generation_prompt=True
                )
                answer = llm.generate(prompts=[text], sampling_params=sampling_params)[0]["text"].strip()
                state.messages.append(SimpleNamespace(role="assistant", content=answer))
                state.done = "<tool_call>" not in answer
                if not state.done:
                    said = "Error: Unknown tool 'f'."
                    state.messages.append(SimpleNamespace(role="tool", content=said))
        return env_state


def rl4llm_env(real, tokenizer, max_steps=3):
    """A tool environment with two rewards, of which the transformed one is 10 times the first less the second."""
    base = object
    if real:
        pytest.importorskip("rl4llm")
        from rl4llm.core.base_env import BaseRewardFunction as base

    class Part(base):
        def __init__(self, name, value):
            self.name, self.value = name, value

        def __call__(self, messages, ground_truth, **_):
            return float(self.value(messages, ground_truth))

    parts = [Part("right", lambda m, truth: m[-1].content == truth), Part("length", lambda m, _: len(m))]
    if not real:
        combine = lambda d: [10 * a - b for a, b in zip(d["right"], d["length"], strict=True)]
        return ToolLoop(tokenizer, parts, combine, max_steps)
    from datasets import Dataset
    from rl4llm.envs.sgl_tool_env import SglToolMDPEnv

    rows = Dataset.from_list([{"messages": [{"role": "user", "content": "q"}], "ground_truth": "7"}])
    combine = lambda d: 10 * d["right"] - d["length"]
    given = {"batch_size": 1, "group_size": 2, "max_steps": max_steps, "reward_transform_fn": combine}
    env = SglToolMDPEnv(dataset=rows, tokenizer=tokenizer, reward_functions=parts, **given)
    env.tool_schemas = None
    return env


@BOTH
async def test_rl4llm(real):
    tokenizer = tokenizer_with("chatml")
    env = envs.rl4llm(rl4llm_env(real, tokenizer), tokenizer)
    row = {"messages": [{"role": "user", "content": "q"}], "ground_truth": "7"}
    prompt = rl_prompts([row], tokenizer=tokenizer, max_prompt_tokens=99)[0][0]
    call_f = ' <tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
    script = Script(tokenizer, call_f, "7")
    (piece,) = await env(prompt, script)
    check_exact([piece], script.calls)
    assert (piece.reward, piece.info["metrics"]) == (6.0, {"right": 1.0, "length": 4.0})
    assert user_says(piece) == ["q", "Error: Unknown tool 'f'."]
    assert tokenizer.decode(piece.ids) == (
        f"{call_f}<|im_end|>\n<|im_start|>tool\nError: Unknown tool 'f'.<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    (piece,) = await limited(env, max_turns=1)(prompt, Script(tokenizer, call_f))
    assert (piece.truncated, piece.info["num_turns"]) == (True, 1)


async def test_what_is_recognised():
    tokenizer = tokenizer_with("chatml")

    class Game:
        """rlkit's own form."""

        def __init__(self, prompt):
            self.answer = prompt.row["answer"]

        def reset(self):
            return None

        def step(self, turn):
            return "", float(turn.text == self.answer), True

    (piece,) = await envs.adapted(Game, tokenizer)(prompt_of(tokenizer), Script(tokenizer, "42"))
    assert piece.reward == 1.0

    async def env(prompt, sample):
        raise NotImplementedError

    for other in (env, lambda tokenizer: env, partial(envs.rl2, rl2_step), partial(envs.gem, Game)):
        assert envs.adapted(other, tokenizer) is None
    made = partial(envs.rl2, rl2_step)(tokenizer)
    assert len(await made(prompt_of(tokenizer), Script(tokenizer, "a", " b ", "c", "d"))) == 2
