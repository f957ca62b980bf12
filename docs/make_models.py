"""Writes docs/models.md: every causal language model of the installed transformers, and how rlkit trains it.

Run `python docs/make_models.py` after changing `rlkit.model.families` or transformers (some minutes); the nightly
tests compare the page with the models themselves. What SGLang and vLLM have is read from the CPU builds of `make
test-sglang test-vllm`, and kept in docs/served.tsv for machines without them.
"""

from __future__ import annotations

import csv
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

DOCS = Path(__file__).parent
SERVED = DOCS / "served.tsv"
sys.path.insert(0, str(DOCS.parent / "tests" / "model"))

from model_types import FAMILIES, MODEL_TYPES, Found, Use, use, verdict  # noqa: E402

from rlkit.model.vision import TYPES  # noqa: E402

PAGE = """# Models

Any causal language model is trained, in one of two ways:

- **packed**: sequences lie end to end in one stream, and the prompt of a group is forwarded once
  (`rlkit.model.forward.forward`). So are decoders whose attention is transformers' `AttentionInterface`, full or
  sliding, with softcaps, sinks (gpt-oss), latent attention (DeepSeek), layers of different sizes (Gemma 4), scaled
  logits (Cohere, Granite), biases, norms, learned or rotary positions and mixtures of experts; and recurrent and
  convolutional layers (Qwen3.5, Nemotron-H, Falcon-H1, LFM2), whose samples start from the final state of their prompt.
  Earlier turns, too, and whatever else samples [have in common](parallel.md#common-beginnings) are forwarded once.
  Jamba's and MiniMax's recurrent layers ignore a state that they are given: they share prompts alone, and these layers
  read the prompt once per sample.
- **unpacked**: the model's own forward on padded rows, a row for each sample with its whole prompt. The numbers are the
  same; the cost is a prompt per sample in place of one per group, and padding of at most a quarter. A warning says so
  once, with the reason. `replicate` and `shard` work, `tp`, `cp`, `pp` and `ep` do not.

Refused are models that are not causal, before their weights are loaded. Some models are trained on
[images](#images), too; other multimodal models on text only.

Which way is right is measured: log-probs, packed with and without shared prompts, or unpacked, must equal those of the
model's own forward, one sequence at a time, to 1e-4. The check runs wherever a model is loaded or prepared:
`load_model`, `prepare_model`, `load_parallel`, `parallelize`, `load_value_model`, `load_reward_model`. It runs a small
copy of the model with large random weights on the CPU: one layer of each kind, windows and chunks shorter than the
sequences. This takes about a second, once: the verdict is kept in the user's cache (`$XDG_CACHE_HOME`, default
`~/.cache`), per config and versions of torch, transformers and rlkit. If no small copy can be built, the model itself
is checked at full size, with a warning.

Recurrent layers call the kernels that transformers finds on a GPU (flash-linear-attention, causal-conv1d, mamba-ssm).
There a small copy on the GPU is compared with the CPU, too, and the model runs unpacked where they differ by 1e-3. That
path, sinks and latent attention by FlashAttention, and Gemma 4's heads of 512 dimensions have not run on a GPU.

A forward and backward of eight answers of 30 to 90 tokens to one prompt of 1,000, with random models of four layers on
two cores (`benchmarks/sharing.py`, at a3d8202; ratios within a round):

| | shared prompt | packed, each with its prompt | unpacked |
|---|---|---|---|
| Qwen3 | 0.26 s | 6.3x (5.9-7.0) | 4.9x (4.3-5.4) |
| Qwen3.5: three gated delta nets to one attention | 0.31 s | 5.7x (5.6-5.9) | 5.6x (5.4-5.6) |
| Nemotron-H: Mamba 2, MLP, Mamba 2, attention | 0.17 s | 5.5x (5.4-5.6) | 5.0x (4.9-5.0) |

Rotary frequencies of type `longrope` and `dynamic` depend on the longest sequence of a pack. With these a sequence
longer than the original context (`original_max_position_embeddings`, or `max_position_embeddings`) is refused.

The length that a model reads is `rlkit.model.positions.positions(config)`, in every command and engine: with YaRN
`factor`
times the original context, as vLLM derives it, also where `max_position_embeddings` was left as it is; without limit
for
ALiBi and Mamba. `sft`, `dpo`, `kto` and `reward_model` count longer examples as too long.

`--yarn 4` extends it four times, in every training command: YaRN (arXiv:2309.00071) over the config's
`max_position_embeddings`, for training, the reference, the embedded engine, servers that are started and exports, whose
config.json transformers, vLLM and SGLang read. The run trains on the folder `extended/` in its run folder
(`rlkit.model.yarn.yarn_folder`), which has that config.json and links to the weights; servers of `--engine-urls` must
serve it, and the adapters of a LoRA run name it as their base. Where a card names another original context (32,768 of
Qwen3's 40,960), write its `rope_parameters` into the config.json instead. Models without rotary positions, with several
kinds of them (Gemma 3) or with another scaling (Llama 3.1, gpt-oss, longrope) are refused.
`rlkit plan --yarn 4 --max-tokens 131072` counts the memory.

FP8 checkpoints are trained, by LoRA as they are ([optimizers.md](optimizers.md#an-fp8-checkpoint)); other quantized
ones (GPTQ, AWQ, bitsandbytes, MXFP4) are refused: load the bf16 or fp32 checkpoint of the same model.
[LoRA](optimizers.md#lora) adapts linear layers, GPT-2's transposed ones, and experts that
are one fused weight (Mixtral, Qwen3-MoE, gpt-oss, ...).

Fewer model types support `tp`, `cp`, `pp` and `ep` ([table](#all-model-types)), and only those are read by shards: of
any other type every rank reads the whole model before it keeps its shard. See [parallel.md](parallel.md).

## What an export has

`model/`, `best/` and `export_hf` write a checkpoint as it was read:

- Each weight has the dtype that it has in the files of `--model`; `--dtype-export bf16|fp16|fp32` gives all of them
  another.
  Training and checkpoints are in fp32 whatever it is, and resume bit for bit.
- Tensors that transformers' class has no place for (`mtp.*` of Qwen3-Next and Qwen3.5, the layer past the last one of
  DeepSeek-V3 and GLM-4.5) are copied from those files, which a line at the start says. They do not train. Where the
  files
  are gone by then, and in reward models, they are left out, and config.json promises none
  (`num_nextn_predict_layers` 0).
- `tie_word_embeddings`, `vocab_size` and `num_hidden_layers` in config.json are those of the weights; a correction
  is logged.
- `--resize-embeddings` gives tokens that were added to the tokenizer rows in embedding and head, each the mean of
  the rows
  before. It is for one process with `--engine local`, without LoRA, whose adapters would not train them.

## An export elsewhere

What other programs read of small random models, in the nightly run (`make test-exports`, `test-vllm`, `test-sglang`).
The numbers equal those of the model in the run, which has changed weights or an adapter:

| program | model, or LoRA merged | adapter | experts | images |
|---|---|---|---|---|
| peft 0.21.2 | - | log-probs | log-probs, fused ones too | - |
| lm-eval 0.4.13, `--model hf` | log-probs | log-probs, `peft=RUN/adapter` | log-probs, both ways | not tested (1) |
| llama.cpp's converters (ggml 0.25.3) | logits (2) | tensors | logits (2); adapter: (3) | tower: tensors (4) |
| vLLM 0.32.0 on a CPU | log-probs (5) | log-probs | log-probs (5) | log-probs (5) |
| SGLang 0.5.23 on a CPU | log-probs (5) | log-probs | log-probs (5) | log-probs (5) |

1. `hf-multimodal` needs torchvision.
2. Of the GGUF file, read by transformers. The tokenizer must be one that llama.cpp knows (SmolLM2's was tried): that of
   `rlkit.data.tiny` ends in "BPE pre-tokenizer was not recognized".
3. An adapter of attention layers: tensors. One of fused experts ends in "Unprocessed experts": convert `RUN/model`.
4. `--mmproj`, of Qwen3-VL; its text part is not tested.
5. After updates of a server that runs: tensors have the names of an export. No test starts a server with an export.

Not tested: inference and quantization by llama.cpp itself, Ollama, LM Studio, MLX, TensorRT-LLM, TGI.

## Images

Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Gemma 3 are trained on rows with images, by `rlkit sft`, `dpo`, `kto`,
`grpo`, `ppo` and `reward_model`. Tried with small random models; the check at load includes images.

- Rows have them as TRL, verl and OpenAI do ([data.md](data.md#images)); tools, environments and agents
  show further ones in later turns ([environments](environments.md)). The vision tower is frozen, unless
  `--train-vision`; LoRA adapts the language model only.
- An image is encoded once for all samples of a micro-batch that have the same tokens and images before it: those of a
  group, and the later turns of an episode. M-RoPE positions are those of each document, never of the pack. Gemma 3,
  whose image tokens see one another in both directions, runs batches with images unpacked.
- The embedded engine samples (`--engine local`, also with `--overlap`): from its cache, of Gemma 3 by whole sequences.
  Placeholders are never sampled.
- SGLang and vLLM servers sample too (`--engine sglang`, `vllm`). A request has the prompt's token ids with one
  placeholder an image, and each image as a PNG of the pixels that the trainer's processor makes, so that no server
  resizes it another way. The server returns the prompt as it has expanded it; other tokens than the trainer's are an
  error. On real servers on a CPU, a small random Qwen3-VL has the trainer's log-probs to 1e-4 in every turn, and after
  an update of the tower (Qwen2.5-VL was tried, too); on a GPU this has not run. Gemma 3's images, around which servers
  write tokens of their own, are refused.
- The tower of a critic or a reward model stays frozen. Where transformers has no such class for a vision model (it has
  Qwen3.5's and Gemma 3's reward model), its generic head is put on the model, and only rlkit loads the export.
- `tp`, `cp`, `pp` and `ep` are refused for batches with images. An export has the image processor's files beside it.
- Pillow reads the files: `pip install pillow`; with torchvision, transformers resizes with that.

[recipes/digits](../recipes/digits/README.md) teaches a random model of 0.8 M weights to read two digits.

## Kinds of models

{families}

## All model types

Of the causal language models of transformers {version}, and those that read images, {num_packed} are trained packed,
{num_unpacked} unpacked, and {num_refused} are refused. No small model can be built from the default config of the other
{num_unbuilt}.

The table is of small copies of default configs with random weights, and so are the tests; `llama` was also
trained from a published checkpoint (SmolLM2-135M), and `gemma3_text` for the steps of a benchmark (Gemma 3 270M). When
a checkpoint is loaded, its own config is checked.

- **layouts**: beside `replicate` and `shard`, which all types have.
- **LoRA**: whether `--lora-rank` has layers to adapt, and whether fused experts are among them.
- **embedded engine**: how `--engine local` decodes: "fast" is a decoder of its own, "cache" the model's forward with a
  cache of keys, values and states, "whole" the model's forward on whole sequences for every token. `mistral` and
  `qwen2` are "cache" for the sliding layers of their default configs: checkpoints without them (Qwen2.5) are "fast".
- **SGLang**, **vLLM**: whether {servers} list the model. Of these `llama`, `qwen3`, `qwen3_moe` and `qwen3_vl` ran on
  real servers.

This page is generated by `docs/make_models.py`.

{table}
"""

