"""Images that come after the prompt: of tools, environments, and the requests of agents."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from scripted import Script, check_tree, tokenizer_with
from test_endpoint_requests import changed, send
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rlkit.agents import completions, endpoint, messages, responses
from rlkit.agents.endpoint import agent_env
from rlkit.data.images import ImageReader
from rlkit.data.prompts import Prompt, rl_prompts
from rlkit.data.tiny import tiny_vision_model
from rlkit.model.forward import forward, load_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.model.vision import token_types
from rlkit.packing import pack, unpack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.envs.tools import tool_env
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import rollout, sample_group
from rlkit.types import SamplingParams

STOPS = tuple(range(128))  # so that most turns of a random model end
LOOK = '<tool_call>{"name": "look", "arguments": {"at": "%s"}}</tool_call>'
WIDTHS = {"a": 24, "b": 16, "c": 16}  # of pictures 16 pixels high: 8 x 8 pixels are one token


def text(name: str) -> str:
    """What stands for a picture in the text that the model reads."""
    return f"<|vision_start|>{'<|image_pad|>' * (WIDTHS[name] // 4)}<|vision_end|>"


def turn(role: str, said: str) -> str:
    return f"<|im_start|>{role}\n{said}<|im_end|>\n"


@pytest.fixture(scope="module")
def pictures() -> dict[str, Pillow.Image]:
    draw = np.random.default_rng(0)
    return {x: Pillow.fromarray(draw.integers(0, 256, (16, w, 3), dtype=np.uint8)) for x, w in WIDTHS.items()}


@pytest.fixture(scope="module")
def task(tmp_path_factory, pictures) -> tuple[Any, Any, list[Prompt]]:
    """The folder of a model, its tokenizer, and a prompt with an image and one without."""
    folder = tmp_path_factory.mktemp("task")
    tiny_vision_model(folder, hidden=32, layers=2)
    tokenizer = load_tokenizer(folder)
    reader = ImageReader(str(folder), tokenizer, load_config(folder))
    rows: list[dict[str, Any]] = [{"prompt": "Hi", "images": [pictures["a"]]}, {"prompt": "Hi"}]
    return folder, tokenizer, rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99, images=reader)[0]


def own_logp(folder: Any, trajectory: Any, shown: list[Pillow.Image]) -> torch.Tensor:
    """Log-probs of a trajectory's tokens by transformers' model, which finds the places of the pictures itself."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.ids]])
    seen = AutoImageProcessor.from_pretrained(folder, backend="pil")(images=shown, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=ids, **seen, **token_types(model, ids)).logits[0]
    logp = logits[len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
    return logp.gather(1, ids[0, len(trajectory.prompt_ids) :, None])[:, 0]


@pytest.mark.slow
async def test_log_probs_after_images_of_every_kind_are_those_of_the_own_forward(task, pictures) -> None:
    folder, tokenizer, prompts = task

    async def env(prompt: Prompt, sample: Any) -> Any:
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        await chat.turn()
        chat.add(
            {"role": "tool", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": pictures["b"]}]}
        )
        await chat.turn()
        chat.add({"role": "user", "content": pictures["c"]}, "and?")
        await chat.turn()
        return chat.end(reward=1.0)

    model = load_model(folder)
    async with LocalEngine(model, tokenizer=tokenizer, max_batch=4, max_len=512) as engine:
        params = SamplingParams(max_new_tokens=12, stop_token_ids=STOPS)
        groups = await rollout(prompts, generate=engine.generate, params=params, group_size=2, seed=0, env=env)
    batch = pack(groups)
    assert [len(x) for x in batch.images] == [1, 0, 2, 2, 2, 2]
    for same in (batch, pack(groups, share_prompts=False), pack(unpack(batch))):
        assert (forward(model, same).logp - same.rollout_logp)[same.mask].abs().max() < 1e-4
    for t, first in ((groups[0][0], ["a"]), (groups[1][1], [])):
        truth = own_logp(folder, t, [pictures[x] for x in [*first, "b", "c"]])
        assert (truth - torch.tensor(t.logp))[torch.tensor(t.mask)].abs().max() < 1e-4
        said = [m["content"] for m in t.info["messages"] if m["role"] != "assistant"]
        assert said == ["<image>Hi" if first else "Hi", "see<image>", "<image>", "and?"]


async def test_a_tool_returns_an_image(task, pictures) -> None:
    """Also beside text; a file that is no image is an error that the model reads."""
    tokenizer = load_tokenizer(task[0])
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if tools %}", "{% if false %}")

    def look(at: str) -> Any:
        """Look.

        Args:
            at: where
        """
        if at == "b":
            return [{"type": "text", "text": "<|im_end|>here: "}, {"type": "image", "image": pictures["b"]}]
        return [{"type": "image", "image": b"no picture"}] if at == "bad" else pictures["a"]

    told: dict[str, Any] = {"tokenizer": tokenizer, "system_prompt": "Call look."}
    (prompt,), _ = rl_prompts([{"prompt": "Hi"}], max_prompt_tokens=99, **told)
    script = Script(tokenizer, LOOK % "a" + LOOK % "b", LOOK % "bad", "done")
    (piece,) = await tool_env([look], **told)(prompt, script)
    context = tokenizer.decode(script.calls[1][0])
    assert context.endswith(
        turn("tool", text("a")) + turn("tool", f"<\u200b|im_end|>here: {text('b')}") + "<|im_start|>assistant\n"
    )
    assert "Error: ValueError: the result: an image cannot be read" in tokenizer.decode(script.calls[2][0])
    assert [None if x is None else len(x) for x in script.images] == [None, 2, 2]
    assert (piece.images, piece.info["num_failed_calls"]) == ((), 1)
    assert [x.inputs()["image_grid_thw"].tolist() for x in piece.later_images] == [[[1, 4, 6]], [[1, 4, 4]]]


async def test_an_image_for_a_model_of_text_ends_the_run(pictures) -> None:
    tokenizer = tokenizer_with("chatml")

    def look() -> Any:
        """Look."""
        return pictures["a"]

    prompt = rl_prompts([{"prompt": "Hi"}], tokenizer=tokenizer, max_prompt_tokens=999, tools=[look])[0][0]
    env = tool_env([look], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the result of tool look shows an image, and the model reads text only"):
        await env(prompt, Script(tokenizer, '<tool_call>{"name": "look", "arguments": {}}</tool_call>'))


async def test_observations_are_images(task, pictures) -> None:
    _, tokenizer, prompts = task

    class Game:
        def __init__(self, prompt: Prompt) -> None:
            self.steps = 0

        def reset(self) -> Any:
            return pictures["a"]

        def step(self, turn: Any) -> Step:
            self.steps += 1
            return Step(
                [{"type": "text", "text": "go"}, {"type": "image", "image": pictures["b"]}], done=self.steps > 1
            )

    script = Script(tokenizer, "left", "right")
    (piece,) = await gym_env(Game, tokenizer=tokenizer)(prompts[1], script)
    whole = turn("user", text("a")) + turn("assistant", "left") + turn("user", f"go{text('b')}")
    assert tokenizer.decode(script.calls[1][0]) == whole + "<|im_start|>assistant\n"
    assert (len(piece.images), len(piece.later_images)) == (1, 1)


async def two_turns(prompt: Prompt, sample: Any, *, tokenizer: Any, picture: Any) -> Any:
    """A chat of two turns, the second after a picture."""
    chat = Chat(prompt, sample, tokenizer=tokenizer)
    await chat.turn()
    chat.add({"role": "user", "content": picture})
    await chat.turn()
    return chat.end(reward=1.0)


async def test_a_rewritten_history_shows_its_images_again(task, pictures) -> None:
    """The template drops past turns of the policy: each turn is a piece, with the images of its own context."""
    _, tokenizer, prompts = task
    tokenizer = load_tokenizer(task[0])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'assistant' %}"
    )
    script = Script(tokenizer, "one", "two")

    env = partial(two_turns, tokenizer=tokenizer, picture=pictures["b"])
    group = await sample_group(prompts[0], [script], env=env)
    assert tokenizer.decode(script.calls[1][0]) == (
        turn("user", f"{text('a')}Hi") + turn("user", text("b")) + "<|im_start|>assistant\n"
    )
    assert [(len(t.images), len(t.later_images)) for t in group] == [(1, 0), (2, 0)]


