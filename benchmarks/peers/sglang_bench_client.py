"""SGLang's own benchmark client, kept alive: a line of JSON in (url, prompts, ...), a line out (seconds).

Run by the Python that has SGLang (see ../sglang_client.py). Its request function is used as it is, behind the semaphore
that `python -m sglang.bench_serving --max-concurrency` puts in front of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import types
from importlib.util import find_spec

argparse.ArgumentParser(description=__doc__).parse_args()
if find_spec("sglang") is None:
    sys.exit("error: sglang is not installed here: sglang_client.py starts this file by $RLKIT_SGLANG_PYTHON")

sys.modules["datasets"] = stub = types.ModuleType("datasets")  # imported for data sets that are not used here
stub.load_dataset = None  # type: ignore[attr-defined]

from sglang.benchmark import serving  # noqa: E402

serving.args = argparse.Namespace(
    temperature=1.0,
    top_p=1.0,
    disable_ignore_eos=False,
    disable_stream=True,
    return_logprob=True,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
    header=None,
)


async def run(url: str, prompts: list[list[int]], new_tokens: int, concurrency: int) -> float:
    semaphore = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> None:
        request = serving.RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/generate",
            prompt_len=len(prompt),
            output_len=new_tokens,
            model="",
            lora_name="",
            image_data=None,
            extra_request_body={},
        )
        async with semaphore:
            output = await serving.async_request_sglang_generate(request)
        assert output.success, output.error
        assert output.output_len == new_tokens

    began = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return time.perf_counter() - began


print("ready", flush=True)
for line in sys.stdin:
    cpu = time.process_time()
    seconds = asyncio.run(run(**json.loads(line)))
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu}), flush=True)
