"""How a model is cut over tensor parallel ranks, and which models are covered.

The cut is the model's own plan, which transformers ships, read into DTensor styles: column-parallel projections into
heads and hidden units, row-parallel ones back, embeddings and the head cut along the vocabulary.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

# model_type -> dimension of the heads in the input of q_norm and k_norm, where the model has them
COVERED = {"llama": None, "mistral": None, "qwen2": None, "gemma2": None, "qwen3": 2, "qwen3_moe": 2, "gemma3_text": 1}


def check_model(config: Any, *, tp: int = 1, cp: int = 1, ulysses: bool = False) -> None:
    """Refuse a model that would not be computed exactly, with the reason.

    Errors: ValueError for an architecture that is not covered, and for head counts that the sizes do not divide.
    """
    kind, text = config.model_type, config.get_text_config()
    if kind not in COVERED:
        raise ValueError(
            f"model type {kind!r} is not covered in parallel, only {', '.join(sorted(COVERED))}. Another one "
            "needs its tensor parallel plan and its attention checked against a single process first"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise ValueError(f"model type {kind!r} with use_bidirectional_attention is no causal model")
    kv_heads = text.num_key_value_heads
    split = tp * (cp if ulysses else 1)
    if kv_heads % split:
        fits = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        what = f"tp={tp} * cp={cp} (ulysses)" if ulysses else f"tp={tp}"
        fix = "; context parallel without ulysses has no such limit" if ulysses else ""
        raise ValueError(f"{what} must divide the {kv_heads} key-value heads of the model: use {fits}{fix}")
    if text.intermediate_size % tp:
        raise ValueError(f"tp={tp} must divide the intermediate_size {text.intermediate_size}")


def tensor_plan(model: Any) -> dict[str, ParallelStyle]:
    """Module name -> DTensor style, for `parallelize_module`.

    q_norm and k_norm act on single heads and their weight is shared by all of them: its gradient is a sum over the
    ranks' heads. A plan that leaves them out trains on the wrong gradient without any error; here their input is
    declared as cut along the heads.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    head_dim_at = COVERED[model.config.model_type]
    prefix = model.base_model_prefix + "."
    plan: dict[str, ParallelStyle] = {prefix + "embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.get_output_embeddings() is not None:
        plan["lm_head"] = ColwiseParallel()
    if head_dim_at is not None:
        norms = SequenceParallel(sequence_dim=head_dim_at, use_local_output=True)
        plan |= {f"{prefix}layers.*.self_attn.{n}_norm": norms for n in "qk"}
    for pattern, style in model.base_model.config.base_model_tp_plan.items():
        if prefix + pattern in plan or ".experts" in pattern:
            continue  # ours: above, and `rlkit.parallel.moe`
        if style not in styles:
            raise ValueError(f"the model's tensor parallel plan has {pattern}: {style!r}, which is not covered")
        plan[prefix + pattern] = styles[style]()
    names = dict(model.named_modules())
    found = {name: style for pattern, style in plan.items() for name in fnmatch.filter(names, pattern)}
    # a matrix of a layer that is not cut would be summed or repeated wrongly
    missing = [n for n, m in names.items() if isinstance(m, nn.Linear) and n.startswith(prefix) and n not in found]
    if missing:
        raise ValueError(f"the model's tensor parallel plan leaves out {missing[0]} ({len(missing)} in all)")
    return found
