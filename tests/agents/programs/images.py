"""A user's program that shows images: chat completions, Responses and Messages, each two turns."""

import json
import os
from pathlib import Path

import anthropic
import openai

URL, LATER = json.loads(Path(os.environ["RLKIT_ROW"]).read_text())["images"]
OTHERS = {"model": "policy", "max_tokens": 99}


def chat():
    client = openai.OpenAI(max_retries=0)
    ask = client.chat.completions.create
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    messages.append(ask(model="policy", messages=messages).choices[0].message.model_dump())
    messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": LATER, "detail": "low"}}]})
    return ask(model="policy", messages=messages).choices[0].message.content


def responses():
    client = openai.OpenAI(max_retries=0)
    shown = [[{"role": "user", "content": [{"type": "input_image", "image_url": x}]}] for x in (URL, LATER)]
    first = client.responses.create(model="policy", input=shown[0])
    return client.responses.create(model="policy", input=shown[1], previous_response_id=first.id).output_text


def messages():
    client = anthropic.Anthropic(max_retries=0)

    def shown(url):
        head, _, data = url.partition(",")
        source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
        return {"role": "user", "content": [{"type": "image", "source": source}]}

    asked = [shown(URL)]
    counted = client.messages.count_tokens(model="policy", messages=asked).input_tokens
    first = client.messages.create(messages=asked, **OTHERS)
    assert counted == first.usage.input_tokens > 6, counted
    asked += [{"role": "assistant", "content": first.content}, shown(LATER)]
    with client.messages.stream(messages=asked, **OTHERS) as stream:
        return stream.get_final_text()


def refused():
    """What each client says of an image that is none."""
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    asked = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    try:
        openai.OpenAI(max_retries=0).chat.completions.create(model="policy", messages=chat)
    except openai.BadRequestError as error:
        yield str(error)
    try:
        anthropic.Anthropic(max_retries=0).messages.create(messages=asked, **OTHERS)
    except anthropic.BadRequestError as error:
        yield str(error)


errors = ["an image cannot be read" in error for error in refused()]
said = [chat(), responses(), messages()]
Path(os.environ["RLKIT_RESULT"]).write_text(str(float(said == ["two"] * 3 and errors == [True, True])))
