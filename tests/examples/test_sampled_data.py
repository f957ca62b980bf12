"""What the GRPO scripts share: every keyword of the loops has a flag, and tools need no script of one's own."""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "rollout"))
import async_grpo
import grpo
import sampled_data as shared
import sampled_groups
import torch
from scripted import Script, check_exact, tokenizer_with

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo as loop
from rlkit.losses import cispo, gmpo, gspo, ppo_clip, sapo, seq_mean, token_mean
from rlkit.packing import pack, with_streams
from rlkit.types import Trajectory

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
    [(script, loop, {"staleness", "overlap", "drop_off_policy", "journal"}) for script in (grpo, async_grpo)],
)
def test_every_keyword_of_a_loop_is_set_by_a_flag(files, script, function, own):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    for part in (model, tokenizer):
        part.save_pretrained(files / "model")
    args = args_of(files, script.Args, output=files / "run", kl_coef=0.1, stop=("!",), seed=5)
    args.success_range, args.max_dropped = (0.1, 0.9), 3
    _, _, options = sampled_groups.prepared(args)
    assert {*options, *own, "model", "tokenizer", "engine"} == {*inspect.signature(function).parameters}
    assert options["max_dropped"] == 3
    assert options["params"].stop == ("!",)
    assert tokenizer.eos_token_id in options["params"].stop_token_ids
    assert options["reference"] is not None
    assert (files / "run" / "args.json").exists()


PAPERS = {  # with the constants of docs/recipes.md
    "ppo_clip": lambda x, a, seq: token_mean(seq["mask"]) * ppo_clip(x, a, clip_low=0.2, clip_high=0.28),
    "gspo": lambda x, a, seq: seq_mean(**seq) * gspo(x, a, clip_low=3e-4, clip_high=4e-4, **seq),
    "gmpo": lambda x, a, seq: seq_mean(**seq) * gmpo(x, a, clip_low=0.4, clip_high=0.4, **seq),
    "cispo": lambda x, a, seq: token_mean(seq["mask"]) * cispo(x, a, max_weight=5.0),
    "sapo": lambda x, a, seq: seq_mean(**seq) * sapo(x, a, tau_pos=1.0, tau_neg=1.05),
}


@pytest.mark.parametrize("loss", PAPERS)
def test_a_loss_of_the_command_line_is_that_of_its_paper(files, loss):
    rows = [Trajectory([5], [6] * n, [True] * n, [-1.0] * n, [0] * n) for n in (1, 4, 2, 6)]
    noise = torch.randn(2, 13, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0]).repeat_interleave(torch.tensor([1, 4, 2, 6]))
    batch = with_streams(pack([rows[:2], rows[2:]]), old_logp=noise[0] - 2, advantages=advantages)
    logp = batch.old_logp + 0.3 * noise[1]

    def value(**flags):
        options = sampled_groups.loss_of(args_of(files, grpo.Args, loss=loss, **flags))
        return (options["aggregate"](batch) * options["surrogate"](logp - batch.old_logp, batch)).sum().item()

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
        (prompt,), _ = shared.load_prompts(args_of(files, template_args=given), tokenizer)
        texts.append(tokenizer.decode(prompt.ids))
    assert "<think>" not in texts[0]
    assert texts[1].endswith("<think>\n\n</think>\n\n")


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ref_sync_steps": 3}, "--ref-sync-steps moves the reference of --kl-coef"),
        ({"eval_kl": True}, "--eval-kl is measured on --eval-data"),
        ({"max_turns": 3}, "--max-turns is for --env or --tools"),
        ({"max_sampled_tokens": 3}, "--max-sampled-tokens is of many turns"),
        ({"tool_calls": "json"}, "--tool-calls is how calls of --tools are read"),
        ({"tool_calls": "json", "tools": ("a:b",), "env": "a:b"}, "where there is no --env"),
        ({"correction": "icepop", "tis_max_weight": 3.0}, "--tis-max-weight is of --correction tis"),
        ({"max_dropped": 3}, "--max-dropped is a limit on --success-range"),
        ({"drop_off_policy": True}, "--drop-off-policy is for --staleness above 0"),
        ({"minibatches": 9}, "--minibatches 9 is more than the 8 groups of --prompts-per-step"),
        ({"loss": "cispo", "clip_high": 4.0}, "--clip-low and --clip-high are not part of cispo"),
        ({"eval_samples": 4}, "--eval-samples are of --eval-data"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
    ],
)
def test_flags_without_effect_are_refused_before_anything_runs(files, flags, message):
    with pytest.raises(ValueError, match=message):
        shared.prepared(args_of(files, grpo.Args, output=files / "run", **flags))
    assert not (files / "run").exists()


def test_flags_that_go_together_are_not_refused(files):
    tools = {"tools": ("a:b",), "tool_calls": "json", "max_turns": 3, "max_sampled_tokens": 9}
    reference = {"ref_sync_steps": 3, "eval_kl": True, "eval_data": "x", "reference": "y"}
    dropped = {"max_dropped": 3, "success_range": (0.1, 0.9), "staleness": 0.5, "drop_off_policy": True}
    shared.check_flags(args_of(files, grpo.Args, minibatches=8, **tools, **reference, **dropped))


def test_lengths_fit_the_model_and_a_micro_batch(files):
    (prompt,) = [Prompt([1] * 30, {}, 0)]
    config = SimpleNamespace(max_position_embeddings=512)
    for flags, message in [
        ({}, r"--max-prompt-tokens \+ --max-new-tokens is 2048, and the model has 512 positions"),
        ({"max_total_tokens": 600}, "--max-total-tokens is 600, and"),
        (
            {"max_total_tokens": 500, "max_new_tokens": 90, "max_tokens": 119},
            "may have 120 tokens, and --max-tokens 119",
        ),
        ({"max_total_tokens": 500, "max_tokens": 499, "tools": ("a:b",)}, "may have 500 tokens, and --max-tokens 499"),
    ]:
        with pytest.raises(ValueError, match=message):
            shared.check_lengths(args_of(files, **flags), [prompt], config)
    fits = args_of(files, max_total_tokens=500, max_new_tokens=90, max_tokens=120)
    shared.check_lengths(fits, [prompt], config)
    shared.check_lengths(args_of(files), [prompt], SimpleNamespace())


def test_a_prompt_without_room_for_an_answer_is_dropped(files):
    (files / "data.jsonl").write_text('{"prompt": "12345"}\n{"prompt": "123456"}\n')
    length = 5 + 8  # bytes, and the turn around them
    prompts, _ = shared.load_prompts(args_of(files, max_total_tokens=length + 1), tiny_tokenizer())
    assert [p.row["prompt"] for p in prompts] == ["12345"]