HEAD = "model type", "trained", "images", "layouts", "LoRA", "embedded engine", "SGLang", "vLLM", "reason"


def row(name: str, found: Found, how: Use, servers: Mapping[str, str]) -> str:
    """One line of the table. `servers`: the cells of SGLang and vLLM."""
    return table_row(f"`{name}`", found.status, found.images, *how, *servers.values(), found.reason)


def table_row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def families(verdicts: Mapping[str, Found]) -> Iterator[str]:
    """The table of model kinds, with one verdict each."""
    yield "| kind | for example | verdict | reason |\n|---|---|---|---|"
    for what, names in FAMILIES.items():
        found = verdicts[names[0]]
        yield table_row(what, ", ".join(f"`{n}`" for n in names), found.status, found.reason)


def served() -> tuple[list[str], dict[str, dict[str, str]]]:
    """SGLang and vLLM with their versions, and for each class of transformers whether they have it, "yes" or ""."""
    with SERVED.open() as file:
        table = csv.DictReader(file, delimiter="\t")
        return [*(table.fieldnames or [])[1:]], {line.pop("class"): line for line in table}


def read_servers() -> None:
    """Write docs/served.tsv from the packages in the user's cache, if both are there."""
    lists = {
        "sglang": ("sglang/srt/models/*.py", r"^EntryClass = (\[.*?\]|\w+)", r"\w+"),
        "vllm": (
            "vllm/model_executor/models/registry.py",
            r"^_(?:TEXT_GENERATION|MULTIMODAL)_MODELS = (\{.*?^\})",
            r'"(\w+)": \(',
        ),
    }
    names, found = [], []
    for name, (files, part, each) in lists.items():
        places = (Path.home() / ".cache" / "rlkit").glob(f"{name}-cpu-*/lib/python3*/site-packages/{name}")
        if (place := max(places, key=lambda path: path.stat().st_mtime, default=None)) is None:
            return
        installed = (
            re.fullmatch(rf"{name}(?:_cpu)?-([\d.]+).*\.dist-info", path.name) for path in place.parent.iterdir()
        )
        version = next(filter(None, installed))[1]
        texts = (path.read_text() for path in place.parent.glob(files))
        parts = (x for text in texts for x in re.findall(part, text, re.MULTILINE | re.DOTALL))
        names.append(f"{ {'sglang': 'SGLang', 'vllm': 'vLLM'}[name] } {version}")
        found.append({x for text in parts for x in re.findall(each, text)})
    lines = [[kind, *("yes" * (kind in of) for of in found)] for kind in sorted({*map(class_of, MODEL_TYPES)})]
    with SERVED.open("w") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([["class", *names], *lines])


def class_of(model_type: str) -> str:
    """The class of transformers that trains a type."""
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if model_type in TYPES else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names[model_type]


def page(verdicts: Mapping[str, Found], uses: Mapping[str, Use]) -> str:
    """docs/models.md."""
    kinds = ("packed", "unpacked", "refused", "not built")
    count = [sum(v.status == kind for v in verdicts.values()) for kind in kinds]
    servers, has = served()
    rows = (row(name, verdicts[name], uses[name], has[class_of(name)]) for name in sorted(verdicts))
    return PAGE.format(
        version=transformers.__version__,
        num_packed=count[0],
        num_unpacked=count[1],
        num_refused=count[2],
        num_unbuilt=count[3],
        servers=" and ".join(servers),
        families="\n".join(families(verdicts)),
        table="\n".join([table_row(*HEAD), "|---" * len(HEAD) + "|", *rows]),
    )


if __name__ == "__main__":
    logging.getLogger("rlkit").setLevel(logging.ERROR)
    read_servers()
    found = {name: verdict(name) for name in MODEL_TYPES}
    (DOCS / "models.md").write_text(page(found, {name: use(name, found[name]) for name in found}))