async def test_a_turn_that_spells_a_placeholder_is_read_as_text(task, pictures) -> None:
    """Where the template writes it again: the sampled ids are those of other tokens, `<`, `|`, `image` and so on."""
    tokenizer = load_tokenizer(task[0])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content or ''", "message.content | upper | lower"
    )
    spelled = [i for part in ("<", "|image_pad|>") for i in tokenizer.encode(part, add_special_tokens=False)]
    script = Script(tokenizer, [*spelled, *tokenizer.encode("A<|im_end|>")], "two")

    env = partial(two_turns, tokenizer=tokenizer, picture=pictures["b"])
    ids = tokenizer.encode(turn("user", "hi") + "<|im_start|>assistant\n")
    first, second = await sample_group(Prompt(ids, {"prompt": "hi"}, 0), [script], env=env)
    read = turn("user", "hi") + turn("assistant", "<\u200b|image_pad|>a") + turn("user", text("b"))
    assert tokenizer.decode(second.prompt_ids) == read + "<|im_start|>assistant\n"
    assert (len(first.images), len(second.images)) == (0, 1)


async def test_an_image_that_the_template_does_not_write_is_an_error(task, pictures) -> None:
    """In the first messages, and in those after a turn. A text with the mark of a place is text."""
    folder, _, prompts = task
    tokenizer = load_tokenizer(folder)
    lost = "{% for message in messages if message.role != 'tool' %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for message in messages %}", lost)
    script = Script(tokenizer, "one")
    told = [{"role": "user", "content": "q \ue000image\ue001"}, {"role": "tool", "content": pictures["a"]}]
    with pytest.raises(ValueError, match="does not write the image of a message of role 'tool'"):
        Chat(prompts[1], script, tokenizer=tokenizer, messages=told)
    chat = Chat(prompts[1], script, tokenizer=tokenizer, messages=told[:1])
    await chat.turn()
    assert tokenizer.decode(script.calls[0][0]) == turn("user", "q <image>") + "<|im_start|>assistant\n"
    chat.add(told[1])
    with pytest.raises(ValueError, match="does not write the image of a message of role 'tool'"):
        await chat.turn()


