"""What the scripts of reinforcement learning share: tasks, environments and losses from flags."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
import torch
from scripted import Script, check_exact, tokenizer_with

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.data.turns import PROMPT
from rlkit.losses import cispo, dual_clip, gmpo, gspo, ppo_clip, sapo, seq_mean, token_mean
from rlkit.packing import pack, with_streams
from rlkit.scripts.args import Data, Episodes, Evaluation, Model
from rlkit.scripts.grpo import CONSTANTS, Args, Loss, keep_group, policy_loss
from rlkit.scripts.start import open_place
from rlkit.scripts.task import bring, check_lengths, engine_of, load_models, make_task, read_env, render
from rlkit.scripts.trial import read_reward
from rlkit.settings import Optim, Penalties, Rollouts, Schedule
from rlkit.types import Completion, Trajectory

TOOLS = '''
def weather(city: str) -> str:
    """Look the weather up.

    Args:
        city: its name
    """
    if city == "Atlantis":
        raise TimeoutError("the service is down")
    return f"rain in {city}"


def score(completion, row, num_calls=0, num_failed_calls=0):
    return {"reward": float(row["answer"] in completion), "calls": num_calls, "failed_calls": num_failed_calls}
'''


@pytest.fixture
def files(tmp_path):
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "data.jsonl").write_text('{"prompt": "Weather in Paris?", "answer": "rain"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


def args_of(files, **changes):
    """The flags of `rlkit grpo`; each of the `changes` is a field of one of the settings."""
    given = {"model": str(files / "model"), "data": str(files / "data.jsonl"), "reward": f"{files / 'mine.py'}:score"}
    given |= {"output": files / "run", "steps": 2, **changes}
    kinds = {"model": Model, "data": Data, "episodes": Episodes, "rollouts": Rollouts, "schedule": Schedule}
    kinds |= {"optim": Optim, "penalties": Penalties, "loss": Loss}
    made = {
        name: kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.name in given})
        for name, kind in kinds.items()
    }
    assert not given
    return Args(**made)


def opened(args, **options):
    brought = bring(args)
    place = open_place(args, brought)
    return place, make_task(args, brought, place, **options)


def env_of(args):
    return read_env(args.episodes, args.data, args.rollouts, output=args.schedule.output)


def prompts_of(args, tokenizer):
    return render(args, tokenizer, None, args.data.rows(PROMPT)[0][0])


def test_flags_reach_the_task_and_the_rollouts(files):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    for part in (model, tokenizer):
        part.save_pretrained(files / "model")
    args = args_of(files, kl_coef=0.1, stop=("!",), stop_token_ids=(7,), success_range=(0.1, 0.9), device="cpu")
    place, task = opened(args, keep_group=keep_group(args.loss))
    _, reference, rollouts = load_models(args, place)
    assert rollouts.params.stop == ("!",)
    assert {7, tokenizer.eos_token_id} <= {*rollouts.params.stop_token_ids}
    assert reference is not None
    assert len(task.prompts) == 1
    rewards = [Trajectory([1], [2], [True], [0.0], [0], reward=float(x)) for x in (0, 1)]
    assert task.keep_group(rewards)
    assert not task.keep_group(rewards[:1])
    assert (files / "run" / "args.json").exists()


PAPERS = {  # with the constants of docs/recipes.md
    "ppo_clip": lambda x, a, seq: token_mean(seq["mask"]) * ppo_clip(x, a, clip_low=0.2, clip_high=0.28),
    "gspo": lambda x, a, seq: seq_mean(**seq) * gspo(x, a, clip_low=3e-4, clip_high=4e-4, **seq),
    "gmpo": lambda x, a, seq: seq_mean(**seq) * gmpo(x, a, clip_low=0.4, clip_high=0.4, **seq),
    "dual_clip": lambda x, a, seq: token_mean(seq["mask"]) * dual_clip(x, a, clip_low=0.2, clip_high=0.28, clip_c=3.0),
    "cispo": lambda x, a, seq: token_mean(seq["mask"]) * cispo(x, a, max_weight=5.0),
    "sapo": lambda x, a, seq: seq_mean(**seq) * sapo(x, a, tau_pos=1.0, tau_neg=1.05),
}


@pytest.mark.parametrize("loss", CONSTANTS)
def test_a_loss_of_the_command_line_equals_that_of_its_paper(loss):
    rows = [Trajectory([5], [6] * n, [True] * n, [-1.0] * n, [0] * n) for n in (1, 4, 2, 6)]
    noise = torch.randn(2, 13, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0]).repeat_interleave(torch.tensor([1, 4, 2, 6]))
    batch = with_streams(pack([rows[:2], rows[2:]]), old_logp=noise[0] - 2, advantages=advantages)
    logp = batch.old_logp + 0.3 * noise[1]

    def value(**flags):
        found = policy_loss(Args(Model("m"), Data("d"), Episodes(reward="a:b"), loss=Loss(loss=loss, **flags)), None)
        return (found.aggregate(batch) * found.surrogate(logp - batch.old_logp, batch)).sum().item()

    seq = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    paper = PAPERS[loss](logp - batch.old_logp, batch.advantages, seq).sum().item()
    assert value() == pytest.approx(paper, rel=1e-5)
    assert len({round(value(aggregate=mean), 6) for mean in ("token", "episode", "prompt", "length")}) == 4
    if loss in ("ppo_clip", "gspo", "gmpo"):
        assert abs(value(clip_low=0.9, clip_high=9.0) - value()) > 1e-3


def test_template_arguments_reach_the_prompts(files):
    tokenizer = tokenizer_with("qwen3")
    texts = []
    for given in ("{}", '{"enable_thinking": false}'):
        (prompt,) = prompts_of(args_of(files, template_args=given), tokenizer)
        texts.append(tokenizer.decode(prompt.ids))
    assert "<think>" not in texts[0]
    assert texts[1].endswith("<think>\n\n</think>\n\n")


async def test_tools_of_the_command_line_are_shown_called_and_may_fail(files):
    tokenizer = tokenizer_with("qwen3")
    args = args_of(files, tools=(f"{files / 'mine.py'}:weather",), max_sampled_tokens=300, max_turns=5)
    (prompt,) = prompts_of(args, tokenizer)
    assert "Look the weather up." in tokenizer.decode(prompt.ids)
    env, score = env_of(args)(tokenizer), read_reward(args.episodes)(tokenizer)
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


async def test_tools_go_on_from_a_summary_where_the_context_is_full(files):
    tokenizer = tokenizer_with("qwen3")
    flags = {"tools": (f"{files / 'mine.py'}:weather",), "max_new_tokens": 100, "max_turns": 5}
    args = args_of(files, **flags, compact_at=1000, max_total_tokens=1300)
    (prompt,) = prompts_of(args, tokenizer)
    env, score = env_of(args)(tokenizer), read_reward(args.episodes)(tokenizer)
    ask = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
    script = Script(tokenizer, ask.format("Paris"), ask.format("Rome"), "Paris: wet", "There is rain.")
    pieces = await env(prompt, script)
    check_exact(pieces, script.calls)
    read = tokenizer.decode(script.calls[-1][0])
    assert "which has been cleared:\nParis: wet<|im_end|>" in read
    assert "rain in Rome" in read  # the last call with its result
    assert "rain in Paris" not in read
    (end,) = await score(prompt, pieces[-1:])
    assert end.reward == 1.0
    assert end.info["metrics"] == {"compactions": 1, "calls": 2.0, "failed_calls": 0.0}


def test_a_compaction_that_cannot_act_is_refused(files):
    for flags, message in [
        ({"tools": ("a:b",), "compact_at": 200}, "`compact_at` 200 must be above 200, two times `max_new_tokens`"),
        ({"tools": ("a:b",), "compact_at": 2000}, "and at most 1124, the context of `max_total_tokens`"),
        ({"compact_at": 500}, "`compact_at` requires `env` or `tools`"),
        ({"agent": "x", "compact_at": 500}, "`compact_at` requires .*: an agent compacts its conversations itself"),
    ]:
        with pytest.raises(ValueError, match=message):
            env_of(args_of(files, max_new_tokens=100, **flags))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("async def env(args, sample, sampling_params): pass", "an async function must take (prompt, sample)"),
        ("def env(tokenizer): return None", "must return `async def env(prompt, sample)`, got NoneType"),
        (
            "def env(task):\n    class Game:\n        reset = step = print\n    return Game()",
            "got Game; a function that makes such objects has one argument with the name prompt",
        ),
    ],
)
def test_what_is_no_environment_is_refused(files, code, message):
    (files / "game.py").write_text(code)
    with pytest.raises(ValueError, match=f"^`env` .*game.py:env: .*{re.escape(message)}"):
        env_of(args_of(files, env=f"{files / 'game.py'}:env"))(tiny_tokenizer())


@pytest.mark.slow
def test_a_wrong_environment_is_refused_before_torch_is_loaded(files):
    (files / "game.py").write_text("class Interaction: pass\n")
    flags = ["--model", "none", "--data", files / "data.jsonl", "--env", f"{files / 'game.py'}:Interaction"]
    code = (
        "import sys\nfrom rlkit.scripts import cli, grpo\ntry:\n    cli.run(grpo.main, grpo.Args, None)\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, flags)], check=True, capture_output=True, text=True
    )  # fmt: skip
    assert re.fullmatch(r"error: --env .*game.py:Interaction: the class Interaction has no reset .*\n", done.stderr)


@pytest.mark.slow_cases("row0-flags0-1")
@pytest.mark.parametrize(
    ("row", "flags", "num"),
    [
        ({"prompt": "hi", "answer": "x"}, {}, 1),
        ({"question": "hi", "answer": "x"}, {}, 1),
        ({"prompt": [{"role": "user", "content": "hi"}], "answer": "x"}, {}, 0),
        ({"prompt": "hi", "answer": "x"}, {"chat_template": False}, 0),
    ],
)
def test_string_prompts_are_reported_once(files, caplog, row, flags, num):
    (files / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(files / "model")
    tiny_model(tokenizer).config.save_pretrained(files / "model")
    args = args_of(files, eval_data=str(files / "data.jsonl"), device="cpu", **flags)
    opened(args)
    assert sum("string prompts are one user message" in line for line in caplog.messages) == num


def test_roles_that_plain_text_leaves_out_are_reported(files, caplog):
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    (files / "data.jsonl").write_text(f"{json.dumps({'prompt': turns, 'answer': 'x'})}\n" * 3)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(files / "model")
    tiny_model(tokenizer).config.save_pretrained(files / "model")
    opened(args_of(files, device="cpu", chat_template=False))
    assert caplog.messages.count("--no-chat-template joins messages as plain text, without roles") == 1


def test_answers_of_every_set_end_where_those_of_training_do(files):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # and the template ends turns with <|im_end|>
    tokenizer.save_pretrained(files / "model")
    tiny_model(tokenizer).save_pretrained(files / "model")
    args = args_of(files, eval_data=(f"a={files / 'data.jsonl'}",), device="cpu", stop_token_ids=(7,), eval_steps=1)
    args = replace(args, evaluation=Evaluation(eval_sampling=("a=temperature:0.5",)))
    place, task = opened(args)
    *_, rollouts = load_models(args, place)
    ends = {*task.held_out["a"].params.stop_token_ids}
    assert ends == {*rollouts.stop_token_ids}
    assert {7, tokenizer.convert_tokens_to_ids("<|im_end|>")} < ends


def test_the_engine_has_room_for_the_longest_answers_of_any_set(files):
    args = args_of(files)
    evaluation = Evaluation(eval_sampling=("a=max_new_tokens:4000", "b=max_new_tokens:9", "c=temperature:0.5"))
    lengths = [engine_of(replace(args, evaluation=x), args.model, files).max_len for x in (Evaluation(), evaluation)]
    assert lengths == [2048, 1024 + 4000]


def test_lengths_fit_the_model_and_a_micro_batch(files):
    (prompt,) = [Prompt([1] * 30, {}, 0)]
    config = SimpleNamespace(max_position_embeddings=512)

    def check(args):
        check_lengths(args, [prompt], config, max_tokens=args.optim.max_tokens)

    for flags, message in [
        ({}, r"`max_prompt_tokens` \+ `max_new_tokens` is 2048, and the model has 512 positions"),
        ({"max_total_tokens": 600}, "`max_total_tokens` is 600, and"),
        (
            {"max_total_tokens": 500, "max_new_tokens": 90, "max_tokens": 119},
            "may have 120 tokens, and a micro-batch holds `max_tokens` 119",
        ),
        (
            {"max_total_tokens": 500, "max_tokens": 499, "tools": ("a:b",)},
            "may have 500 tokens, and a micro-batch holds `max_tokens` 499",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            check(args_of(files, **flags))
    short = args_of(files, max_prompt_tokens=100, max_new_tokens=90)
    check(short)
    with pytest.raises(ValueError, match=r"`max_prompt_tokens` \+ `max_new_tokens` of `eval_sampling` is 700, and"):
        check(replace(short, evaluation=Evaluation(eval_sampling=("a=max_new_tokens:600",))))
    check(args_of(files, max_total_tokens=500, max_new_tokens=90, max_tokens=120))
    config = SimpleNamespace()
    check(args_of(files))


def test_a_prompt_without_room_for_an_answer_is_dropped(files):
    (files / "data.jsonl").write_text('{"prompt": "12345"}\n{"prompt": "123456"}\n')
    length = 5 + 8  # bytes, and the turn around them
    prompts = prompts_of(args_of(files, max_total_tokens=length + 1), tiny_tokenizer())
    assert [p.row["prompt"] for p in prompts] == ["12345"]


@pytest.mark.parametrize(("total", "room"), [(10, 4), (None, None)])
def test_an_answer_ends_at_the_context_of_the_flag_with_any_engine(tmp_path, total, room):
    asked = []

    async def sample(prompt_ids, **more):
        asked.append(more.get("max_new_tokens"))
        return Completion([1, 2], [-1.0, -1.0], [0, 0], "length")

    episodes = Episodes(reward="a.py:f", max_total_tokens=total)
    env = read_env(episodes, Data("rows.jsonl"), Rollouts(max_new_tokens=8), output=tmp_path)(None)
    assert asyncio.run(env(Prompt([5] * 6, {}, 0), sample)).ids == [1, 2]
    assert asked == [room]
