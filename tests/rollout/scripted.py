"""A scripted policy, and the law that the trajectories of an episode must obey."""

from functools import cache
from pathlib import Path

from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.types import Completion

SPECIAL = {
    "chatml": [],
    "qwen3": [],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<|begin_of_text|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>", "<s>"],
}
END = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}


@cache
def tokenizer_with(name):
    """The tiny tokenizer under a template of `templates/`, with that family's special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    if SPECIAL[name]:
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
        tokenizer.bos_token, tokenizer.eos_token = SPECIAL[name][-1], END[name]
    return tokenizer


def prompt_of(tokenizer, text="question", **kwargs):
    """A prompt as the data loader makes it, its row with an answer."""
    return rl_prompts([{"prompt": text, "answer": "42"}], tokenizer=tokenizer, max_prompt_tokens=9999, **kwargs)[0][0]


class Script:
    """`sample` for an environment: returns the given completions in order and records each context.

    Texts end with the template's end of turn; ids are given as they are; a completion too. Log-probs and versions are
    different for every token of an episode.
    """

    def __init__(self, tokenizer, *turns, end="<|im_end|>"):
        self.tokenizer, self.turns, self.end, self.calls = tokenizer, list(turns), end, []
        self.images = []  # of each call

    async def __call__(self, prompt_ids, *, max_new_tokens=None, stop=(), images=None):
        self.images.append(images)
        out = self.turns.pop(0)
        if isinstance(out, str):
            out = self.tokenizer.encode(out + self.end, add_special_tokens=False)
        if isinstance(out, list):
            start = 1000 * len(self.calls)
            numbers = range(start, start + len(out))
            out = Completion(out, [-1.0 - i for i in numbers], [i + 7 for i in numbers], "stop")
        self.calls.append((list(prompt_ids), out))
        return out


def check_exact(pieces, calls):
    """Each turn is in one piece, after exactly the context it was sampled in; nothing else is trained on."""
    streams = []
    for piece in pieces:
        n = len(piece.prompt_ids)
        whole = piece.prompt_ids + piece.ids
        assert len(piece.mask) == len(piece.logp) == len(piece.versions) == len(piece.ids)
        streams.append((whole, n, [(False, 0.0, -1)] * len(piece.ids)))
    at = 0
    for context, out in calls:
        if not out.ids:
            continue
        while not _stands(streams[at], context, out):
            at += 1  # turns are in order: once a piece is left, no later turn is in it
        _expect(streams[at], context, out)
    _check_pieces(pieces, streams)


def check_tree(pieces, calls):
    """`check_exact` for branches in any order: each turn trains in one piece, after the context it was sampled in."""
    streams = [(p.prompt_ids + p.ids, len(p.prompt_ids), [(False, 0.0, -1)] * len(p.ids)) for p in pieces]
    for context, out in calls:
        if not out.ids:
            continue
        places = [i for i, stream in enumerate(streams) if len(context) >= stream[1] and _stands(stream, context, out)]
        assert places, "a turn is in no piece after its context"
        starts = [len(context) - streams[i][1] for i in places]  # of equal texts, the one with the turn's log-probs
        own = [i for i, at in zip(places, starts, strict=True) if pieces[i].logp[at : at + len(out.ids)] == out.logp]
        _expect(streams[(own or places)[0]], context, out)
    _check_pieces(pieces, streams)


def _expect(stream, context, out):
    """Write a turn's sampled tokens into what is expected of the piece it stands in."""
    _, n, expected = stream
    start = len(context) - n
    expected[start : start + len(out.ids)] = [
        (True, logp, version) for logp, version in zip(out.logp, out.versions, strict=True)
    ]


def _check_pieces(pieces, streams):
    """The streams of each piece are the expected ones, and the pieces are of one episode."""
    for piece, (_, _, expected) in zip(pieces, streams, strict=True):
        assert list(zip(piece.mask, piece.logp, piece.versions, strict=True)) == expected
        assert expected == [] or expected[-1][0], "what nobody sampled after is not kept"
    assert [p.continues for p in pieces] == [i > 0 for i in range(len(pieces))]
    assert len({p.reward for p in pieces}) == len({p.truncated for p in pieces}) == 1


def _stands(stream, context, out):
    """Whether a turn's context and tokens are in this piece, at positions that no other turn has."""
    whole, n, expected = stream
    end = len(context) + len(out.ids)
    return whole[:end] == context + out.ids and not any(m for m, *_ in expected[len(context) - n : end - n])