async def test_an_environment_of_tokens_names_its_images(task) -> None:
    """Beside those of the prompt; and a context without any shows none, whatever the prompt does."""
    _, tokenizer, prompts = task
    (image,) = prompts[0].images
    script = Script(tokenizer, "one", "two", "three", "four")

    async def env(prompt: Prompt, sample: Any) -> Any:
        turns = Turns(prompt.ids, sample, prompt.images)
        await turns.sample()
        turns.append(tokenizer.encode(text("a")), [image])
        await turns.sample()
        turns.append(tokenizer.encode(text("a")), [image])  # which no turn follows
        turns.restart(tokenizer.encode("text"))
        await turns.sample()
        return turns.pieces(reward=1.0)

    group = await sample_group(prompts[0], [script], env=env)
    assert [len(images) for images in script.images] == [1, 2, 0]
    assert [(len(t.images), len(t.later_images)) for t in group] == [(1, 1), (0, 0)]

    async def unnamed(prompt: Prompt, sample: Any) -> Any:
        turns = Turns(tokenizer.encode("text"), sample)
        await turns.sample()
        return turns.pieces(reward=1.0)

    with pytest.raises(ValueError, match=r"must go on from its prompt: .*; name the images of each context"):
        await sample_group(prompts[0], [script], env=unnamed)


def png(picture: Pillow.Image) -> str:
    """A picture's file as base64."""
    out = io.BytesIO()
    picture.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def chat_parts(data: str) -> list[Any]:
    return [
        {"type": "text", "text": "see "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]


def response_parts(data: str) -> list[Any]:
    return [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ]


def anthropic_parts(data: str) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"type": "text", "text": "see "}, {"type": "image", "source": source}]


PARTS = {"/chat/completions": chat_parts, "/responses": response_parts, "/messages": anthropic_parts}


def request_of(path: str, *told: tuple[str, Any]) -> bytes:
    messages = [{"role": role, "content": content} for role, content in told]
    return json.dumps({"input" if path == "/responses" else "messages": messages, "max_tokens": 99}).encode()


