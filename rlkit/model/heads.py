"""Models with one number per token (a critic's values) or per sequence (a reward model's rewards).

    critic = load_value_model(path)                       # `load_value_parallel(path, mesh)` on many ranks
    batch = with_streams(batch, values=compute_values(critic, batch, max_tokens=16384))
    judge = load_reward_model(path)
    scores = rewards(judge, pack_whole(groups))

They run packed and with shared prompts, on any layout, like `rlkit.model.forward.forward`. On disk they are
transformers' token and sequence classification models with one label, so other tools can load an export; of most vision
models, whose tower is frozen here, transformers has none, and only rlkit does. The head of a critic with `Bins` has a
label for each bin, whose logits make the value; its config has `value_range`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rlkit import advantages, segments
from rlkit.losses import hl_gauss, hl_gauss_value
from rlkit.model import families
from rlkit.model.forward import DTYPES, compute_tokens, forward, no_report, read_pretrained, resized, token_outputs
from rlkit.model.parallelize import load_parallel
from rlkit.model.pretrained import NO_CODE, load_config
from rlkit.model.routing import own_routing
from rlkit.model.sharding import ShardedModel, mesh_of
from rlkit.model.small_copy import shrunk
from rlkit.model.vision import auto_class, freeze_tower, reads_images
from rlkit.packing import pack
from rlkit.parallel.attention import as_inference
from rlkit.parallel.mesh import Mesh
from rlkit.settings import Bins
from rlkit.types import Batch, Trajectory

_HEAD = "score."


def load_value_model(
    path: str | os.PathLike[str], *, device: str = "cpu", bins: Bins = Bins(), min_rows: int = 0
) -> Any:
    """A critic from a folder or hub id. A head that the files lack (a policy's files) starts at 0: all values are 0, or
    the middle of the range of `bins`. Without `bins` the critic has those of its files.

    Errors: ValueError for files whose head has other bins; those of `load_model`.
    Differs: verl initialises the head at random, so the first advantages are noise.
    """
    return _load("TokenClassification", path, device, bins, min_rows)


def load_reward_model(path: str | os.PathLike[str], *, device: str = "cpu", min_rows: int = 0) -> Any:
    """A reward model with one label from a folder or hub id. A head that the files lack starts at 0."""
    return _load("SequenceClassification", path, device, min_rows=min_rows)


def load_value_parallel(
    path: str | os.PathLike[str], mesh: Mesh, *, bins: Bins = Bins(), **options: Any
) -> ShardedModel:
    """`load_value_model` cut over the mesh, as `load_parallel`: no rank holds the whole model."""
    return _load_parallel("TokenClassification", path, mesh, bins=bins, **options)


def load_reward_parallel(path: str | os.PathLike[str], mesh: Mesh, **options: Any) -> ShardedModel:
    """`load_reward_model` cut over the mesh, as `load_parallel`: no rank holds the whole model."""
    return _load_parallel("SequenceClassification", path, mesh, **options)


def _load_parallel(
    task: str, path: str | os.PathLike[str], mesh: Mesh, *, bins: Bins = Bins(), **options: Any
) -> ShardedModel:
    whole = partial(_load, task, device="cpu", bins=bins)
    return load_parallel(path, mesh, build=partial(_build, task, bins=bins), whole=whole, new=_HEAD, **options)


def values(model: Any, batch: Batch, *, dtype: str = "fp32") -> Float[Tensor, "T"]:
    """V of the state before each action, in fp32: `values[t]` is a function of `tokens[:t+1]`.

    Also where the mask is False: the last token of a truncated sequence has its bootstrap value (see `bootstraps`).
    """
    bins = bins_of(model.config)

    def head(hidden: Tensor, _spread: Any) -> tuple[Tensor, ...]:
        numbers = _labels(model, hidden)
        return (numbers[:, 0] if bins is None else hl_gauss_value(numbers, **bins),)

    return token_outputs(model, own_routing(batch), head, dtype=DTYPES[dtype])[0]


def classified(model: Any, batch: Batch, *, dtype: str = "fp32") -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """`values` of a critic with bins, without gradient, and `hl_gauss` of the batch's `returns` (0 where masked)."""
    bins = bins_of(model.config)
    assert bins is not None
    assert batch.returns is not None
    returns, mask = batch.returns, batch.mask

    def head(hidden: Tensor, spread: Any) -> tuple[Tensor, ...]:
        logits = _labels(model, hidden)
        loss = hl_gauss(logits, spread(returns), mask=spread(mask), **bins)
        return hl_gauss_value(logits.detach(), **bins), loss

    now, loss = token_outputs(model, own_routing(batch), head, outputs=2, dtype=DTYPES[dtype])
    return now, loss


def bins_of(config: Any) -> dict[str, float] | None:
    """The range of a critic's bins, as `hl_gauss` takes it; None for one number per token."""
    value_range = getattr(config, "value_range", None)
    return None if value_range is None else {"low": value_range[0], "high": value_range[1]}


def compute_values(model: Any, batch: Batch, *, max_tokens: int, dtype: str = "fp32") -> Float[Tensor, "T"]:
    """`values` of a whole batch without gradient, micro-batch by micro-batch, in the batch's order."""
    of_micro = partial(values, model, dtype=dtype)
    return compute_tokens(of_micro, batch, max_tokens=max_tokens, mesh=mesh_of(model))


def bootstraps(values: Float[Tensor, "T"], batch: Batch) -> Float[Tensor, "N"]:
    """The bootstrap values: the value at the last token of each truncated sequence, 0 for the other sequences.

    All pieces of an episode have that of its last piece: the value at the end of an earlier one predicts the episode's
    reward, which the piece has already.
    """
    ends = advantages.bootstrap_values(values, truncated=batch.truncated, cu_seqlens=batch.cu_seqlens)
    return ends[batch.num_seqs - 1 - segments.first_of_group(batch.episode_ids.flip(0)).flip(0)]


def rewards(model: Any, batch: Batch, *, dtype: str = "fp32") -> Float[Tensor, "N"]:
    """The reward at the last token of each sequence of a batch from `pack_whole`, in fp32, with gradient.

    Errors: ValueError for a batch whose last tokens are only targets.
    """
    if not bool(batch.truncated.all()):
        fault = "rewards reads every sequence to its last token"
        raise ValueError(f"{fault}; pack the trajectories with pack_whole(groups)")
    numbers = values(model, batch, dtype=dtype)
    return numbers[batch.cu_seqlens[1:].to(numbers.device) - 1]


def pack_whole(groups: Sequence[Sequence[Trajectory]], *, share_prompts: bool = True) -> Batch:
    """`pack` with every last token as an input: a reward model reads it, while a policy only predicts it."""
    return pack([[replace(t, truncated=True) for t in group] for group in groups], share_prompts=share_prompts)


def _labels(model: Any, hidden: Tensor) -> Float[Tensor, "R B"]:
    """The numbers of the head, in fp32."""
    head = model.score
    return F.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())


