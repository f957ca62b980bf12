"""SmolLM2-135M-Instruct: the packed forward, the embedded engine, training and the exported model agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit import LocalEngine, Policy, Prompt, SamplingParams, load_model, pack
from rlkit.rollout import rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ASKED = ["What is the capital of France?", "Name a colour.", "What is 2 + 3?", "Write a short poem about the sea."]
ROWS = [{"prompt": f"Say {word}.", "response": word, "word": word} for word in ("tea", "milk", "bread", "salt")] * 4
REWARD = "def said(completion, row):\n    return float(row['word'] in completion.lower()) - len(completion) / 1000\n"


def rendered(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def logits_after(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """transformers' own logits [len(ids), V] of the positions that chose `ids`, without packing or a cache."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()


async def test_engine_and_packed_forward_give_the_log_probs_of_transformers(smollm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model, reference = load_model(smollm), AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    prompts = [Prompt(rendered(tokenizer, text), {}, i) for i, text in enumerate(ASKED)]
    params = SamplingParams(max_new_tokens=24)
    engine = LocalEngine(model)
    groups = await rollout(prompts, generate=engine.generate, params=params, group_size=3, seed=0)
    batch = pack(groups)
    with torch.no_grad():
        packed = Policy(model)(batch).logp
    expected = []
    for trajectory in (t for group in groups for t in group):
        logp = logits_after(reference, trajectory.prompt_ids, trajectory.ids).log_softmax(-1)
        expected.append(logp.gather(-1, torch.tensor(trajectory.ids)[:, None])[:, 0])
    expected = torch.cat(expected)
    torch.testing.assert_close(packed[batch.mask].double(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(batch.rollout_logp[batch.mask].double(), expected, atol=2e-4, rtol=0)


async def test_greedy_answers_are_those_of_generate(smollm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    reference = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    engine = LocalEngine(load_model(smollm))
    for text in ASKED:
        ids = rendered(tokenizer, text)
        ours = await engine.generate(ids, params=SamplingParams(max_new_tokens=24, temperature=0.0))
        with torch.inference_mode():
            theirs = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        assert ours.ids == theirs, tokenizer.decode(ours.ids)


def test_sft_and_grpo_train_it_and_the_exported_model_answers_as_the_run_did(smollm: Path, tmp_path: Path) -> None:
    """Three steps each by the commands; the evaluation after the last step is repeated with the exported model."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "reward.py").write_text(REWARD)
    common = ["--data", tmp_path / "rows.jsonl", "--steps", "3", "--lr", "2e-5"]
    rlkit("sft", "--model", smollm, *common, "--batch-size", "4", "--warmup-steps", "0", "--output", tmp_path / "sft")
    losses = [line["loss"] for line in lines_of(tmp_path / "sft")]
    assert losses[-1] < losses[0]
    rollouts = ["--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "12", "--eval-limit", "4"]
    tested = ["--reward", f"{tmp_path / 'reward.py'}:said", "--eval-data", tmp_path / "rows.jsonl", "--eval-steps", "3"]
    rlkit("grpo", "--model", tmp_path / "sft/model", *common, *rollouts, *tested, "--output", tmp_path / "grpo")
    assert max(line.get("mismatch/abs_max", 0.0) for line in lines_of(tmp_path / "grpo")) < 1e-3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "grpo/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "grpo/model")
    answers = (tmp_path / "grpo/trajectories/eval_greedy_000003.jsonl").read_text().splitlines()
    assert len(answers) == 4
    for answer in map(json.loads, answers):
        prompt = tokenizer.encode(answer["prompt"], add_special_tokens=False)
        ids = tokenizer.encode(answer["completion"], add_special_tokens=False)
        logits = logits_after(exported, prompt, ids)
        chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert ids, answer
        assert (logits.max(-1).values - chosen).max() < 1e-2, answer["completion"]


def rlkit(*args: Any) -> None:
    subprocess.run([sys.executable, "-m", "rlkit", *map(str, args)], check=True)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "grad_norm" in line]
