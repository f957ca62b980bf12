"""The endpoint of agents over TLS, with a certificate of one's own."""

import asyncio
import logging
import socket
import ssl
import subprocess

import aiohttp
import pytest
from scripted import Script, prompt_of, tokenizer_with

from rlkit.agents.endpoint import agent_env
from rlkit.agents.server import tls_of


async def test_a_client_without_tls_or_trust_gets_nothing(certificate, caplog):
    """And the episode goes on."""
    tokenizer = tokenizer_with("chatml")
    chain = certificate.with_name("both.pem")
    chain.write_text(certificate.read_text() + certificate.with_name("key.pem").read_text())

    async def agent(prompt, base_url):
        assert base_url.startswith("https://127.0.0.1:")
        host, port = base_url.split("/")[2].split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"POST /x/v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "question"}]}
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.post(f"{base_url}/chat/completions", json=body)
            trusted = ssl.create_default_context(cafile=str(certificate))
            async with client.post(f"{base_url}/chat/completions", json=body, ssl=trusted) as reply:
                return {"reward": float(reply.status == 200)}

    with caplog.at_level(logging.WARNING):
        env = agent_env(agent, tokenizer=tokenizer, tls=tls_of(chain, None))
        (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "a"))
    assert (piece.reward, caplog.records) == (1.0, [])


def test_files_that_are_no_certificate_are_refused_in_one_line(certificate, tmp_path):
    key, other = certificate.with_name("key.pem"), tmp_path / "other.pem"
    made = "openssl genpkey -algorithm ec -pkeyopt ec_paramgen_curve:P-256"
    subprocess.run([*made.split(), "-out", str(other)], check=True, capture_output=True)
    locked = tmp_path / "locked.pem"
    subprocess.run(
        f"openssl pkey -in {key} -out {locked} -aes128 -passout pass:word".split(), check=True, capture_output=True
    )
    (tmp_path / "text.pem").write_text("no certificate")
    for files, message in (
        ((tmp_path / "none.pem", None), "there is no file .*none.pem"),
        ((certificate, None), r"cert.pem: no certificate with its key \("),
        ((tmp_path / "text.pem", key), r"no certificate with its key \("),
        ((certificate, other), r"other.pem: no certificate with its key \(KEY_VALUES_MISMATCH\)"),
        ((certificate, locked), "the key has a password"),
    ):
        with pytest.raises(ValueError, match=message):
            tls_of(*files)
