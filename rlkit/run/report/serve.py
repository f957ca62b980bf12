"""Serve the report of a run while it trains: `rlkit report RUN --serve`."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlkit.run.report import page as report


class _Handler(BaseHTTPRequestHandler):
    """`/`: the page; `/state`: a text that changes when the run has written something; `/data`: the page's blocks."""

    server_version, sys_version = "rlkit", ""
    timeout = 60  # seconds of a request, and of each piece of its answer

    def __init__(self, *request: object, folders: tuple[Path, ...], host: str) -> None:
        self._folders, self._host = folders, host
        super().__init__(*request)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = re.sub(r":\d*$", "", self.headers.get("Host", "")).strip("[]").lower()
        state = _state(self._folders)  # before what is read: at worst a page is behind it, and asks again
        blocks = partial(report.data, *self._folders, live=True)
        answers = {
            "/": ("text/html", lambda: report.page(*self._folders, live=state)),
            "/state": ("text/plain", lambda: state),
            "/data": ("application/json", lambda: json.dumps({"state": state, "blocks": blocks()})),
        }
        if name not in ("localhost", "127.0.0.1", "::1", self._host) and self._host not in ("0.0.0.0", "::"):
            return self._answer(403, "text/plain", "this name is not that of the server")  # a page of another site asks
        if self.path not in answers:
            return self._answer(404, "text/plain", "there is only /")
        kind, make = answers[self.path]
        try:
            self._answer(200, kind, make())
        except (OSError, ValueError) as error:
            self._answer(500, "text/plain", str(error))

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


class _Server(ThreadingHTTPServer):
    """A server that is silent where a reader has gone before its answer, as browsers do."""

    def handle_error(self, *where: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*where)


def server(*folders: Path, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """An HTTP server of the report of these runs, on the loopback interface unless `host` is another; not started.

    Errors: those of `rlkit.run.report.page`, and OSError, which names the port, where it is taken.
    """
    report.data(*folders, live=True)
    try:
        return _Server((host, port), partial(_Handler, folders=folders, host=host))
    except OSError as error:
        raise OSError(
            f"`port` {port} of {host} cannot be served on ({error.strerror or error}): give another one"
        ) from None


def _state(folders: tuple[Path, ...]) -> str:
    """Sizes and times of what the report reads."""
    files = [
        path for folder in folders for path in (folder / "metrics.jsonl", folder / "args.json", folder / "trajectories")
    ]
    stats = [path.stat() for path in files if path.exists()]
    return " ".join(["state", *(f"{x.st_size}:{x.st_mtime_ns}" for x in stats)])
