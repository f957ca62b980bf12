"""Imports and uses everything in an environment without extras: run by test_wheel.py."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import pkgutil
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

OPTIONAL = {
    "aiohttp", "bm25s", "datasets", "flash_attn", "hypothesis", "math_verify", "matplotlib", "mlflow", "moocore",
    "jsonschema", "optuna", "pandas", "peft", "psutil", "pyarrow", "pytest", "sglang", "tensorboard", "triton", "vllm",
    "wandb",
}  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path.insert(0, str(EXAMPLES))

from rlkit.scripts import cli  # noqa: E402


def outcome(call: Any) -> str:
    """The error, or "" for a call that works."""
    try:
        found = call()
        if asyncio.iscoroutine(found):
            asyncio.run(found)
    except SystemExit as end:
        return str(end) if end.code else ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def imports() -> dict[str, str]:
    """What the import of each module says."""
    import rlkit

    names = (found.name for found in pkgutil.walk_packages(rlkit.__path__, "rlkit.", onerror=lambda _: None))
    return {name: outcome(partial(importlib.import_module, name)) for name in names}


def script(name: str, *flags: str) -> str:
    """What `rlkit NAME` or an example prints."""
    kept, errors = io.StringIO(), io.StringIO()
    argv = [*map(str, flags)]
    sys.argv = [name, *argv]
    with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(errors):
        if name.endswith(".py"):
            said = outcome(lambda: runpy.run_path(str(EXAMPLES / name), run_name="__main__"))
        else:
            said = outcome(lambda: cli.main([name, *argv]))
    print(kept.getvalue(), errors.getvalue())
    return errors.getvalue().strip().splitlines()[-1] if said == "2" else said or kept.getvalue()


def uses(folder: Path) -> dict[str, str]:
    """What each use says."""
    from rlkit.agents.endpoint import agent_env
    from rlkit.data.load import load_rows
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.model.lora import add_lora
    from rlkit.model.weights import export_hf
    from rlkit.rewards import Sample, judge, run_reward

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    path = export_hf(model, tokenizer, folder / "model")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}?", "response": "7", "answer": "7"}) + "\n" for i in range(8)))
    (folder / "data.parquet").write_bytes(b"PAR1")
    common = ("--model", path, "--data", data, "--steps", 1, "--output")
    rl = ("--max-prompt-tokens", 16, "--max-new-tokens", 4, "--max-tokens", 512)
    sample = Sample("a", {"prompt": "q"}, 0)

    async def asked(completion: str, row: dict[str, Any]) -> Any:
        return await judge.chat(completion, row, url="http://127.0.0.1:9", model="m")

    return {
        "sft": script("sft", *common, folder / "sft", "--batch-size", 4),
        "parquet data": script("sft", *common, folder / "f", "--data", folder / "data.parquet"),
        "hub data": script("sft", *common, folder / "f", "--data", "openai/gsm8k:main:train"),
        "grpo": script("grpo", *common, folder / "a", *rl, "--reward", f"{EXAMPLES}/sorting_reward.py:score"),
        "lora": script("grpo", *common, folder / "b", *rl, "--reward", "x.py:f", "--lora-rank", 4),
        "sglang": script("grpo", *common, folder / "c", *rl, "--reward", "x.py:f", "--engine", "sglang"),
        "math": script("grpo", *common, folder / "d", *rl, "--reward", "rlkit.rewards.math:boxed"),
        "math in a file": script("grpo", *common, folder / "e", *rl, "--reward", f"{EXAMPLES}/math_reward.py:score"),
        "search": script("tool_use.py", *common[:2], "--output", folder / "g", "--task", "search"),
        "sweep": script("sweep", "--log-range", "lr", 1e-6, 1e-4, "--", "true"),
        "add_lora": outcome(lambda: add_lora(model)),
        "parquet": outcome(lambda: load_rows(folder / "data.parquet")),
        "plot": script("plot", folder / "sft"),
        "tracker": script("track", folder / "sft", "--to", "wandb"),
        "judge": outcome(lambda: run_reward(asked, [sample], timeout_s=60)),
        "agent": outcome(lambda: agent_env(print, tokenizer=tokenizer)),
        "search_tool": outcome(lambda: importlib.import_module("environments").search_tool(["a"])),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = [name for name in sorted(OPTIONAL) if importlib.util.find_spec(name)]
    (folder / "out.json").write_text(json.dumps({"found": found, "imports": imports(), "uses": uses(folder)}))
