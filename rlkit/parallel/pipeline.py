"""Pipeline parallelism for dense models: the layers in stages, packed micro-batches in flight between them (1F1B).

    stage = cut_stage(model, mesh)                       # Parallel(pp=2, ...); every rank gives the whole model
    losses = pipeline_step(stage, micros, loss)          # instead of forward and backward; then optimizer_step

It goes with `tp`, `shard` and `replicate`, not with context parallel, MoE or tied embeddings. Parameters keep their
names; a stage has (and `stream_weights` gives) only its own. With M micro-batches and S stages (S - 1) / (M + S - 1) of
the time is idle, and micro-batches are padded to the longest. Reference: arXiv:2104.04473, torch.distributed.pipelining
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

from rlkit.packing import join, select
from rlkit.parallel.attention import register
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.model import _log_probs
from rlkit.parallel.parallelize import is_tied, split_tensors
from rlkit.parallel.plans import check_model
from rlkit.parallel.segment_plan import Segment, plan, segments
from rlkit.types import Batch, LogProbs


class _Skip(nn.Module):
    """In place of what another stage holds."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Stage(nn.Module):
    """This rank's part of the model. `pipeline_step` sets `work`: hidden states to hidden states, at the end a loss."""

    def __init__(self, model: Any, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.mesh, self.dtype = model, mesh, dtype
        self.index, self.count = mesh.data.get_local_rank("pp"), mesh.sizes.pp
        self.last = self.index + 1 == self.count
        self.work: list[Callable[[Tensor], Tensor]] = []

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        """Do the work of micro-batch `index`."""
        return self.work[int(index)](x)


def cut_stage(
    model: Any, mesh: Mesh, *, dtype: torch.dtype = torch.float32, activation_checkpointing: bool = False
) -> Stage:
    """This rank's stage of `model`: its share of the layers, on the first the embedding, on the last norm and head."""
    base, sizes = model.base_model, mesh.sizes
    check_model(model.config, tp=sizes.tp)
    if is_tied(model) or sizes.cp > 1 or sizes.ep > 1 or len(base.layers) < sizes.pp:
        raise ValueError(f"pp={sizes.pp} needs untied embeddings, cp=1, ep=1 and at least {sizes.pp} layers")
    model.to(torch.float32).set_attn_implementation(register())
    model.eval()
    if sizes.tp > 1:
        split_tensors(model, mesh)
    stage = Stage(model, mesh, dtype)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    cut: Any = partial(fully_shard, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    first, end = (len(base.layers) * i // sizes.pp for i in (stage.index, stage.index + 1))
    for i, layer in enumerate(base.layers):
        if activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        base.layers[i] = cut(layer) if first <= i < end else _Skip()
    base.embed_tokens = None if stage.index else base.embed_tokens
    if not stage.last:
        base.norm, model.lm_head = _Skip(), None
    for module in cut(stage).modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return stage


def pipeline_step(
    stage: Stage, micros: Sequence[Batch], loss: Callable[[LogProbs, int], Tensor], *, temperature: float = 1.0
) -> list[Tensor]:
    """Forward and backward of all micro-batches; their losses on the last stage, [] elsewhere. Gradients are sums.

    All ranks of a data parallel place give the same micro-batches. `loss(out, i)` is the loss of `micros[i]`.
    """
    device, count = stage.mesh.device, max(len(micros), stage.count)  # a schedule needs as many as stages: empty ones
    size = max(m.prefix_tokens.numel() + m.num_tokens for m in micros)
    padded = [m.to(device) for m in (*micros, *[select(micros[0], [])] * (count - len(micros)))]
    value = lambda out, i: loss(out, i) if i < len(micros) else out.logp.sum()  # noqa: E731
    stage.work = [partial(_run, stage, m, size, partial(value, i=i), temperature) for i, m in enumerate(padded)]
    numbers, one = torch.arange(count, device=device), torch.empty(1, device=device, requires_grad=True)
    hidden = torch.empty(1, size, stage.model.config.hidden_size, dtype=stage.dtype, device=device, requires_grad=True)
    shapes: Any = {"input_args": hidden if stage.index else numbers[:1], "output_args": one if stage.last else hidden}
    pipe = PipelineStage(stage, stage.index, stage.count, device, group=stage.mesh.group("pp"), **shapes)
    schedule = Schedule1F1B(pipe, count, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    found: list[Tensor] = []
    target: Any = {"target": numbers, "losses": found} if stage.last else {}
    schedule.step(*(() if stage.index else (numbers,)), index=numbers, return_outputs=False, **target)
    return [x.detach() for x in found[: len(micros)]]


def _run(stage: Stage, batch: Batch, size: int, loss: Callable[..., Tensor], temperature: float, x: Tensor) -> Tensor:
    model, (tokens, positions), start = stage.model, join(batch), batch.prefix_tokens.numel()
    end = tokens.numel()
    tokens, positions = (torch.cat([s, torch.arange(size - end, device=s.device)])[None] for s in (tokens, positions))
    spans = [*segments(batch), Segment(end, size - end, [(end, size - end)])]
    given: Any = {"inputs_embeds": x} if stage.index else {"input_ids": tokens}
    given |= {"position_ids": positions, "attention_plan": plan(spans, device=x.device)}
    hidden = model.base_model(**given, use_cache=False).last_hidden_state
    if not stage.last:
        return hidden
    options: Any = {"batch": batch, "temperature": temperature, "dtype": torch.float32}
    return loss(LogProbs(*_log_probs(model, hidden[0, start:end], lambda s: s, **options))).float().reshape(1)
