"""vLLM's side of generation.py, run by vLLM's own Python: a load in, a line of JSON each, and a line out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec

if __name__ == "__main__":  # before vLLM is imported
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="its folder")
    parser.add_argument("longest", type=int, help="tokens of the longest sequence")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("error: vllm is not installed here: generation.py starts this file by $RLKIT_VLLM_PYTHON")

from vllm import LLM, SamplingParams, TokensPrompt

if __name__ == "__main__":  # vLLM may spawn its engine
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints
    llm = LLM(args.model, dtype="float32", max_model_len=args.longest, skip_tokenizer_init=True)
    answers.write("ready\n")
    for line in sys.stdin:
        load = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in load["prompts"]]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False) for n in load["limits"]]
        out = llm.generate(prompts, params, use_tqdm=False)
        answers.write(json.dumps([len(x.outputs[0].token_ids) for x in out]) + "\n")
