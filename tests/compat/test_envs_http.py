"""Environments of verifiers, which call the policy over HTTP, through `rlkit.compat.envs`.

Each runs with a stand-in, written after the source that it names, and (marked slow) with the package where installed.
"""

import asyncio
import json
import sys
import urllib.error
import urllib.request
from types import ModuleType, SimpleNamespace

import pytest
from foreign import BOTH, with_row
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.compat import envs
from rlkit.data.prompts import rl_prompts
from rlkit.rollout.groups import sample_group
from rlkit.rollout.limits import limited


def post(base_url, messages, tools=None):
    """The message that the policy's server answers with, asked without a client library."""
    data = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as reply:
        return json.loads(reply.read())["choices"][0]["message"]


def verifiers_stand_in(monkeypatch):
    """After envs/multiturn_env.py, rubrics/rubric.py and errors.py of verifiers 0.1.14."""

    class AsyncOpenAI:
        def __init__(self, *, base_url, **_):
            self.base_url = base_url

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    class Client:
        def __init__(self, client):
            self.client = client

        async def get_response(self, messages):
            try:
                answer = await asyncio.to_thread(post, self.client.base_url, messages)
            except urllib.error.HTTPError as error:
                raise (vf.OverlongPromptError if "context length" in error.read().decode() else vf.Error) from error
            return {"role": answer["role"], "content": answer["content"]}

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
            state = {**input, "completion": [], "error": None}
            for _ in range(self.max_turns):
                try:
                    said = await client.get_response(state["prompt"] + state["completion"])
                    state["completion"].append(said)
                    if said["content"] == "42":
                        break
                    state["completion"] += await self.env_response(state["completion"], state)
                except vf.OverlongPromptError:
                    break
                except vf.Error as error:
                    state["error"] = error
                    break
            return state

    vf = ModuleType("verifiers")
    vf.clients, vf.types, openai = (ModuleType(n) for n in ("verifiers.clients", "verifiers.types", "openai"))
    vf.Error = type("Error", (Exception,), {})
    vf.OverlongPromptError = type("OverlongPromptError", (vf.Error,), {})
    MultiTurnEnv.__module__ = "verifiers.envs.multiturn_env"
    vf.Rubric, vf.MultiTurnEnv, vf.clients.OpenAIChatCompletionsClient = Rubric, MultiTurnEnv, Client
    vf.types.UserMessage = lambda content: {"role": "user", "content": content}
    openai.AsyncOpenAI = AsyncOpenAI
    for module in (vf, vf.clients, vf.types, openai):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return vf, SimpleNamespace(from_list=list)


def verifiers_env(vf, Dataset):
    """Insist on 42; `boom` is an error of the environment."""
    from verifiers.types import UserMessage

    def text_of(message):
        return message["content"] if isinstance(message, dict) else message.content

    async def right(completion, answer):
        return float(text_of(completion[-1]) == answer)

    async def brief(completion, answer):
        return 0.5 if len(completion) < 4 else 0.0

    class Insist(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            if text_of(messages[-1]) == "boom":
                raise vf.Error("boom")
            return [UserMessage(content="No. Try again.")]

        if hasattr(vf, "stop"):

            @vf.stop
            async def is_right(self, state):
                return bool(state["trajectory"]) and text_of(state["trajectory"][-1]["completion"][-1]) == "42"

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "q"}], "answer": "42", "example_id": 0}])
    return Insist(dataset=data, rubric=vf.Rubric(funcs=[right, brief]), max_turns=3)


def verifiers_real():
    pytest.importorskip("verifiers.envs", reason="needs verifiers < 0.2")
    import verifiers as vf
    from datasets import Dataset

    return vf, Dataset


@BOTH
async def test_verifiers(real, monkeypatch):
    vf, Dataset = verifiers_real() if real else verifiers_stand_in(monkeypatch)
    tokenizer = tokenizer_with("chatml")

    def load_environment():
        return verifiers_env(vf, Dataset)

    rows = [dict(row) for row in load_environment().get_dataset()]
    (prompt,), _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99)
    for env in (envs.verifiers(load_environment(), tokenizer), envs.adapted(load_environment, tokenizer)):
        scripts = [Script(tokenizer, "7", "42"), Script(tokenizer, "1", "2", "3")]
        group = await sample_group(prompt, scripts, env=env)
        for t, script in zip(group, scripts, strict=True):
            check_exact([t], script.calls)
        assert [t.reward for t in group] == [1.5, 0.0]
        metrics = group[0].info["metrics"]
        assert (metrics["right"], metrics["brief"]) == (1.0, 0.5)
        assert tokenizer.decode(group[0].ids) == (
            "7<|im_end|>\n<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
        )
    (piece,) = await limited(env, max_turns=2)(prompt, Script(tokenizer, "1", "2"))
    assert (piece.truncated, piece.info["num_turns"]) == (True, 2)
    with pytest.raises(vf.Error, match="boom") as raised:
        await sample_group(prompt, [Script(tokenizer, "boom")], env=env)
    assert raised.value.__notes__ == ["in an episode of row 1"]


