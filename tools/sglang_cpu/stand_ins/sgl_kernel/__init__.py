"""Stand-in for SGLang's compiled CPU kernels, which exist for AMX machines only.

One function is called on the paths that this environment serves; the other names must exist when SGLang is imported.
"""

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):  # noqa: ARG001
    """Give request i the next `end[i] - start[i]` places of `out_cache_loc`, as its tokens start[i] .. end[i] - 1."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not part of this CPU-only environment (tools/sglang_cpu)")

    return missing
