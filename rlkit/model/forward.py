"""Load a Hugging Face causal LM for packed training, and run it: batch in, log-probs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rlkit._util.files import no_code
from rlkit._util.numbers import is_number, show
from rlkit._util.tensors import readable
from rlkit.kernels.linear_logp import linear_log_kept_mass, linear_logp
from rlkit.kernels.logits_logp import logits_logp
from rlkit.losses.corrections import log_support_mass
from rlkit.losses.distillation import CHUNK_SIZE, by_rows
from rlkit.model import families, vision
from rlkit.model.fp8 import blocks_of, rescaled, unquantized
from rlkit.model.lora import Snapshot, adapters, at_snapshot, without_adapter
from rlkit.model.positions import check_positions
from rlkit.model.pretrained import NO_CODE, building, explained, load_config, no_progress_bar
from rlkit.model.recurrent import plan_rows
from rlkit.model.routing import check_experts
from rlkit.model.sharding import device_of, dtype_of, inside, mesh_of, whole_of
from rlkit.model.source import check_names, check_sizes, untie
from rlkit.model.unpacked import unpacked_outputs
from rlkit.packing import check_batch, join, pack, with_streams
from rlkit.parallel.attention import attending, has_flash, recomputing, rows, to_device
from rlkit.parallel.context import plan_layout
from rlkit.parallel.data import rank_microbatches, summed
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.vocab import is_sharded, sharded_linear_logp
from rlkit.types import Batch, LogProbs, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PolicyFn = Callable[[Batch], LogProbs]  # a `Policy`, or any other source of log-probs
Spread = Callable[[Tensor], Tensor]
Head = Callable[[Tensor, Spread], tuple[Tensor, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """A model with the settings of its log-probs: `policy(batch)` is `forward(model, batch, ...)`."""

    model: Any
    temperature: float = 1.0
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        families.check_is_model(self.model)
        if not is_number(self.temperature) or self.temperature <= 0:
            raise ValueError(f"temperature must be a number above 0, got {show(self.temperature)}")

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the model was cut over; None for a plain model."""
        return mesh_of(self.model)

    def __call__(self, batch: Batch) -> LogProbs:  # noqa: D102
        return forward(self.model, batch, temperature=self.temperature, dtype=self.dtype)


def make_policy(model: Any, *, temperature: float = 1.0, dtype: str | None = None) -> Policy:
    """The `Policy` of a model; `dtype=None` is bf16 on a CUDA GPU that supports it, else fp32."""
    families.check_is_model(model)
    return Policy(model, temperature=temperature, dtype=dtype or default_dtype(device_of(model)))


def default_dtype(device: torch.device | str) -> str:
    """`"bf16"` for a CUDA GPU that computes in it, else `"fp32"`."""
    on_gpu = torch.device(device).type == "cuda"
    return "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def load_model(
    path: str | os.PathLike[str], *, device: str = "cpu", train_vision: bool = False, dtype: Any = torch.float32,
    min_rows: int = 0,
) -> PreTrainedModel:  # fmt: skip
    """A causal LM from a local folder or a hub id, ready for `forward` (see `prepare_model`).

    A vision tower is frozen, unless `train_vision`. The parameters are fp32, whatever the checkpoint holds: under bf16
    compute they are the master weights. `dtype` "auto" leaves them in the checkpoint's, for `add_lora(base=...)`; the
    linear layers of an FP8 one (`rlkit.model.fp8`) then stay as they are, frozen, for `add_lora`, and all else is fp32.
    `min_rows` is that of `resized`.

    Errors: FileNotFoundError; ValueError for a model type that is not causal, and for a checkpoint that is
    quantized or lacks some weights (a classifier has no token head), which transformers would initialise at random.
    """
    config = load_config(path)
    families.check_causal_lm(config)
    families.check_architecture(config, forward)
    model, missing = read_pretrained(vision.auto_class(config), path, config, dtype=dtype, hold=dtype == "auto")
    if dtype == "auto" and any(x.dtype in (torch.bfloat16, torch.float16) for x in model.buffers()):
        # constants such as Gemma's scale, which fp32 does not round
        model, _ = read_pretrained(vision.auto_class(config), path, config, dtype=torch.float32, hold=True)
    if missing:
        names, fix = ", ".join(sorted(missing)[:5]), "is it a causal language model?"
        fix = "if it has no head of its own, set tie_word_embeddings" if {*missing} == {"lm_head.weight"} else fix
        raise ValueError(f"model {str(path)!r} has no weights for {names}: {fix}")
    if not train_vision:
        vision.freeze_tower(model)
    return prepare_model(resized(model, min_rows).to(device))


