"""The code of docs/environments.md runs unchanged: recipes for environments written for other systems.

verifiers and GEM are the real packages where they are installed (`REAL`), and else stand-ins of what the recipes use.
"""

import asyncio
import json
import random
import re
import sys
import threading
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.data.prompts import Prompt, prompt_messages, rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards.adapters import scorer, with_messages
from rlkit.rollout.calling import call
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.endpoint import agent_env
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.envs.tools import tool_env
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.limits import limited
from rlkit.rollout.rollout import sample_group
from rlkit.rollout.text import Text
from rlkit.types import SamplingParams

DOC = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
REAL = {
    "gem": find_spec("gem") is not None,
    "verifiers": False,
    "verifiers.v1": False,
    "openai": find_spec("openai") is not None,
}
if find_spec("verifiers") is not None:
    REAL["verifiers"] = find_spec("verifiers.envs") is not None
    REAL["verifiers.v1"] = find_spec("verifiers.v1") is not None and find_spec("verifiers.v1.agent") is not None


def run(marker, **given):
    """Execute the one block that contains `marker`; returns what it defines."""
    (block,) = [b for b in BLOCKS if marker in b]
    names = {
        "Chat": Chat, "Step": Step, "Text": Text, "Turns": Turns, "gym_env": gym_env, "limited": limited, "call": call,
        "scorer": scorer, "with_messages": with_messages, "SamplingParams": SamplingParams, "rl_prompts": rl_prompts,
        "tool_env": tool_env, "agent_env": agent_env, "asyncio": asyncio, "prompt_messages": prompt_messages,
        "threading": threading,
    }  # fmt: skip
    space = names | given
    exec(compile(block, str(DOC), "exec"), space)
    return SimpleNamespace(**{k: v for k, v in space.items() if not k.startswith("__")})


def test_every_recipe_is_at_most_twenty_lines():
    recipes = DOC.read_text().split("## Environments written for other systems")[1]
    for block in re.findall(r"```python\n(.*?)```", recipes, re.S):
        assert len([line for line in block.splitlines() if line.strip()]) <= 20


async def test_the_opening_example_and_limits():
    tokenizer = tokenizer_with("chatml")
    guess = run("async def guess", tokenizer=tokenizer).guess
    script = Script(tokenizer, "7", "42")
    (piece,) = await guess(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert piece.reward == 1.0
    env = run("max_total_tokens=4096", guess=guess).env
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, *["0"] * 9))
    assert (piece.info["num_turns"], piece.truncated, piece.reward) == (8, True, 0.0)


async def test_the_object_and_the_tool():
    tokenizer = tokenizer_with("chatml")
    env = run("class HigherLower", tokenizer=tokenizer).higher_lower
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "10", "42"))
    assert [m["content"] for m in piece.info["messages"]][1:] == ["10", "higher", "42"]
    rows = [{"prompt": "1+1", "answer": "2"}]
    space = run("def calculate", tokenizer=tokenizer, rows=rows, evaluate=lambda x: float(sum(map(int, x.split("+")))))
    call_it = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>'
    (piece,) = await space.with_tools(space.prompts[0], Script(tokenizer, call_it, "2"))
    assert piece.info["messages"][2] == {"role": "tool", "name": "calculate", "content": "2.0"}


async def test_rl2_step():
    tokenizer = tokenizer_with("chatml")
    seen = []

    async def step(state, action, extra_info):
        seen.append((state, action, dict(extra_info)))
        turn = extra_info["turn"] = extra_info.get("turn", 0) + 1
        goes_on = state + action + "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        states = {1: goes_on, 2: state + action + "\n<information>x</information>\n", 3: "summary: ", 4: ""}
        return {
            "next_state": states[turn], "reward": 0.25, "score": float(turn == 4), "done": turn == 4,
            "extra_info": extra_info,
        }  # fmt: skip

    env = run("def from_rl2", tokenizer=tokenizer).from_rl2(step, tokenizer)
    prompt = Prompt(**{**vars(prompt_of(tokenizer)), "row": {"prompt": "question", "extra_info": {"answer": 1}}})
    script = Script(tokenizer, "a", " b ", "c", "d")
    pieces = await env(prompt, script)
    check_exact(pieces, script.calls)
    assert [a for _, a, _ in seen] == ["a", " b ", "c", "d"]
    assert seen[0][0] == tokenizer.decode(prompt.ids)
    assert seen[0][2] == {"answer": 1}
    assert len(pieces) == 2
    assert tokenizer.decode(pieces[0].ids) == (
        "a<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"  # the end of turn is there once
        " b <|im_end|>\n<information>x</information>\nc<|im_end|>"
    )
    assert tokenizer.decode(pieces[1].prompt_ids) == "summary: "
    assert [p.reward for p in pieces] == [1.0, 1.0]
    assert pieces[1].score == 1.0


