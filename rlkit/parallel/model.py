"""Load a Hugging Face causal LM for packed training, and run it: batch in, log-probs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.kernels.linear_logp import linear_logp
from rlkit.packing import join, microbatches, pack, with_streams
from rlkit.parallel.attention import as_inference, plan_batch, register
from rlkit.types import Batch, LogProbs, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Policy = Callable[[Batch], LogProbs]  # `partial(forward, model, temperature=...)`
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_model(path: str | os.PathLike[str], *, device: str = "cpu") -> PreTrainedModel:
    """A causal LM from a local folder or a hub id, ready for `forward` (see `prepare`).

    The parameters are fp32, whatever the checkpoint holds: under bf16 compute they are the master weights.
    """
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    _check_path(path)
    model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    return prepare(model.to(device))


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Set a transformers causal LM up for packed attention, in place, and check it against its own logits.

    Dropout is off: scoring and training must give the same numbers. A model whose packed log-probs are not its own
    (softcapped attention, scaled logits, ...) is refused by name.
    """
    model.set_attn_implementation(register())
    model.eval()
    _self_check(model)
    return model


def forward(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, dtype: str = "fp32") -> LogProbs:
    """Log-prob of each target and entropy at its place, both 0 where the mask is False, on the model's device.

    A shared prompt is forwarded once. The log-probs are of the temperature-scaled, untruncated distribution, in fp32.
    dtype: "fp32", or "bf16": matrix products in bf16 (autocast) over fp32 master weights. "fp16" is refused.
    """
    if dtype not in DTYPES:
        why = "fp16 gradients underflow without loss scaling; use bf16" if dtype == "fp16" else "choose fp32 or bf16"
        raise ValueError(f"dtype {dtype!r} is not supported: {why}")
    with torch.autocast(model.device.type, DTYPES[dtype], enabled=dtype != "fp32"):
        hidden = hidden_states(model, batch).to(DTYPES[dtype])
    head = model.get_output_embeddings()
    return linear_logp(
        hidden,
        head.weight.to(DTYPES[dtype]),
        batch.targets.to(model.device),
        bias=getattr(head, "bias", None),
        temperature=temperature,
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
        mask=batch.mask.to(model.device),
    )


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Last hidden states `[T, D]` of the batch's own tokens (the prefixes' are dropped).

    An empty batch still runs the model, on one token that is dropped: under sharding every rank takes part.
    """
    if batch.num_tokens == 0:
        return hidden_states(model, _dummy(batch.tokens.device))[:0]
    tokens, positions = join(batch)
    out = model.base_model(
        input_ids=tokens[None].to(model.device),
        position_ids=positions[None].to(model.device),
        use_cache=False,
        attention_plan=plan_batch(batch, device=model.device),
    )
    return out.last_hidden_state[0, batch.prefix_tokens.numel() :]


def with_old_logp(policy: Policy, batch: Batch, *, max_tokens: int) -> Batch:
    """The batch with `old_logp`: the policy's log-probs at the weights it has now."""
    return with_streams(batch, old_logp=score(policy, batch, max_tokens=max_tokens))


def with_ref_logp(reference: Policy | None, batch: Batch, *, max_tokens: int) -> Batch:
    """The batch with `ref_logp` of a frozen second policy; unchanged when there is none (`kl_coef` 0)."""
    return batch if reference is None else with_streams(batch, ref_logp=score(reference, batch, max_tokens=max_tokens))


@torch.no_grad()
def score(policy: Policy, batch: Batch, *, max_tokens: int) -> Float[Tensor, "T"]:
    """The policy's log-probs over the whole batch, micro-batch by micro-batch, in the batch's own order."""
    out = torch.zeros(batch.num_tokens, device=batch.tokens.device)
    rows = torch.arange(batch.num_tokens, device=batch.tokens.device)
    for micro, *places in microbatches((batch, rows), max_tokens=max_tokens):
        out[places[0]] = policy(micro).logp.to(out)
    return out


def _dummy(device: torch.device) -> Batch:
    return pack([[Trajectory([0], [0], [False], [0.0], [-1])]]).to(device)


def _check_path(path: str | os.PathLike[str]) -> None:
    """A path that looks like a folder must be one with a config; anything else is left to the hub."""
    looks_local = os.path.isabs(path) or str(path).startswith((".", "~")) or Path(path).exists() or "/" not in str(path)
    if looks_local and not (Path(path) / "config.json").is_file():
        found = "a folder without config.json" if Path(path).is_dir() else "no folder"
        raise FileNotFoundError(
            f"model {str(path)!r}: {found}; give a folder saved by save_pretrained, or a hub id a/b"
        )


@torch.no_grad()
def _self_check(model: PreTrainedModel) -> None:
    """Our log-probs must be the model's own, with and without a shared prompt; otherwise it is refused by name."""
    device, name = model.device, model.config.model_type
    ids = torch.arange(3, 11, device=device) % model.config.get_text_config().vocab_size
    t = Trajectory(ids[:4].tolist(), ids[4:].tolist(), [True] * 4, [0.0] * 4, [0] * 4)
    try:
        with as_inference(model):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        ours = [forward(model, pack([[t, t]], share_prompts=share).to(device)) for share in (True, False)]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"model type {name!r} cannot be trained packed: {error}") from error
    true = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[3:, 0]
    for out in ours:
        off = (out.logp[out.logp != 0][:4] - true).abs().max().item()
        if not off < 1e-3:
            raise ValueError(
                f"model type {name!r} cannot be trained packed: its log-probs differ from its own forward by {off:.2g} "
                "(does it scale its logits, or use an attention that is not causal softmax?)"
            )