@pytest.mark.slow_cases("/responses")
@pytest.mark.parametrize("path", PARTS)
async def test_images_of_requests_are_those_of_the_contexts(path, task, pictures) -> None:
    """A conversation that goes on keeps its images. One with another image of the same size is a branch, although
    the ids are equal; and the row's own image is not shown where no request shows it."""
    folder, _, prompts = task
    tokenizer = load_tokenizer(folder)
    parts = {name: PARTS[path](png(picture)) for name, picture in pictures.items()}
    told = [("user", parts["b"]), ("assistant", "one"), ("user", parts["a"])]
    asked = [told[:1], told, [("user", parts["c"]), *told[1:]], [("user", "no image")]]

    def agent(prompt: Prompt, base_url: str) -> dict[str, float]:
        assert [send(base_url, request_of(path, *x), path)[0] for x in asked] == [200] * 4
        return {"reward": 1.0}

    script = Script(tokenizer, "one", "two", "three", "four")
    group = await sample_group(prompts[0], [script], env=agent_env(agent, tokenizer=tokenizer))
    check_tree(group, script.calls)
    see = turn("user", f"see {text('b')}") + "<|im_start|>assistant\n"
    assert tokenizer.decode(script.calls[0][0]) == see
    assert (
        tokenizer.decode(script.calls[1][0]) == f"{see}one<|im_end|>\n" + turn("user", f"see {text('a')}") + see[-22:]
    )
    by_file = {base64.b64decode(png(picture)): name for name, picture in pictures.items()}
    shown = ["".join(by_file[x.content] for x in images) for images in script.images]
    assert shown == ["b", "ba", "ca", ""]
    names = [tuple("".join(by_file[x.content] for x in y) for y in (t.images, t.later_images)) for t in group]
    assert names == [("b", "a"), ("ca", ""), ("", "")]
    assert group[-1].info["metrics"] == {"agent/branches": 2, "agent/rerendered": 1}
    batch, apart = (pack([group], share_prompts=share) for share in (True, False))
    assert [len(x) for x in batch.images] == [1, 2, 0, 1, 0, 0]
    model = load_model(folder)
    shared, own = (forward(model, x).logp[x.mask] for x in (batch, apart))
    assert (shared - own).abs().max() < 1e-5


BAD = {
    "not base64": ("no*base64", "an image is not base64"),
    "no image": (base64.b64encode(b"text").decode(), "an image cannot be read: cannot identify image file"),
    "cut": ("CUT", "an image cannot be read: "),
    "too large": ("LARGE", "an image cannot be read: it has 4001 x 4000 pixels, and may have 16 million"),
}


def large(width, height):
    """A PNG with this size in its header, and the pixels of a small one."""
    data = base64.b64decode(png(Pillow.new("1", (1, 1))))
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    whole = data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    return base64.b64encode(whole).decode()


@pytest.mark.parametrize("path", PARTS)
async def test_bad_images_are_refused_and_the_episode_goes_on(path, task, pictures, monkeypatch) -> None:
    folder, _, prompts = task
    tokenizer, got = load_tokenizer(folder), {}
    given = {"CUT": png(pictures["a"])[:400], "LARGE": large(4001, 4000)}
    monkeypatch.setattr(endpoint, "MAX_IMAGES", 2000)  # three of the pictures have more

    def agent(prompt: Prompt, base_url: str) -> dict[str, float]:
        def ask(*told: tuple[str, Any]) -> Any:
            return send(base_url, request_of(path, *told), path)

        for name, (data, _) in BAD.items():
            got[name] = ask(("user", PARTS[path](given.get(data, data))))
        parts = PARTS[path](png(pictures["a"]))
        url = json.loads(json.dumps(parts).replace('"data:image/png;base64,', '"https://x.y/').replace("base64", "url"))
        got["network"] = ask(("user", url))
        got["of the policy"] = ask(("user", "see"), ("assistant", parts), ("user", "?"))
        got["too many"] = ask(*(("user", PARTS[path](png(x))) for x in pictures.values()))
        got["right"] = ask(("user", parts))
        return {"reward": 1.0}

    script = Script(tokenizer, "one")
    (piece,) = await agent_env(agent, tokenizer=tokenizer)(prompts[1], script)
    assert {name: status for name, (status, _) in got.items()} == {
        **dict.fromkeys([*BAD, "network", "of the policy"], 400), "too many": 413, "right": 200,
    }  # fmt: skip
    errors = {name: reply["error"]["message"] for name, (status, reply) in got.items() if status != 200}
    for name, (_, message) in BAD.items():
        assert message in errors[name]
    assert ("nothing is fetched" if path != "/messages" else "an image must") in errors["network"]
    assert all(0 < len(message) < 300 and "\n" not in message for message in errors.values())
    assert (len(piece.images), len(script.calls)) == (1, 1)


