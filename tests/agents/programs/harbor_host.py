"""For Harbor's own command: a sandbox on this machine, a root in a namespace of mounts, and an agent that asks once."""

import asyncio
import json
import os
import shutil
import tempfile
import urllib.request
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult

ENTER = """set -e
for d in usr bin lib lib64 sbin etc dev proc; do
    [ -e /$d ] || continue; mkdir -p $0/$d; mount --rbind /$d $0/$d
done
cd $0; exec chroot $0 bash -c "cd $2; $1"
"""
FOLDERS = ("app", "tmp", "tests", "solution", "logs/agent", "logs/verifier", "logs/artifacts")


class Host(BaseEnvironment):
    """No isolation but of the files that a task names by absolute paths: for tests."""

    @staticmethod
    def type():
        return "host"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp())
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root)

    def _inside(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **_):
        process = await asyncio.create_subprocess_exec(
            "unshare", "-rm", "sh", "-c", ENTER, self.root, command, cwd or "/app", env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class Writer(BaseAgent):
    """Writes the model's answer to the instruction into answer.txt."""

    @staticmethod
    def name():
        return "writer"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": instruction}]}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with await asyncio.to_thread(urllib.request.urlopen, request) as reply:
            text = json.loads(reply.read())["choices"][0]["message"]["content"]
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_text(text)
            await environment.upload_file(file.name, "/app/answer.txt")