def _load(task: str, path: str | os.PathLike[str], device: str, bins: Bins = Bins(), min_rows: int = 0) -> Any:
    config = load_config(path)
    families.check_causal_lm(config)
    kind = _class_of(task, config)
    checked = families.check_architecture(config, forward)
    num, value_range = head_of(config, bins)
    with no_report():  # the head is initialised on purpose
        model, missing = read_pretrained(kind, path, config, dtype=torch.float32, num_labels=num)
    if value_range is not None:
        model.config.value_range = value_range
    _check_head(model)
    if others := sorted(name for name in missing if not name.startswith(_HEAD)):
        raise ValueError(f"model {str(path)!r} has no weights for {', '.join(others[:5])}: is it another model's?")
    if missing:
        for p in model.score.parameters():
            nn.init.zeros_(p)
    if checked is None:
        families.warn_full_size(config)
    _set_up(model, checked)
    freeze_tower(model)
    return _checked(resized(model, min_rows).to(device).eval())


def _set_up(model: Any, verdict: families.Verdict | None) -> None:
    """Set a model with one label up for `forward`, by the verdict on its architecture."""
    if verdict is None or verdict.packed:
        families.set_packed(model, replay=verdict is not None and verdict.replay)
    else:
        families.runs_unpacked(model, verdict)


