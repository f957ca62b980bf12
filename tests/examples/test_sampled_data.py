"""What the GRPO scripts share: every keyword of the loops has a flag, and tools need no script of one's own."""

import inspect
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "rollout"))
import async_grpo
import grpo
import sampled_data as shared
from scripted import Script, check_exact, tokenizer_with

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.async_grpo import async_grpo as async_loop
from rlkit.loops.grpo import grpo as loop

TOOLS = '''
def weather(city: str) -> str:
    """Look the weather up.

    Args:
        city: its name
    """
    if city == "Atlantis":
        raise TimeoutError("the service is down")
    return f"rain in {city}"


def score(completion, row, num_calls, num_failed_calls):
    return {"reward": float(row["answer"] in completion), "calls": num_calls, "failed_calls": num_failed_calls}
'''


@pytest.fixture
def files(tmp_path):
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "data.jsonl").write_text('{"prompt": "Weather in Paris?", "answer": "rain"}\n')
    return tmp_path


def args_of(files, kind=shared.Args, **changes):
    options = {"model": str(files / "model"), "data": str(files / "data.jsonl"), "reward": f"{files / 'mine.py'}:score"}
    return kind(**options | changes)


@pytest.mark.parametrize(
    ("script", "function", "own"),
    [(grpo, loop, {"staleness", "drop_off_policy", "journal"}), (async_grpo, async_loop, {"staleness"})],
)
def test_every_keyword_of_a_loop_is_set_by_a_flag(files, script, function, own):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    for part in (model, tokenizer):
        part.save_pretrained(files / "model")
    args = args_of(files, script.Args, output=files / "run", kl_coef=0.1, stop=("!",), max_dropped=3, seed=5)
    _, _, options = shared.prepared(args)
    options |= shared.group_options(args)
    assert {*options, *own, "model", "tokenizer", "engine"} == {*inspect.signature(function).parameters}
    assert options["max_dropped"] == 3
    assert options["params"].stop == ("!",)
    assert tokenizer.eos_token_id in options["params"].stop_token_ids
    assert options["reference"] is not None
    assert (files / "run" / "args.json").exists()


async def test_tools_of_the_command_line_are_shown_called_and_may_fail(files):
    tokenizer = tokenizer_with("qwen3")
    args = args_of(files, tools=(f"{files / 'mine.py'}:weather",), max_sampled_tokens=300, max_turns=5)
    (prompt,), _ = shared.load_prompts(args, tokenizer)
    assert "Look the weather up." in tokenizer.decode(prompt.ids)
    env, score = shared.environment(args, tokenizer)
    ask = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
    script = Script(tokenizer, ask.format("Atlantis"), ask.format("Paris"), "There is rain.")
    pieces = await env(prompt, script)
    check_exact(pieces, script.calls)
    read = tokenizer.decode(script.calls[-1][0])
    assert "Error: TimeoutError: the service is down" in read
    assert "rain in Paris" in read
    (end,) = await score(prompt, pieces[-1:])
    assert end.reward == 1.0
    assert end.info["metrics"] == {"calls": 2.0, "failed_calls": 1.0}


def test_something_has_to_judge(files):
    with pytest.raises(ValueError, match="--reward, --env or both"):
        shared.environment(args_of(files, reward=None), tiny_tokenizer())
