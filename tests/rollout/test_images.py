"""Rollouts after prompts with images: several turns, log-probs of the packed forward, and no placeholder sampled."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlkit.data.images import ImageReader
from rlkit.data.prompts import Prompt, rl_prompts
from rlkit.data.tiny import tiny_vision_model
from rlkit.model.forward import forward, load_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.packing import pack
from rlkit.rollout import rollout
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.servers.api import ServerLimits
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.rollout.engines.vllm.api import VLLMApi
from rlkit.rollout.envs.chat import Chat
from rlkit.types import SamplingParams

STOPS = tuple(range(128))  # so that most turns of a random model end


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Any, Any, list[Prompt]]:
    """A model, its tokenizer, and two prompts with images and one without."""
    folder, draw = tmp_path_factory.mktemp("task"), np.random.default_rng(0)
    tiny_vision_model(folder, hidden=32, layers=2)
    for name, width in (("a", 24), ("b", 16)):
        Image.fromarray(draw.integers(0, 256, (16, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    rows = [{"prompt": "Hi", "images": [str(folder / f"{name}.png") for name in names]} for names in ("ab", "b", "")]
    tokenizer = load_tokenizer(folder)
    reader = ImageReader(str(folder), tokenizer, load_config(folder))
    prompts, _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99, images=reader)
    return load_model(folder), tokenizer, prompts


@pytest.mark.slow
async def test_the_images_of_a_prompt_stay_through_all_turns(task: tuple[Any, Any, list[Prompt]]) -> None:
    model, tokenizer, prompts = task

    async def env(prompt: Prompt, sample: Any) -> Any:
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for _ in chat:
            if len(chat.messages) > 5:
                break
            chat.add("again")
        return chat.end(reward=1.0)

    async with LocalEngine(model, tokenizer=tokenizer, max_batch=4, max_len=512, keep_turns=True) as engine:
        params = SamplingParams(max_new_tokens=12, stop_token_ids=STOPS)
        groups = await rollout(prompts, generate=engine.generate, params=params, group_size=4, seed=0, env=env)
    assert sum(t.info["num_turns"] for group in groups for t in group) > 20
    batch = pack(groups)
    assert [len(x) for x in batch.images or ()] == [2, 1, 0, *[0] * 12]
    assert (forward(model, batch).logp - batch.rollout_logp)[batch.mask].abs().max() < 1e-4


@pytest.mark.slow
async def test_a_placeholder_is_never_sampled(task: tuple[Any, Any, list[Prompt]]) -> None:
    """Of a random model each token has a chance of 1 in 267."""
    model, _, prompts = task
    async with LocalEngine(model, max_batch=8, max_len=512, eos_token_ids=()) as engine:
        for temperature in (1.0, 0.0):
            params = SamplingParams(max_new_tokens=300, temperature=temperature)
            size = 8 if temperature else 1
            groups = await rollout(prompts[:1], generate=engine.generate, params=params, group_size=size, seed=0)
            ids = {i for group in groups for t in group for i in t.ids}
            assert not ids & {model.config.image_token_id, model.config.video_token_id}


@pytest.mark.slow
@pytest.mark.parametrize("api", [SGLangApi(), VLLMApi()])
def test_a_server_is_sent_one_placeholder_an_image(api: Any, task: tuple[Any, Any, list[Prompt]]) -> None:
    """It expands each to the tokens of the picture that it is sent."""
    model, _, (prompt, *_) = task
    limits = ServerLimits(4096, 300)
    whole = api.body(prompt.ids, SamplingParams(max_new_tokens=4), limits, None)
    sent = api.showing(whole, prompt.images)
    urls = sent.get("image_data") or [part["url"] for part in sent["content_parts"]]
    sizes = []
    for url in urls:
        with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as picture:
            sizes.append(picture.width * picture.height // 64)
    token, numbers = model.config.image_token_id, iter(sizes)
    ids = sent["input_ids" if "input_ids" in sent else "token_ids"]
    assert [x for i in ids for x in ([i] * next(numbers) if i == token else [i])] == prompt.ids
    never = sent["sampling_params"]["logit_bias"]
    assert never == {str(token): -100.0, str(model.config.video_token_id): -100.0}
    assert "logit_bias" not in whole["sampling_params"]


@pytest.mark.slow
async def test_an_error_of_any_kind_reaches_the_caller(task: tuple[Any, Any, list[Prompt]]) -> None:
    """A future takes no StopIteration: the caller would wait forever."""
    model, _, prompts = task

    def fails(*_: Any, **__: Any) -> None:
        raise StopIteration

    async with LocalEngine(model, max_batch=2, max_len=64) as engine:
        engine._decoder.decode = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await engine.generate(prompts[2].ids, params=SamplingParams(max_new_tokens=2))
        wrong = [*prompts[1].ids, model.config.image_token_id, 5]
        with pytest.raises(ValueError, match="placeholders of images, and its 1 images take 4"):
            await engine.generate(wrong, params=SamplingParams(max_new_tokens=2), images=list(prompts[1].images))