@torch.no_grad()
def resized(model: Any, min_rows: int) -> Any:
    """The model with at least `min_rows` rows in its embedding and head; each new row is the mean of those before.

    A new token is then read as an average one, and has the logit of the mean row: about as likely as any other. The
    config's `vocab_size` follows. Differs: transformers draws new rows at random around that mean.
    Reference: https://nlp.stanford.edu/~johnhew/vocab-expansion.html
    """
    before = model.get_input_embeddings().weight.shape[0]
    if min_rows <= before:
        return model
    model.resize_token_embeddings(min_rows, mean_resizing=False)
    for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        for x in (module.weight, getattr(module, "bias", None)):
            if x is not None:
                x[before:] = x[:before].double().mean(0).to(x.dtype)
    return model


def read_pretrained(
    kind: Any, path: str | os.PathLike[str], config: Any, *, dtype: Any, hold: bool = False, **options: Any
) -> tuple[Any, list[str]]:
    """`kind.from_pretrained` in `dtype`, and the names of weights that the checkpoint of this `config` lacks.

    Those of an FP8 checkpoint become fp32; with `hold` its linear layers stay as they are (`rlkit.model.fp8.rescaled`).
    The progress bar of transformers is shown only for checkpoints that take seconds: above 1 GB, or from the hub.

    Errors: ValueError, with the path, for weights that cannot be read, have another shape or are quantized; OSError
    for a damaged generation_config.json, whose stop tokens transformers would leave out in silence.
    """
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    if (Path(path) / "generation_config.json").is_file():
        with explained(path, "generation_config.json"):
            GenerationConfig.from_pretrained(path)
    check_sizes(path, config)
    is_fast = Path(path).is_dir() and sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) < 1e9
    if (block := blocks_of(config)) is not None:
        options = {"config": unquantized(config, **options)}
        dtype = torch.bfloat16 if dtype == "auto" else dtype
    try:
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, by name
        bar = no_progress_bar() if is_fast else nullcontext()
        report = no_report() if block is not None else nullcontext()
        with building(path), bar, report:
            model, info = kind.from_pretrained(str(path), dtype=dtype, **options, **NO_CODE)
    except SafetensorError as error:
        fault = f"its safetensors are damaged ({error}): copy or download it again"
        raise ValueError(f"model {str(path)!r}: {fault}") from None
    except UnpicklingError as error:
        names = " or ".join(sorted(file.name for file in Path(path).glob("*.bin")))
        with no_code(f"model {str(path)!r}: {names}", kind="file of weights"):
            raise error
    if block is None:
        families.check_leftover(path, info["unexpected_keys"])
    check_names(path, info["missing_keys"], info["unexpected_keys"])
    if mismatched := sorted(info["mismatched_keys"]):
        name, there, here = mismatched[0]
        fault = f"{name} is {[*there]} there and {[*here]} in the model of its config"
        raise ValueError(f"model {str(path)!r}: {fault} ({len(mismatched)} differences in all)")
    if block is not None:
        families.check_leftover(path, rescaled(model, path, block, hold=hold, unexpected=info["unexpected_keys"]))
    _check_ends(model, path)
    return model, info["missing_keys"]


