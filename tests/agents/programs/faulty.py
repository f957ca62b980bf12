"""An agent that misbehaves in the way that its argument names. `good` is a right one. Only the standard library."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

BASE = os.environ["OPENAI_BASE_URL"]
ASK = {"model": "m", "messages": [{"role": "user", "content": "question"}]}


def send(data, base=BASE):
    """(status, reply) of a request with the bytes `data`."""
    request = urllib.request.Request(f"{base}/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(base=BASE):
    status, reply = send(json.dumps(ASK).encode(), base)
    return status, reply


def result(reward):
    with open(os.environ["RLKIT_RESULT"], "w") as file:
        json.dump(reward, file)


def good():
    assert ask()[0] == 200
    result(1.0)


def asks_nothing():
    result(1.0)


def never_ends():
    ask()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def floods():
    """Malformed requests over 8 connections, without end."""
    ask()

    def flood():
        where = urlsplit(BASE)
        while True:
            with socket.create_connection((where.hostname, where.port)) as s:
                body = b"{}"
                head = f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                for _ in range(100):
                    s.sendall(head.encode() + body)
                    s.recv(65536)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()


def floods_the_log():
    ask()
    while True:
        print("x" * 10000)


def dies():
    ask()
    os.kill(os.getpid(), signal.SIGKILL)


def fails():
    ask()
    raise KeyError("mine")


def leaves_children():
    """Two children, one of them a daemon in a session of its own, which also ask after the end."""
    good()
    later = f"import time, urllib.request; time.sleep(0.3); urllib.request.urlopen({BASE!r})\ntime.sleep(1000)"
    for new in (False, True):
        subprocess.Popen([sys.executable, "-S", "-c", later], start_new_session=new)


def kills_its_parent():
    ask()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def eats_memory():
    ask()
    blocks = []
    while True:
        blocks.append(b"x" * (16 << 20))
        time.sleep(0.02)


def sends_64_mib():
    status, reply = send(b" " * (64 << 20))
    assert status == 413, reply
    good()


def guesses():
    """Tokens of other episodes, before and after its own."""
    where = urlsplit(BASE)
    for guess in ("", "a" * 24, where.path.split("/")[1][:-1], where.path.split("/")[1] + "A", "..%2f"):
        status, reply = ask(f"http://{where.netloc}/{guess}/v1")
        assert status == 404, reply
    good()


def writes_nonsense():
    ask()
    with open(os.environ["RLKIT_RESULT"], "w") as file:
        file.write("[" * 100_000)


def writes_text_as_a_metric():
    ask()
    result({"reward": 1.0, "info": {"metrics": {"steps": "three"}}})


def writes_a_number_as_notes():
    ask()
    result({"reward": 1.0, "info": {"notes": 5}})


def writes_text_as_truncated():
    ask()
    result({"reward": 1.0, "truncated": "no"})


def writes_two_turn_rewards():
    ask()
    result({"reward": 1.0, "turn_rewards": [1.0, 2.0]})


def writes_nothing():
    ask()


KINDS = (
    good, asks_nothing, never_ends, floods, floods_the_log, dies, fails, leaves_children, kills_its_parent,
    eats_memory, sends_64_mib, guesses, writes_nonsense, writes_text_as_a_metric, writes_a_number_as_notes,
    writes_text_as_truncated, writes_two_turn_rewards, writes_nothing,
)  # fmt: skip
{kind.__name__: kind for kind in KINDS}[sys.argv[1]]()
