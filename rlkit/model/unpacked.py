"""A model's own forward on padded rows, for layers that cannot run packed (see `rlkit.model.families`).

Each sequence is a row with its whole prompt, padded on the right. A causal model needs no mask for that: no token sees
what follows it, whatever the layers are (recurrent, convolutional, ALiBi, chunked, indexed). The outputs, losses and
streams are those of the packed forward; the cost is a prompt per sample in place of one per group, and the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.model.vision import image_inputs, own_attention, token_types
from rlkit.parallel.attention import rows, to_device
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.padded import by_sequence
from rlkit.types import Batch, Picture


def unpacked_outputs(
    model: Any, stream: Int[Tensor, "PT"], batch: Batch, *, logits: bool = False, mesh: Mesh | None = None
) -> Float[Tensor, "T D"]:
    """The last hidden states at the batch's tokens, from the model's own forward; with `logits`, the model's logits.

    `stream` are the joined ids, on the device that computes. A row has the images of its prompt again. Under a mesh all
    ranks run equally many forwards, because FSDP gathers the weights for each: a rank with fewer blocks of rows runs
    some on one token, whose gradient is 0.
    """
    blocks, back, order = to_device(by_sequence(batch), stream.device)
    others, images = _most(len(blocks), mesh) - len(blocks), iter(_pictures(batch, order))
    out = []
    with own_attention(model):
        for block in blocks:
            ids = stream[block.rows]
            out.append(_run(model, ids, logits, [x for _, of in zip(ids, images) for x in of]).flatten(0, 1))
        result = rows(torch.cat(out), back)
        for _ in range(others):
            result = result + 0 * _run(model, stream[:1, None], logits).sum()
    return result


def _pictures(batch: Batch, order: Int[Tensor, "N"]) -> Iterator[tuple[Picture, ...]]:
    """The images of each sequence, its prompt's first, in the order of the rows; () for all without any."""
    num, images = batch.prefix_cu.numel() - 1, batch.images
    for i in order.tolist():
        yield () if images is None else (*images[int(batch.prefix_ids[i])], *images[num + i])


def _run(model: Any, ids: Int[Tensor, "B L"], logits: bool, images: Sequence[Picture] = ()) -> Float[Tensor, "B L D"]:
    options: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if images:
        options |= image_inputs(images, ids.device) | token_types(model, ids)
    return model(**options).logits if logits else model.base_model(**options).last_hidden_state


def _most(count: int, mesh: Mesh | None) -> int:
    """The largest `count` of the data parallel ranks."""
    if mesh is None or mesh.dp == 1:
        return count
    most = torch.tensor(count, device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.group("dp"))
    return int(most)
