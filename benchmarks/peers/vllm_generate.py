"""vLLM's side of generation.py, run by vLLM's own Python: a line of JSON in for each load, a line out when it is done.
Its arguments are the folder of the model and the tokens of the longest sequence.
"""

from __future__ import annotations

import json
import os
import sys

from vllm import LLM, SamplingParams, TokensPrompt

if __name__ == "__main__":  # vLLM may spawn its engine
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=int(sys.argv[2]), skip_tokenizer_init=True)
    answers.write("ready\n")
    for line in sys.stdin:
        load = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in load["prompts"]]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False) for n in load["limits"]]
        out = llm.generate(prompts, params, use_tqdm=False)
        answers.write(json.dumps([len(x.outputs[0].token_ids) for x in out]) + "\n")
