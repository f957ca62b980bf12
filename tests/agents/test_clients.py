"""Clients from the package index, unchanged: what they say and read is token-exact in the episode."""

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_environment import cache_folder
from PIL import Image
from scripted import Script, check_tree, prompt_of, tokenizer_with
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.agents.command import command
from rlkit.agents.endpoint import agent_env
from rlkit.agents.server import tls_of
from rlkit.data.images import ImageReader
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_vision_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.rollout import rollout
from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import SamplingParams

ROOT, PROGRAMS = Path(__file__).parents[2], Path(__file__).parent / "programs"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'


def python_with(*packages):
    """A Python that has the packages: this one, or that of `make agents`."""
    if all(map(find_spec, packages)):
        return sys.executable
    made = cache_folder(ROOT / "tools" / "agents", "agents") / "bin" / "python"
    if not made.exists():
        pytest.skip(f"without {' and '.join(packages)}: `make agents` installs them")
    return str(made)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Working folders of commands go to the test's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


async def episode(line, *turns, tmp_path, **options):
    """The pieces of one episode of a command, checked against what was sampled."""
    tokenizer = tokenizer_with("qwen3")
    script = Script(tokenizer, *turns)
    env = agent_env(command(line, logs=tmp_path, timeout_s=100, **options), tokenizer=tokenizer)
    pieces = await env(prompt_of(tokenizer, "What is 5 + 3?"), script)
    check_tree(pieces, script.calls)
    assert script.turns == []
    return pieces, script


async def test_openai_chat_completions(tmp_path):
    said = "I add.\n" + ADD
    pieces, script = await episode(
        f"{python_with('openai')} {PROGRAMS / 'openai_chat.py'}", *[said, "8"] * 2, said, "no", "8", tmp_path=tmp_path
    )
    assert pieces[-1].reward == 1.0
    assert [sum(p.mask) for p in pieces] == [sum(len(script.calls[i][1].ids) for i in turns) for turns in _SHARES]


_SHARES = ((0, 1), (2, 3), (4, 5), (6,))  # the turns of each piece: the last choice of two is a branch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "package"),
    [("openai_responses", "openai"), ("anthropic_messages", "anthropic")],
)
async def test_other_formats(program, package, tmp_path):
    """Three conversations of two turns, each continued token by token."""
    turns = ["I add.\n" + ADD, "8"] * 3
    line = f"{python_with(package)} {PROGRAMS / program}.py"
    pieces, _ = await episode(line, *turns, tmp_path=tmp_path)
    assert pieces[-1].reward == 1.0
    assert pieces[-1].info["metrics"] == {"agent/branches": 2, "agent/rerendered": 0}


@pytest.mark.slow
def test_images_of_the_clients_over_tls(certificate, tmp_path):
    """Each image is shown in every context that holds it; the two conversations of OpenAI and that of Anthropic are
    the same one, sampled three times."""
    tiny_vision_model(tmp_path / "model", hidden=16, layers=1)
    tokenizer = load_tokenizer(tmp_path / "model")
    reader = ImageReader(str(tmp_path / "model"), tokenizer, load_config(tmp_path / "model"))
    shown = [Image.fromarray(np.full((16, 16, 3), 9 * i, np.uint8)) for i in (1, 2)]
    prompts, _ = rl_prompts(
        [{"prompt": "<image>and<image>", "images": shown}], tokenizer=tokenizer, max_prompt_tokens=99, images=reader
    )
    line = f"env SSL_CERT_FILE={certificate} {python_with('openai', 'anthropic')} {PROGRAMS / 'images.py'}"
    tls = tls_of(certificate, certificate.with_name("key.pem"))
    env = agent_env(command(line, logs=tmp_path, timeout_s=100), tokenizer=tokenizer, tls=tls)
    script = Script(tokenizer, *["one", "two"] * 3)
    pieces = asyncio.run(env(prompts[0], script))
    check_tree(pieces, script.calls)
    first, later = prompts[0].images
    assert script.images == [[first], [first, later]] * 3
    assert [(t.images, t.later_images) for t in pieces] == [((first,), (later,))] * 3
    assert pieces[-1].reward == 1.0
    assert pieces[-1].info["metrics"] == {"agent/branches": 2, "agent/rerendered": 0}