def _class_of(task: str, config: Any) -> Any:
    """transformers' auto class for the task; of a vision model that it lacks, the body under the generic head."""
    import transformers
    from transformers import AutoModel, PreTrainedModel, conversion_mapping, modeling_layers

    kind: Any = getattr(transformers, f"AutoModelFor{task}")
    if type(config) in kind._model_mapping:
        return kind
    if not reads_images(config):
        raise ValueError(
            f"model type {config.model_type!r} has no class in transformers' {kind.__name__}, which holds "
            "one number per token or sequence; use another model, for a critic `rlkit grpo` in place of ppo"
        )
    body = cast(Any, AutoModel._model_mapping)[type(config)]
    base = next(c for c in body.__mro__[1:] if issubclass(c, PreTrainedModel))
    name, whole = f"{body.__name__.removesuffix('Model')}For{task}", auto_class(config)._model_mapping[type(config)]
    if names := conversion_mapping.get_checkpoint_conversion_mapping(whole.__name__):  # of weights in the files
        conversion_mapping.register_checkpoint_conversion_mapping(name, names, overwrite=True)
    return type(name, (getattr(modeling_layers, f"GenericFor{task}"), base), {})


def head_of(config: Any, bins: Bins) -> tuple[int, list[float] | None]:
    """The number of labels of the head and the range of its bins, as asked for or else as the files have them.

    Errors: ValueError for files whose head has others than those asked for.
    """
    there = getattr(config, "value_range", None)
    if bins.value_range is None:
        return (1, None) if there is None else (config.num_labels, [*there])
    asked = (bins.value_bins, [*map(float, bins.value_range)])
    trained = any("Classification" in name for name in config.architectures or ())
    if trained and (config.num_labels, there) != asked:
        has = "one number" if there is None else _described(config.num_labels, there)
        fix = "drop `value_range`, or start the critic from a policy's weights"
        raise ValueError(f"model {config.name_or_path!r}: its head has {has}, not {_described(*asked)}: {fix}")
    return asked


def _described(num: int, value_range: Sequence[float]) -> str:
    return f"{num} bins from {value_range[0]:g} to {value_range[1]:g}"


def _build(task: str, config: Any, *, bins: Bins = Bins(), **options: Any) -> Any:
    """A model with one label, without weights on the meta device, once a small copy of it has run packed."""
    kind = _class_of(task, config)
    num, value_range = head_of(config, bins)
    config.update({"num_labels": num} | ({} if value_range is None else {"value_range": value_range}))
    with torch.device("cpu"):
        small = kind.from_config(shrunk(config), dtype=torch.float32, **NO_CODE)
        _check_head(small)
        _set_up(small, families.check_architecture(config, forward))
        _checked(small.eval())
    return kind.from_config(config, **options)


def _check_head(model: Any) -> None:
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear `score` head; only decoder models have one")


@torch.no_grad()
def _checked(model: Any) -> Any:
    """Refuse a model whose packed numbers differ from its own forward, with a head that is not 0; else return it."""
    groups = families.probe(model.config.get_text_config().vocab_size)[:1]
    weight = model.score.weight.clone()
    model.score.weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    with as_inference(model):
        ids = [torch.tensor([[*t.prompt_ids, *t.ids]], device=model.device) for t in groups[0]]
        num = model.score.out_features
        last = torch.stack([model(input_ids=x, use_cache=False).logits.float().flatten()[-num:] for x in ids])
    bins = bins_of(model.config)
    true = last[:, 0] if bins is None else hl_gauss_value(last, **bins)
    ours = rewards(model, pack_whole(groups).to(model.device))
    model.score.weight.copy_(weight)
    if not (off := ((ours - true).abs() / (1 + true.abs())).max().item()) < 1e-3:
        raise ValueError(f"model type {model.config.model_type!r} cannot run packed: its numbers differ by {off:.2g}")
    return model
