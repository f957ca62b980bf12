"""A served teacher against a small HTTP server that answers as vLLM and SGLang do: requests, replies, what is refused.

tests/sglang/test_teacher.py and tests/vllm/test_teacher.py have the real servers.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch

from rlkit.data.tiny import tiny_tokenizer
from rlkit.packing import pack
from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.servers.teacher import ServedTeacher
from rlkit.settings import SERVERS
from rlkit.types import Trajectory


def logp_of(context, token):
    """A number of the teacher's, which depends on all tokens before."""
    return -1.0 - (sum(context) % 7) / 10 - token / 1000


def top_of(context, k):
    return [(token, -0.1 - token) for token in range(sum(context) % 5, sum(context) % 5 + k)]


def vllm(body):
    ids, k, rows = body["prompt"], body["prompt_logprobs"], [None]
    for i in range(1, len(ids)):
        found = dict(top_of(ids[:i], k))
        ranks = {token: rank for rank, token in enumerate(found, 1)}
        found.setdefault(ids[i], logp_of(ids[:i], ids[i]))
        rows.append({str(t): {"logprob": x, "rank": ranks.get(t, 99)} for t, x in sorted(found.items(), reverse=True)})
    return {"choices": [{"prompt_logprobs": rows}]}


def sglang(body):
    ids, k = body["input_ids"], body["top_logprobs_num"]
    at = range(body["logprob_start_len"] + 1, len(ids))
    sampled = [[logp_of(ids[:i], ids[i]), ids[i], None] for i in at]
    top = [[[x, token, None] for token, x in top_of(ids[:i], k)] for i in at]
    return {"meta_info": {"input_token_logprobs": [[None, 0, None], *sampled], "input_top_logprobs": [None, *top]}}


@contextmanager
def serving(owner, *, fails=0, change=lambda path, reply: reply):
    left = [fails]

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body):
            if self.path == "/v1/models":
                return {"data": [{"id": "m", "owned_by": owner}]}
            if self.path == "/tokenize":
                return {"tokens": tiny_tokenizer().encode(body["prompt"], add_special_tokens=False)}
            return {"/v1/completions": vllm, "/generate": sglang}[self.path](body)

        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            reply = change(self.path, self.reply(json.loads(self.rfile.read(length) or "null")))
            broken = self.path in ("/v1/completions", "/generate") and left[0] > 0
            left[0] -= broken
            data = json.dumps(reply).encode()
            self.send_response(500 if broken else 404 if reply is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def batch(**how):
    def made(prompt, ids, **more):
        return Trajectory(prompt, ids, [True] * len(ids), [-1.0] * len(ids), [0] * len(ids), **more)

    cut = made([5, 6], [], truncated=True)  # no token fitted into the context
    return pack([[made([5, 6], [9, 8, 7]), made([5, 6], [4], truncated=True), cut], [made([3], [2, 2])]], **how)


@pytest.mark.slow_cases("False-sglang", "False-vllm", "True-vllm")
@pytest.mark.parametrize("owner", SERVERS)
@pytest.mark.parametrize("share", [True, False])
def test_log_probs_are_those_of_each_sequence_alone(owner, share):
    packed = batch(share_prompts=share)
    with serving(owner, fails=1) as url:
        teacher = ServedTeacher(url)
        logp, (ids, top) = teacher.logp(packed), teacher.top_logp(packed, 3)
    rows = [([5, 6], [9, 8, 7]), ([5, 6], [4]), ([3], [2, 2])]
    wanted = [([*prompt, *answer[:i]], answer[i]) for prompt, answer in rows for i in range(len(answer))]
    torch.testing.assert_close(logp[packed.mask], torch.tensor([logp_of(*x) for x in wanted]))
    for i, (context, _) in enumerate(wanted):
        assert ids[packed.mask][i].tolist() == [token for token, _ in top_of(context, 3)]
        assert top[packed.mask][i].tolist() == pytest.approx([x for _, x in top_of(context, 3)])


def without_log_probs(path, reply):
    return {"choices": [{}]} if path == "/v1/completions" else reply


def of_another_tokenizer(path, reply):
    return {"tokens": [*reply["tokens"][:3], 7, *reply["tokens"][4:]]} if path == "/tokenize" else reply


@pytest.mark.parametrize(
    ("owner", "change", "message"),
    [
        (
            "openai",
            lambda path, reply: reply,
            "is a server of openai, which gives no log-probs of given tokens: use SGLang",
        ),
        ("vllm", without_log_probs, "not a reply of /v1/completions"),
        (
            "vllm",
            of_another_tokenizer,
            r"serves a model with other tokens: .* token 3 is \[7\] there and \[32\] in the",
        ),
    ],
)
def test_a_server_that_is_no_teacher_is_refused(owner, change, message, monkeypatch):
    with serving(owner, change=change) as url, pytest.raises((ValueError, ReplicaError), match=message):
        ServedTeacher(url, tries=1).check(tiny_tokenizer(), k=2)


def test_a_server_that_does_not_tokenize_is_a_teacher():
    with serving("vllm", change=lambda path, reply: None if path == "/tokenize" else reply) as url:
        ServedTeacher(url).check(tiny_tokenizer(), k=2)