def _check_ends(model: Any, path: Any) -> None:
    """Refuse an embedding or a head of zeros, and let the config say whether both are one matrix."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    for name, weight in (("embedding", embedding), ("head", getattr(head, "weight", embedding))):
        if not (weight[:256].any() or weight.any()):
            raise ValueError(f"model {str(path)!r}: its {name} is 0 everywhere: copy or download its weights again")
    if head is not None and hasattr(head, "weight"):
        untie(model.config, equal=head.weight is embedding, path=path)


@contextmanager
def no_report() -> Iterator[None]:
    """Inside the block transformers lists no weights that a file lacks, or that it does not read."""
    log = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Set a transformers causal LM up for `forward`, in place: for packed attention, or where that is not right, for
    its own forward on padded rows, with a warning.

    Dropout is off: scoring and training must give the same numbers. An architecture is checked on a small copy the
    first time, see `rlkit.model.families`.

    Errors: ValueError for a model that is not causal.
    """
    families.check_is_model(model)
    if (verdict := families.check_loaded(model, forward)).packed:
        families.set_packed(model, replay=verdict.replay)
    return model.eval()


def forward(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, dtype: str = "fp32") -> LogProbs:
    """Log-prob of each target and entropy at its position, both 0 where the mask is False, on the model's device.

    A shared prompt is forwarded once. The log-probs are of the temperature-scaled, untruncated distribution, in fp32;
    of a batch with `support`, renormalised over it (`rlkit.losses.log_support_mass`; logits are computed 256 rows at a
    time, and again in the backward). The entropy is always that of the whole vocabulary.
    dtype: "fp32", or "bf16": matrix products in bf16 (autocast) over fp32 master weights. "fp16" is refused.

    On a model cut by `parallelize` all ranks call it together. Ranks with the same data parallel coordinate pass the
    same batch, get the same log-probs, of the whole batch, and must backward the same loss. The dtype is then that of
    `parallelize`, and `dtype="fp32"` does not change it.

    Errors: ValueError for another dtype, a batch that was sampled at another temperature, a model that is not prepared
    or is in train mode with dropout, and a sequence that is too long for the model's rotary frequencies.
    """
    _check_temperature(batch, temperature)
    if dtype not in DTYPES:
        why = "fp16 gradients underflow without loss scaling; use bf16" if dtype == "fp16" else "choose fp32 or bf16"
        raise ValueError(f"dtype {dtype!r} is not supported: {why}")
    head = partial(log_probs_head, model=model, batch=batch, temperature=temperature, dtype=DTYPES[dtype])
    return LogProbs(*token_outputs(model, batch, head, outputs=2, dtype=DTYPES[dtype]))


def _check_temperature(batch: Batch, temperature: float) -> None:
    """Refuse log-probs at another temperature than that of `batch.rollout_logp`: their ratio compares two models."""
    check_batch(batch)
    if batch.temperature not in (None, temperature):
        raise ValueError(
            f"the batch was sampled at temperature {batch.temperature:g}, and the log-probs are at {temperature:g}: "
            f"give both one value, Policy(model, temperature={batch.temperature:g}), or score at another one by "
            "replace(batch, temperature=None)"
        )


def token_outputs(
    model: PreTrainedModel, batch: Batch, head: Head, *, outputs: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "T"], ...]:
    """`head(hidden, spread)` for every token of the batch, where `hidden` are the model's last hidden states.

    `head` gets this rank's rows, `hidden [R, D]`, and `spread`, which maps a `[T]` stream of the batch to the same rows
    (0 in rows that hold no token of it). It returns `outputs` tensors `[R]`. The result is `[T]`, complete on every
    rank of the last pipeline stage, and zeros on the other stages (see `rlkit.parallel.pipeline`). The parameters of a
    head must be in the model, so that they are sharded and their gradients summed with it.
    """
    mesh = mesh_of(model)
    if mesh is not None and mesh.pp_rank + 1 < mesh.sizes.pp:
        head = lambda hidden, _: (hidden.sum(-1, dtype=torch.float32),) * outputs  # noqa: E731
    return inside(model, _token_outputs, batch, head, dtype)