@pytest.mark.parametrize("path", PARTS)
async def test_a_model_of_text_refuses_images(path, pictures) -> None:
    tokenizer, got = tokenizer_with("chatml"), []

    def agent(prompt: Prompt, base_url: str) -> None:
        for said in (PARTS[path](png(pictures["a"])), "text"):
            got.append(send(base_url, request_of(path, ("user", said)), path))

    await agent_env(agent, tokenizer=tokenizer)(
        Prompt(tokenizer.encode("Hi"), {"prompt": "Hi"}, 0), Script(tokenizer, "x")
    )
    assert [status for status, _ in got] == [400, 200]
    assert "the request shows an image, and the model reads text only" in got[0][1]["error"]["message"]
    assert got[0][1].get("type") == ("error" if path == "/messages" else None)


def test_images_are_where_the_formats_have_them(pictures) -> None:
    """Of results of tools, too: the same text and the same file from each."""
    data = png(pictures["a"])
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "x", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": anthropic_parts(data)}
    item = {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "x", "output": response_parts(data)}
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    chat = {"messages": [*told, {"role": "tool", "tool_call_id": "x", "content": chat_parts(data)}]}
    anthropic = {
        "max_tokens": 9,
        "messages": [told[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    }
    requests = [
        completions.read(chat),
        responses.read({"input": [told[0], item, output]}, {}),
        messages.read(anthropic),
    ]
    assert len({r.messages[-1]["content"] for r in requests}) == 1
    assert {*requests[0].images.values()} == {base64.b64decode(data)}
    assert requests[0].images == requests[1].images == requests[2].images


def told_of(path: str, pictures: dict[str, Pillow.Image]) -> dict[str, Any]:
    """A right request with images of the user and of a tool's result."""
    shown = {name: PARTS[path](png(picture)) for name, picture in pictures.items()}
    told: list[dict[str, Any]] = [
        {"role": "user", "content": shown["a"]}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": shown["b"]},
    ]  # fmt: skip
    if path == "/messages":
        use = {"type": "tool_use", "id": "x", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "x", "content": shown["c"]}
        told += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    elif path == "/responses":
        call = {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"}
        told += [call, {"type": "function_call_output", "call_id": "x", "output": shown["c"]}]
    else:
        call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        told += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": shown["c"]},
        ]
    return {"input" if path == "/responses" else "messages": told, "max_tokens": 9}


@pytest.mark.slow
@pytest.mark.parametrize("path", PARTS)
@given(data=st.data())
def test_whatever_is_asked_each_context_has_the_placeholders_of_its_images(path, data, task, pictures) -> None:
    folder, _, prompts = task
    tokenizer, got = load_tokenizer(folder), []
    bodies = data.draw(st.lists(changed(told_of(path, pictures)), min_size=10, max_size=10))
    script = Script(tokenizer, *["one"] * 11)

    def agent(prompt: Prompt, base_url: str) -> dict[str, float]:
        got.extend(send(base_url, body, path)[0] for body in [*bodies, request_of(path, ("user", "text"))])
        return {"reward": 1.0}

    group = asyncio.run(sample_group(prompts[1], [script], env=agent_env(agent, tokenizer=tokenizer)))
    check_tree(group, script.calls)
    assert ({*got} <= {200, 400}, got[-1]) == (True, 200)
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    seen = [(context, images or ()) for (context, _), images in zip(script.calls, script.images, strict=True)]
    seen += [x for t in group for x in ((t.prompt_ids, t.images), (t.ids, t.later_images))]
    for ids, images in seen:
        assert list(ids).count(place) == sum(int(x.inputs()["image_grid_thw"].prod()) // 4 for x in images)