@pytest.mark.slow
async def test_verifiers_with_tools():
    """The policy is shown the tools of a `ToolEnv`, and its calls are run."""
    vf, Dataset = verifiers_real()
    tokenizer = tokenizer_with("qwen3")

    async def double(x: int) -> str:
        """Double a number.

        Args:
            x: the number
        """
        return str(2 * x)

    async def right(completion, answer):
        return float(completion[-1].content == answer)

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "2*21?"}], "answer": "42", "example_id": 0}])
    env = envs.verifiers(vf.ToolEnv(tools=[double], dataset=data, rubric=vf.Rubric(funcs=[right])), tokenizer)
    script = Script(tokenizer, '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>', "42")
    (piece,) = await env(rl_prompts([dict(data[0])], tokenizer=tokenizer, max_prompt_tokens=999)[0][0], script)
    check_exact([piece], script.calls)
    assert piece.reward == 1.0
    assert "Double a number." in tokenizer.decode(piece.prompt_ids)
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(piece.ids)


def verifiers_v1_stand_in(monkeypatch):
    """After v1/agent.py and v1/trace.py of verifiers 0.4.0."""

    class Agent:
        def __init__(self, config):
            self.config = config

        async def run(self, task):
            if task is None:
                errors = [SimpleNamespace(message="first"), SimpleNamespace(message="no task")]
                return SimpleNamespace(ok=False, errors=errors, stop_condition="error")
            messages = [{"role": "user", "content": task.question}]
            for _ in range(2):
                answer = await asyncio.to_thread(post, self.config.client.base_url, messages)
                messages += [answer, {"role": "user", "content": "sure?"}]
            retried = [SimpleNamespace(message="of an attempt that was made again")]
            reward, metrics = float(answer["content"] == task.answer), {"turns": 2.0, "unknown": None}
            return SimpleNamespace(ok=True, errors=retried, reward=reward, metrics=metrics)

    v1 = ModuleType("verifiers.v1")
    v1.Agent, v1.AgentConfig, v1.EvalClientConfig = Agent, SimpleNamespace, SimpleNamespace
    verifiers = ModuleType("verifiers")
    verifiers.v1 = v1
    monkeypatch.setitem(sys.modules, "verifiers", verifiers)
    monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
    return [SimpleNamespace(question="q", answer="42"), None], {}


def verifiers_v1_real(monkeypatch):
    pytest.importorskip("verifiers.v1.agent", reason="needs verifiers >= 0.2")
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

        async def launch(self, ctx, trace, _runtime, endpoint, secret, _urls, data, **_):
            import openai

            if data.prompt == "none":
                raise RuntimeError("no task")
            client, messages = openai.AsyncOpenAI(base_url=endpoint, api_key=secret), [{"role": "user", "content": "q"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [answer, {"role": "user", "content": "sure?"}]
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    config = NullHarnessConfig(id="null")
    monkeypatch.setattr(loaders, "load_harness", lambda _: InThisProcess(config))
    tasks = [Question(Data(prompt="q", answer="42")), Question(Data(prompt="none", answer="42"))]
    return tasks, {"harness": config, "runtime": vf.SubprocessConfig()}


@BOTH
async def test_verifiers_tasks(real, monkeypatch):
    tasks, config = (verifiers_v1_real if real else verifiers_v1_stand_in)(monkeypatch)
    tokenizer = tokenizer_with("chatml")
    env = envs.verifiers_tasks(tasks, tokenizer, config=config)
    scripts = [Script(tokenizer, "7", "42"), Script(tokenizer, "42", "7")]
    group = await sample_group(prompt_of(tokenizer, "q"), scripts, env=env)
    for t, script in zip(group, scripts, strict=True):
        check_exact([t], script.calls)
    assert [t.reward for t in group] == [1.0, 0.0]
    if not real:
        assert group[0].info["metrics"] == {"turns": 2.0, "agent/branches": 0, "agent/rerendered": 0}
    with pytest.raises(RuntimeError, match="no task") as raised:
        await sample_group(with_row(tokenizer, {"prompt": "q"}, index=1), [Script(tokenizer)], env=env)
    assert raised.value.__notes__ == ["in an episode of row 2"]
