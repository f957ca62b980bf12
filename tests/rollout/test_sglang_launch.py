"""What a server is started with; the server is a stand-in that writes its environment down."""

import json
import sys
import time

from rlkit.rollout.sglang import launch

STAND_IN = f"""#!{sys.executable}
import json, os, sys, time
folder = sys.argv[sys.argv.index("--model-path") + 1]
with open(folder + "/part", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(folder + "/part", folder + "/environment")
time.sleep(3600)
"""


def test_a_server_that_a_rank_starts_does_not_take_itself_for_one(tmp_path, monkeypatch):
    """torch.distributed joins the store of torchrun where TORCHELASTIC_USE_AGENT_STORE says so, and waits for it."""
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (ranks | {"RANKING": "1"}).items():
        monkeypatch.setenv(name, value)
    python, written = tmp_path / "python", tmp_path / "environment"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    with launch(tmp_path, python=str(python), log=tmp_path / "log", env={"GIVEN": "2"}, wait=False) as server:
        end = time.monotonic() + 120
        while not written.exists():
            assert server.alive
            assert time.monotonic() < end
            time.sleep(0.05)
    found = json.loads(written.read_text())
    assert not ranks.keys() & found.keys()
    assert (found["RANKING"], found["GIVEN"]) == ("1", "2")