async def test_the_example(tmp_path):
    """`examples/http_agent.py` calculates what the policy calls for."""
    said = "".join(f'<tool_call>{{"name": "calc", "arguments": {{"x": "{x}"}}}}</tool_call>' for x in ("5+3", "2**9"))
    line = f"{sys.executable} -S {ROOT / 'examples' / 'http_agent.py'} {{prompt}}"
    pieces, script = await episode(line, said, "8", tmp_path=tmp_path, needs_reward=False)
    read = tokenizer_with("qwen3").decode(script.calls[1][0])
    assert "<tool_response>\n8\n</tool_response>" in read
    assert "Error: only whole numbers" in read
    assert (len(pieces), (tmp_path / pieces[-1].info["log"]).read_text()) == (1, "8\n")


def calls(*made):
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in made)


@pytest.mark.slow
async def test_smolagents(tmp_path):
    """It puts each call into the history as a text of its own, so each turn is a branch, and that is counted."""
    turns = [
        "I add.\n" + calls(("add", {"a": 5, "b": 3})), calls(("add", {"a": 5, "b": 3}), ("add", {"a": 1, "b": 3})),
        calls(("final_answer", {"answer": "8"})),
        "Thought: I add.\n<code>\nprint(add(a=5, b=3))\n</code>", "<code>\nfinal_answer(8)\n</code>",
    ]  # fmt: skip
    line = f"{python_with('smolagents')} {PROGRAMS / 'smol.py'}"
    pieces, _ = await episode(line, *turns, tmp_path=tmp_path)
    assert (pieces[-1].reward, pieces[-1].info["answers"]) == (1.0, ["8", "8"])
    assert pieces[-1].info["metrics"] == {"agent/branches": 4, "agent/rerendered": 3, "agent/unmet": 0}  # tool_choice


@pytest.mark.slow
async def test_mini_swe_agent(tmp_path):
    """A coding agent of the command line. It drops a turn without a call from its history: the next one branches."""
    turns = [
        "I write it.\n" + calls(("bash", {"command": "echo hello > x"})), "no call",
        "Look.\n" + calls(("bash", {"command": "cat x"}), ("bash", {"command": "ls"})),
        calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    ]  # fmt: skip
    python = python_with("minisweagent")
    settings = "env MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors"
    line = f"{settings} {python} -m minisweagent -m openai/policy -t {{prompt}} -y --exit-immediately -o traj.json"
    pieces, script = await episode(line, *turns, tmp_path=tmp_path, needs_reward=False)
    assert pieces[-1].info["metrics"] == {"agent/branches": 1, "agent/rerendered": 0}
    lengths = [len(out.ids) for _, out in script.calls]
    assert [sum(p.mask) for p in pieces] == [lengths[0] + lengths[1], lengths[2] + lengths[3]]
    assert (Path(pieces[-1].info["folder"]) / "x").read_text() == "hello\n"


@pytest.mark.slow
def test_a_program_with_smollm2_is_exact(smollm, tmp_path):
    """The log-probs of all three turns, sampled at different times, are those of one forward over the episode."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm), AutoTokenizer.from_pretrained(smollm)
    rows = [{"prompt": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in (2, 40)]
    prompts, _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=100)
    agent = command(f"{python_with('openai')} {PROGRAMS / 'three_turns.py'}", logs=tmp_path, timeout_s=300)

    async def sampled():
        async with LocalEngine(model, max_len=512, tokenizer=tokenizer, keep_turns=True) as engine:
            return await rollout(
                prompts, generate=engine.generate, params=SamplingParams(max_new_tokens=40), group_size=2, seed=0,
                env=agent_env(agent, tokenizer=tokenizer),
            )  # fmt: skip

    for t in [t for group in asyncio.run(sampled()) for t in group]:
        assert t.info["metrics"] == {"agent/branches": 0, "agent/rerendered": 0}
        assert (t.info["num_turns"], sum(t.mask) > 30) == (3, True)
        ids = torch.tensor([[*t.prompt_ids, *t.ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].float()
        truth = logits.log_softmax(-1).gather(1, torch.tensor(t.ids)[:, None])[:, 0]
        mask = torch.tensor(t.mask)
        assert (truth - torch.tensor(t.logp))[mask].abs().max() < 1e-4
