"""Writes docs/models.md: every causal language model of the installed transformers, and whether rlkit trains it.

Run `python docs/make_models.py` after changing `rlkit.model.families` or transformers (some minutes); the nightly
tests compare the page with the models themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests" / "model"))

from model_types import FAMILIES, MODEL_TYPES, Verdict, verdict  # noqa: E402

PAGE = """# Models

Sequences are trained packed, end to end in one stream, and prompts are shared (`rlkit.model.forward.forward`). A model
type is trained if its packed log-probs equal those of its own forward, one sequence at a time, to 1e-4. Otherwise it is
refused by name, before its weights are loaded. Supported are decoders of full and sliding attention that go through
transformers' `AttentionInterface` and read `position_ids`, with softcaps, scaled logits (Cohere, Granite), biases,
query and key norms, learned or rotary positions, and mixtures of experts. Of several modalities only text is trained.

The check runs wherever a model is loaded or prepared: `load_model`, `prepare`, `load_parallel`, `parallelize`,
`load_value_model`, `load_reward_model`. It runs a small copy of the model with large random weights on the CPU: a layer
of each kind, windows shorter than the sequences. That takes about a second, once: the verdict is kept in the user's
cache (`$XDG_CACHE_HOME`, default `~/.cache`), for this config and these versions of torch, transformers and rlkit.
Where no small copy can be built, the model itself is checked at full size, with a warning.

Rotary frequencies of type `longrope` and `dynamic` depend on the longest sequence of a pack. With these a sequence
longer than the original context (`original_max_position_embeddings`, or `max_position_embeddings`) is refused.

With `tp`, `cp`, `pp` or `ep` fewer model types are covered: see [parallel.md](parallel.md).

## Kinds of models

{families}

## All model types

Of the causal language models of transformers {version}, {num_trained} are trained and {num_refused} are refused. The
default config of {num_unbuilt} builds no small model. A default config may differ from that of a checkpoint: what
counts is the check of the config that is loaded. This page is written by `docs/make_models.py`.

{table}
"""


def row(name: str, found: Verdict) -> str:
    """One line of the table."""
    return f"| `{name}` | {found.status} | {found.reason} |"


def families(verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    """What is special of a model, and what becomes of it."""
    yield "| kind | for example | verdict | reason |\n|---|---|---|---|"
    for what, names in FAMILIES.items():
        found = verdicts[names[0]]
        yield f"| {what} | {', '.join(f'`{n}`' for n in names)} | {found.status} | {found.reason} |"


def page(verdicts: Mapping[str, Verdict]) -> str:
    """docs/models.md."""
    count = [sum(v.status == status for v in verdicts.values()) for status in ("trained", "refused", "not built")]
    rows = (row(name, verdicts[name]) for name in sorted(verdicts))
    table = ["| model type | verdict | reason |\n|---|---|---|", *rows]
    return PAGE.format(
        version=transformers.__version__,
        num_trained=count[0],
        num_refused=count[1],
        num_unbuilt=count[2],
        families="\n".join(families(verdicts)),
        table="\n".join(table),
    )


if __name__ == "__main__":
    (DOCS / "models.md").write_text(page({name: verdict(name) for name in MODEL_TYPES}))