async def test_rl2_interact_and_reward_fn():
    tokenizer = tokenizer_with("chatml")

    def interact(messages):
        found = re.findall(r"<search>(.*?)</search>", messages[-1]["content"])
        return [{"role": "tool", "content": f"about {query}"} for query in found]

    def reward_fn(messages, answer):
        return float(messages[-1]["content"] == answer) + 0.1 * len(messages)

    recipe = run("def from_interact")
    env = recipe.from_interact(interact, tokenizer)
    score = recipe.score_of(reward_fn, tokenizer)
    scripts = [Script(tokenizer, "<search>x</search><search>y</search>", "42"), Script(tokenizer, "41")]
    group = await sample_group(prompt_of(tokenizer), scripts, env=env, score=score)
    assert [t.reward for t in group] == pytest.approx([1.0 + 0.1 * 5, 0.1 * 2])
    assert [m["content"] for m in group[0].info["messages"]][2:4] == ["about x", "about y"]


async def test_contents_alone_for_base_models():
    tokenizer = tiny_tokenizer()
    run("for message in messages %}{{ message.content }}", tokenizer=tokenizer)
    script = Script(tokenizer, [*b" yes"], [*b" no", 258])
    chat = Chat(prompt_of(tokenizer, "Is it?"), script, tokenizer=tokenizer)
    await chat.turn()
    chat.add("\nSure?")
    await chat.turn()
    (piece,) = chat.end()
    check_exact([piece], script.calls)
    assert tokenizer.decode(piece.prompt_ids + piece.ids) == "Is it? yes\nSure? no<|im_end|>"


class ChatMessage:
    """rl4llm's class, without pydantic."""

    def __init__(self, role, content):
        self.role, self.content = role, content

    def model_dump(self, **_):
        return {"role": self.role, "content": self.content}


class ToolLoop:
    """An interaction loop in rl4llm's manner: batches of states, prompts as text, contents stripped."""

    tool_schemas, max_steps = None, 3

    def __init__(self, tokenizer, reward):
        self.tokenizer, self.reward_functions = tokenizer, [reward]

    def _run_interaction_loop(self, env_state, llm, sampling_params):
        for _ in range(self.max_steps):
            for state in env_state.sample_states:
                if state.done:
                    continue
                messages = [m.model_dump(exclude_none=True) for m in state.messages]
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                answer = llm.generate(prompts=[text], sampling_params=sampling_params)[0]["text"].strip()
                state.messages.append(ChatMessage(role="assistant", content=answer))
                state.done = "call" not in answer
                if not state.done:
                    state.messages.append(ChatMessage(role="tool", content="7"))
        return env_state