def _token_outputs(model: Any, batch: Batch, head: Head, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """An empty batch runs the model on one dummy token: under sharding every rank must take part."""
    _check_no_dropout(model)
    packed, device, mesh = families.runs_packed(model), device_of(model), mesh_of(model)
    if mesh is None and is_sharded(next(model.parameters())):
        raise ValueError("the model was cut over ranks: use what `parallelize` returned")
    move = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
    dummy = [[Trajectory([0], [0], [False], [0.0], [-1])]]
    some = batch if batch.num_tokens else pack(dummy).to(batch.tokens.device)
    joined = join(some)
    families.check_prompt_ids(joined[0], model, "the batch's prompt and input ids")
    check_positions(int(joined[1].max()) + 1, model.config, setting="the longest sequence of a batch", fix="shorten it")
    if has_images := vision.has_images(some):
        families.check_images(model)
    if not packed or (has_images and not vision.packs_images(model)):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = unpacked_outputs(model, move(joined[0]), some, logits=families.gives_logits(model), mesh=mesh)
            out = out if has_images else vision.with_tower(model, out)
        return tuple(x.to(model.device, copy=True) for x in head(out[: batch.num_tokens], move))
    _check_recomputed(model)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        seen = vision.shown_images(model, some, joined[0]) if has_images else None
        tree, padded = plan_rows(model, some, images=None if seen is None else seen.names)
        layout = plan_layout(some, mesh, device=device, flash=_flash(model, device, dtype), tree=tree)
        ids, positions = layout.local(move(joined[0]))[None], layout.local(move(joined[1]))[None]
        pictures: dict[str, Tensor] = {}
        if seen is not None:
            positions = layout.local(move(vision.rotary_positions(model, some, *joined).T)).T[:, None]
            pictures = vision.image_inputs(seen.at(None if tree is None else tree.source), device)
        both = [x for x in (some.prefix_experts, some.experts) if x is not None]
        if (experts := torch.cat(both) if both else None) is not None:
            check_experts(model, experts)
            experts = layout.local(move(experts))
        with attending(layout.plan._replace(rows=to_device(padded, device), experts=experts)):
            out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **pictures)
        layout = layout if batch.num_tokens else layout.empty()
        hidden = rows(out.last_hidden_state[0], layout.tokens)
        hidden = hidden if has_images else vision.with_tower(model, hidden)
    outputs = head(hidden, lambda x: layout.spread(move(x)))
    return tuple(layout.collect(x).to(model.device, copy=True) for x in outputs)  # FSDP2 warns about views


def _check_no_dropout(model: Any) -> None:
    """Refuse a model in train mode that has dropout below its head, whose own is not applied.

    That of adapters alone (`rlkit.model.lora.dropping`) leaves the model in eval mode.
    """
    if model.training and (name := next(dropping_layers(model), None)) is not None:
        why = "log-probs of the same weights would differ from call to call"
        raise ValueError(f"the model is in train mode and has dropout ({name}): {why}; call model.eval()")


def dropping_layers(model: Any) -> Iterator[str]:
    """The names of the layers below the head that drop in train mode."""
    for name, module in model.base_model.named_modules():
        rates = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
        if any(isinstance(x, float) and x > 0 for key, x in rates.items() if key == "p" or "dropout" in key):
            yield name


def _check_recomputed(model: Any) -> None:
    """Refuse transformers' activation checkpointing where it would recompute the layers of a pack without its plan."""
    if not (model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())):
        return
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    if any(getattr(f, "keywords", {}).get("context_fn") is not recomputing for f in functions if f is not None):
        fix = '{"use_reentrant": False, "context_fn": rlkit.parallel.attention.recomputing}'
        fault = "gradient checkpointing would recompute layers without the plan of the pack"
        raise ValueError(f"{fault}: call model.gradient_checkpointing_enable({fix})")


def _flash(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    dtype = dtype_of(model) if dtype == torch.float32 else dtype
    config = model.config.get_text_config()
    softcap = getattr(config, "attn_logit_softcapping", None)
    return has_flash(device, dtype, head_dim=_head_dim(config), softcap=softcap is not None)


def _head_dim(config: Any) -> int:
    """The largest size of a query, key or value: values may be smaller (MLA), and layers may differ (Gemma 4)."""
    if getattr(config, "is_heterogeneous", False):
        return max(map(_head_dim, config.per_layer_config))
    latent = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    head_dim = latent or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(head_dim, *(getattr(config, name, None) or 0 for name in ("global_head_dim", "v_head_dim")))


def log_probs_head(
    hidden: Tensor, spread: Spread, *, model: Any, batch: Batch, temperature: float, dtype: torch.dtype
) -> LogProbs:
    """The head of `token_outputs` that gives log-probs, over `batch.support` where it is there, and entropies."""
    mesh, mask, targets = mesh_of(model), batch.mask, spread(batch.targets)
    if families.gives_logits(model):
        out = logits_logp(hidden, targets, mask=spread(mask), temperature=temperature)
    else:
        states, weight, options = head_inputs(model, hidden, temperature=temperature, dtype=dtype)
        if mask.device.type != "cpu" or (mesh is not None and mesh.sizes.cp > 1):
            mask = spread(mask)  # otherwise it stays on the CPU, which saves a wait for the device
        compute = sharded_linear_logp if is_sharded(weight) else linear_logp
        out = compute(states, weight, targets, mask=mask, **options)
    if batch.support is None:
        return out
    logits, where = logits_of(model, temperature=temperature, dtype=dtype), spread(batch.mask)
    of_rows = lambda x, ids: log_support_mass(logits(x), ids)  # noqa: E731
    mass = by_rows(of_rows, hidden, spread(batch.support), chunk_size=CHUNK_SIZE, mask=where)
    return LogProbs((out.logp - mass).clamp(max=0), out.entropy)


def _log_kept_mass(
    hidden: Tensor, spread: Spread, *, model: Any, batch: Batch, params: SamplingParams, dtype: torch.dtype
) -> tuple[Tensor]:
    if families.gives_logits(model):
        fault = "its logits are not those of one head, so the mass that truncated sampling keeps is not computed"
        raise ValueError(f"model type {model.config.model_type!r}: {fault}; use top_p=1, top_k=0 and min_p=0")
    hidden, weight, options = head_inputs(model, hidden, temperature=params.temperature, dtype=dtype)
    if is_sharded(weight):  # the limits compare the tokens of all shards
        weight, bias = weight.full_tensor(), options["bias"]  # type: ignore[attr-defined]
        options["bias"] = None if bias is None else bias.full_tensor()
    limits: dict[str, Any] = {"top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p}
    return (linear_log_kept_mass(hidden, weight, mask=spread(batch.mask), **limits, **options),)


def head_inputs(
    model: Any, hidden: Tensor, *, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Hidden states and head weight in the dtype of their product, and keyword arguments of the log-prob kernels."""
    head = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if dtype != torch.float32:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return hidden, weight, {"bias": bias, "temperature": temperature / families.logit_scale(config), "softcap": softcap}


def logits_of(model: Any, *, temperature: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The function from hidden states `[R, D]` to logits `[R, V]` at the temperature, in fp32.

    Its gradient reaches the head's weight, of which every rank holds all columns here.
    """
    if families.gives_logits(model):
        return lambda x: x.float() / temperature
    empty = torch.empty(0, device=model.device)
    _, weight, options = head_inputs(model, empty, temperature=temperature, dtype=dtype)
    weight, bias = map(whole_of, (weight, options["bias"]))
    softcap, scale = options["softcap"], options["temperature"]

    def logits(hidden: Tensor) -> Tensor:
        z = F.linear(hidden.to(weight), weight).float()
        z = z if bias is None else z + bias.float()
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / scale

    return logits


def reference_policy(policy: Policy, reference: Any, *, moves: bool = False) -> PolicyFn | None:
    """`policy` with the model `reference`; where that is the policy's own model, without its adapter, and of a
    `rlkit.model.lora.snapshot` with the adapter of that time. None for None.

    Errors: ValueError where `reference` is the policy's model, and it has no adapter or the reference `moves`.
    """
    if reference is None:
        return None
    if isinstance(reference, Snapshot) and reference.model is policy.model and not moves:
        return at_snapshot(policy, reference)
    families.check_is_model(reference, "reference")
    if reference is not policy.model:
        return replace(policy, model=reference)
    if moves or not adapters(reference):
        fault = "reference is the model that trains, which works where it has an adapter"
        raise ValueError(f"{fault} (rlkit.model.lora) and ref_sync_steps is 0; give a second model")
    return without_adapter(policy, reference)


def with_old_logp(policy: PolicyFn, batch: Batch, *, max_tokens: int, mesh: Mesh | None = None) -> Batch:
    """The batch with `old_logp`: log-probs under the policy's current weights."""
    old_logp = compute_log_probs(policy, batch, max_tokens=max_tokens, mesh=mesh)
    if readable(old_logp) and readable(batch.rollout_logp):
        _check_sampled(batch.rollout_logp[batch.mask], old_logp[batch.mask])
    return with_streams(batch, old_logp=old_logp)


def _check_sampled(rollout_logp: Tensor, old_logp: Tensor) -> None:
    """ValueError for the log-probs of an engine that returns none: 0 at all of many trained tokens."""
    num = rollout_logp.numel()
    if num >= 16 and rollout_logp.min() >= 0 and old_logp.mean() < -0.5:
        raise ValueError(
            f"rollout_logp is 0 at all {num} tokens, and old_logp {old_logp.mean():.3g} on average: does the engine "
            "return the log-probs of the tokens that it sampled?"
        )


def with_ref_logp(reference: PolicyFn | None, batch: Batch, *, max_tokens: int, mesh: Mesh | None = None) -> Batch:
    """The batch with `ref_logp`, log-probs of a reference policy; unchanged where that is None."""
    if reference is None:
        return batch
    return with_streams(batch, ref_logp=compute_log_probs(reference, batch, max_tokens=max_tokens, mesh=mesh))


def with_kept_mass(
    policy: Policy,
    batch: Batch,
    *,
    params: SamplingParams,
    max_tokens: int,
    mesh: Mesh | None = None,
    on_policy: bool = True,
) -> Batch:
    """The batch with `kept_mass`: the probability mass that truncated sampling kept, under the current weights.

    Unchanged where `params` do not truncate, and where the engine has reported it (`Completion.support`).

    Errors: ValueError where it has not, and older weights may have sampled (`on_policy` False).
    """
    if not params.truncates or batch.kept_mass is not None:
        return batch
    if not on_policy:
        fault = "truncated samples of older weights need the tokens that were kept, and these trajectories have none"
        raise ValueError(f"{fault}: an environment that makes its own Trajectory passes on `Completion.support`")
    _check_temperature(batch, params.temperature or 1.0)
    model, dtype = policy.model, DTYPES[policy.dtype]

    def log_kept(micro: Batch) -> Tensor:
        head = partial(_log_kept_mass, model=model, batch=micro, params=params, dtype=dtype)
        return token_outputs(model, micro, head, dtype=dtype)[0]

    return with_streams(batch, kept_mass=compute_tokens(log_kept, batch, max_tokens=max_tokens, mesh=mesh).exp())


def compute_log_probs(
    policy: PolicyFn, batch: Batch, *, max_tokens: int, mesh: Mesh | None = None
) -> Float[Tensor, "T"]:
    """The policy's log-probs over the whole batch; see `compute_tokens`."""
    check_batch(batch)
    if isinstance(policy, nn.Module) or not callable(policy):
        fix = "policy(batch) gives log-probs: Policy(model)"
        raise TypeError(f"policy must be a Policy or another function of a batch, got a {type(policy).__name__}; {fix}")
    return compute_tokens(lambda micro: policy(micro).logp, batch, max_tokens=max_tokens, mesh=mesh)


@torch.no_grad()
def compute_tokens(
    function: Callable[[Batch], Tensor], batch: Batch, *, max_tokens: int, mesh: Mesh | None = None
) -> Float[Tensor, "T"]:
    """`function` of the whole batch without gradient, micro-batch by micro-batch: one number per token, in its order,
    or several along a second axis.

    With the `mesh` of a sharded model each data parallel rank computes its share, and every rank gets all numbers.
    """
    rows = torch.arange(batch.num_tokens, device=batch.tokens.device)
    parts = rank_microbatches((batch, rows), mesh=mesh, max_tokens=max_tokens)
    results = [(rest[0], function(micro)) for micro, *rest in parts]  # all forwards first: no GPU sync between
    out = torch.zeros(batch.num_tokens, *(results[0][1].shape[1:] if results else ()), device=batch.tokens.device)
    for index, x in results:
        out[index] = x.to(out)
    return summed(out, mesh=mesh)