async def test_rl4llm_loop():
    tokenizer = tokenizer_with("chatml")

    class Right:
        name = "right"

        def __call__(self, messages, ground_truth, **_):
            return float(messages[-1].content == ground_truth)

    def sample_state(messages, ground_truth, init_msg_size):
        return SimpleNamespace(messages=messages, ground_truth=ground_truth, init_msg_size=init_msg_size, done=False)

    env = run("def from_rl4llm").from_rl4llm(
        ToolLoop(tokenizer, Right()), tokenizer, SimpleNamespace, sample_state, ChatMessage
    )
    prompt = rl_prompts(
        [{"messages": [{"role": "user", "content": "q"}], "ground_truth": "7"}],
        tokenizer=tokenizer, max_prompt_tokens=99,
    )[0][0]  # fmt: skip
    script = Script(tokenizer, " call it\n", "7")
    pieces = await env(prompt, script)
    check_exact(pieces, script.calls)
    (piece,) = pieces
    assert (piece.reward, piece.info["metrics"]) == (1.0, {"right": 1.0})
    assert tokenizer.decode(piece.ids) == (
        " call it\n<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )


def gem_stand_in():
    """GEM's protocol: reset(seed) seeds the global generator; step gives five values."""

    class Guess:
        def __init__(self):
            self.secret, self.turns = random.randint(1, 50), 0

        def reset(self, seed=None):
            random.seed(seed)
            self.secret, self.turns = random.randint(1, 50), 0
            return "Guess the number, in \\boxed{}.", {"suffix": ""}

        def step(self, action):
            self.turns += 1
            match = re.search(r"\\boxed{(\d+)}", action)
            if match is None:
                return "no guess", -0.1, True, self.turns == 20, {}
            guess = int(match[1])
            if guess == self.secret:
                return "Congratulations!", 1.0, True, False, {}
            return f"the target number is {'lower' if guess > self.secret else 'higher'}", 0, False, False, {}

    return SimpleNamespace(make=lambda name: Guess())


async def test_gem():
    if REAL["gem"]:
        import gem
    else:
        gem = gem_stand_in()
    tokenizer = tokenizer_with("chatml")
    env = run("gem.make", gem=gem, tokenizer=tokenizer).from_gem
    prompts = rl_prompts(
        [{"prompt": "-", "env": "game:GuessTheNumber-v0-hard"}] * 4, tokenizer=tokenizer, max_prompt_tokens=99
    )[0]

    async def bisect(prompt, seen):
        """A policy that halves what is left."""
        low, high, guess = 1, 50, 0

        async def sample(prompt_ids, *, max_new_tokens=None):
            nonlocal low, high, guess
            last = tokenizer.decode(prompt_ids).rpartition("user\n")[2]
            low, high = (
                (guess + 1, high) if "is higher" in last else (low, guess - 1) if "is lower" in last else (1, 50)
            )
            guess = (low + high) // 2
            return await Script(tokenizer, f"\\boxed{{{guess}}}")(prompt_ids)

        pieces = await env(prompt, sample)
        seen.append(guess)
        return pieces

    secrets = {}
    for prompt in prompts:
        seen = secrets[prompt.index] = []
        groups = await asyncio.gather(*(bisect(prompt, seen) for _ in range(4)))
        assert len(set(seen)) == 1, "one group plays one game"
        for (piece,) in groups:
            assert piece.info["turn_rewards"][-1] == 1.0
            assert not piece.truncated
    assert len({s[0] for s in secrets.values()}) > 1
    (piece,) = await env(prompts[0], Script(tokenizer, "I do not know"))
    assert piece.reward < 0 or REAL["gem"]


def verifiers_stand_in(monkeypatch):
    """The parts of verifiers 0.1.x that the recipe uses: messages with model_dump, a rollout loop, a rubric."""

    class Message(SimpleNamespace):
        def model_dump(self, **_):
            return {k: v for k, v in vars(self).items() if k in ("role", "content")}

    vf = ModuleType("verifiers")
    vf.clients, vf.types = ModuleType("verifiers.clients"), ModuleType("verifiers.types")
    vf.OverlongPromptError = type("OverlongPromptError", (Exception,), {})
    vf.clients.OpenAIChatCompletionsClient = type("Client", (), {"__init__": lambda self, config: None})
    vf.types.ResponseMessage = lambda **k: Message(role="assistant", **k)
    vf.types.Response = SimpleNamespace
    vf.types.UserMessage = lambda content: Message(role="user", content=content)

    class Rubric:
        def __init__(self, funcs):
            self.funcs = funcs

        async def score_rollout(self, state):
            scores = {f.__name__: await f(completion=state["completion"], answer=state["answer"]) for f in self.funcs}
            state["reward"], state["metrics"] = sum(scores.values()), scores

    class MultiTurnEnv:
        def __init__(self, dataset, rubric, max_turns):
            self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns

        def get_dataset(self):
            return self.dataset

        async def rollout(self, input, client, model):
            prompt = [Message(**m) for m in input["prompt"]]
            state = {**input, "completion": []}
            for _ in range(self.max_turns):
                try:
                    response = await client.get_response(prompt + state["completion"], model, {}, tools=None)
                except vf.OverlongPromptError:
                    break
                state["completion"].append(response.message)
                if await self.is_over(state["completion"]):
                    break
                state["completion"] += await self.env_response(state["completion"], state)
            return state

    vf.Rubric, vf.MultiTurnEnv = Rubric, MultiTurnEnv
    for name, module in (("verifiers", vf), ("verifiers.clients", vf.clients), ("verifiers.types", vf.types)):
        monkeypatch.setitem(sys.modules, name, module)
    return vf


async def test_verifiers(monkeypatch):
    if REAL["verifiers"]:
        import verifiers as vf
        from datasets import Dataset
    else:
        vf = verifiers_stand_in(monkeypatch)
        Dataset = SimpleNamespace(from_list=list)
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.types import Response, ResponseMessage, UserMessage

    async def right(completion, answer):
        return float(completion[-1].content == answer)

    async def brief(completion, answer):
        return 0.5 if len(completion) < 4 else 0.0

    over = vf.stop if REAL["verifiers"] else lambda f: f

    class Insist(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [UserMessage(content="No. Try again.")]

        if REAL["verifiers"]:

            @over
            async def is_right(self, state):
                return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == "42"

        else:

            async def is_over(self, completion):
                return completion[-1].content == "42"

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "answer": "42", "example_id": 0}])
    vf_env = Insist(dataset=data, rubric=vf.Rubric(funcs=[right, brief]), max_turns=3)
    tokenizer = tokenizer_with("chatml")
    given = {"vf": vf, "Response": Response, "ResponseMessage": ResponseMessage}
    recipe = run("def from_verifiers", OpenAIChatCompletionsClient=OpenAIChatCompletionsClient, **given)
    env = recipe.from_verifiers(vf_env, tokenizer)
    (prompt,), _ = rl_prompts([dict(row) for row in vf_env.get_dataset()], tokenizer=tokenizer, max_prompt_tokens=99)
    scripts = [Script(tokenizer, "7", "42"), Script(tokenizer, "1", "2", "3")]
    group = await sample_group(prompt, scripts, env=env, score=None)
    for t, script in zip(group, scripts, strict=True):
        check_exact([t], script.calls)
    assert [t.reward for t in group] == [1.5, 0.0]
    metrics = group[0].info["metrics"]
    assert (metrics["right"], metrics["brief"]) == (1.0, 0.5)
    assert tokenizer.decode(group[0].ids) == (
        "7<|im_end|>\n<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    )


def asks_twice(base_url, question):
    """What a harness does, in this process and without a framework."""
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        data = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Content-Type": "application/json"})
        request.add_header("Authorization", "Bearer none")
        with urllib.request.urlopen(request, timeout=100) as reply:
            answer = json.loads(reply.read())["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "sure?"}]
    return answer["content"]


def verifiers_v1_stand_in():
    class Agent:
        def __init__(self, config):
            self.config = config

        async def run(self, task):
            if task is None:
                return SimpleNamespace(errors=[SimpleNamespace(message="no task")], reward=0.0)
            said = await asyncio.to_thread(asks_twice, self.config.client.base_url, task.question)
            return SimpleNamespace(errors=[], reward=float(said == task.answer))

    vf = SimpleNamespace(Agent=Agent, AgentConfig=SimpleNamespace, EvalClientConfig=SimpleNamespace)
    return vf, [SimpleNamespace(question="q", answer="42")], {}


def verifiers_v1_real(monkeypatch):
    import verifiers.v1 as vf
    from verifiers.v1.harnesses.null import NullHarnessConfig
    from verifiers.v1.utils import loaders
    from verifiers.v1.utils.decorators import reward

    class Data(vf.TaskData):
        answer: str = ""

    class Question(vf.Task[Data]):
        @reward
        async def right(self, trace) -> float:
            return float(trace.last_reply == self.data.answer)

    class InThisProcess(vf.Harness[NullHarnessConfig]):
        NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, _runtime, endpoint, secret, _urls, _data, **_):
            import openai

            client, messages = openai.AsyncOpenAI(base_url=endpoint, api_key=secret), [{"role": "user", "content": "q"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [answer, {"role": "user", "content": "sure?"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    config = NullHarnessConfig(id="null")
    monkeypatch.setattr(loaders, "load_harness", lambda _: InThisProcess(config))
    return vf, [Question(Data(prompt="q", answer="42"))], {"harness": config, "runtime": vf.SubprocessConfig()}


async def test_verifiers_since_v1(monkeypatch):
    vf, tasks, config = verifiers_v1_real(monkeypatch) if REAL["verifiers.v1"] else verifiers_v1_stand_in()
    tokenizer = tokenizer_with("chatml")
    env = run("def from_tasks", vf=vf).from_tasks(tasks, tokenizer, **config)
    scripts = [Script(tokenizer, "7", "42"), Script(tokenizer, "42", "7")]
    group = await sample_group(prompt_of(tokenizer, "q"), scripts, env=env, score=None)
    for t, script in zip(group, scripts, strict=True):
        check_exact([t], script.calls)
    assert [t.reward for t in group] == [1.0, 0.0]
    if not REAL["verifiers.v1"]:
        with pytest.raises(RuntimeError, match="no task"):
            await run("def from_tasks", vf=vf).from_tasks([None], tokenizer)(prompt_of(tokenizer, "q"), scripts[0])


async def test_a_program_with_the_openai_package():
    class Completions:
        def __init__(self, base_url):
            self.base_url = base_url

        async def create(self, **body):
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{self.base_url}/chat/completions", data)
            reply = await asyncio.to_thread(lambda: json.loads(urllib.request.urlopen(request, timeout=100).read()))
            message = reply["choices"][0]["message"]
            said = SimpleNamespace(content=message["content"], model_dump=lambda: message)
            return SimpleNamespace(choices=[SimpleNamespace(message=said)])

    def client(base_url, **_):
        return SimpleNamespace(chat=SimpleNamespace(completions=Completions(base_url)))

    if REAL["openai"]:
        import openai
    else:
        openai = SimpleNamespace(AsyncOpenAI=client)
    tokenizer = tokenizer_with("chatml")
    env = run("drafting = agent_env", openai=openai, tokenizer=tokenizer).drafting
    script = Script(tokenizer, "41", "42")
    (piece,) = await env(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert piece.reward == 1.0
