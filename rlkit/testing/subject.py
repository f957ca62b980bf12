"""How to call a function under test: which arguments are streams of a packed batch, and their values.

Arguments are recognised by name, and their axes by jaxtyping annotation (`Float[Tensor, "T"]`, `"*shape V"`, `"N"`).
Without annotation a float argument is a token stream `[T]`, or `[N]` in a function that takes `group_ids` and no
`mask`. `mask`, `cu_seqlens` and `group_ids` come from the batch. Wrap a function with other names in a lambda.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from rlkit.testing.cases import Case, Stream, replaced

LAYOUT = ("mask", "cu_seqlens", "group_ids")
SIZES = {"V": 5, "U": 4, "B": 6, "K": 3, "D": 3}
UNIT = Stream(low=0.0, high=1.0, hard_low=0.0, hard_high=1.0)
POSITIVE = Stream(low=0.0, hard_low=0.0)
LOG_RATIO = Stream(low=-12.0, high=12.0, focus=0.5)
LOGP = Stream(low=-6.0, high=-0.125, hard_high=0.0)
LENGTH = Stream(low=0.0, high=5.0, hard_low=0.0, step=1.0, dtype=torch.int64)

# The stream of an argument by its name: the first pattern that matches the end of the name.
NAMES = (
    (r"log_ratio|gap|margin|logits", LOG_RATIO),
    (r"logp|logps|log_probs?|logprobs?|log_kept_mass|log_collision", LOGP),
    (r"lens|lengths", LENGTH),
    (r"gamma|lam|lam_\w+|labels|win_prob|sum_pi_squared", UNIT),
    (r"weights|entropy|divergence", POSITIVE),
    (r"rewards?|values?|returns?|advantages?|baseline|bootstrap|cov|points", Stream()),
)


@dataclass(frozen=True)
class Subject:
    """A function under test.

    `options` are fixed keyword arguments (float tensors among them follow the dtype of the batch). `statistics` are
    arguments computed from the whole batch before it is split (a count, a cutoff). `axis` is that of the outputs: "T",
    "N", "" for one number, or "metrics".
    """

    fn: Callable[..., Any]
    name: str
    params: tuple[str, ...]
    streams: Mapping[str, Stream]
    options: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Callable[[Case], Any]] = field(default_factory=dict)
    axis: str = "T"

    def takes(self, *names: str) -> bool:
        """Whether the function has all of these arguments."""
        return all(name in self.params for name in names)

    @property
    def elementwise(self) -> bool:
        """Whether tokens may have any shape: no bounds, no groups, nothing per sequence."""
        return not self.takes("cu_seqlens") and not self.takes("group_ids") and "N" not in self.axes

    @property
    def axes(self) -> set[str]:
        """The axes of the function's streams."""
        return {s.axis for s in self.streams.values()}

    @property
    def trained(self) -> str:
        """The argument that is differentiated: `log_ratio` or `logp`, otherwise the first float stream."""
        named = [name for name in ("log_ratio", "logp") if name in self.streams]
        ordered = [name for name in self.params if name in self.streams and self.streams[name].dtype.is_floating_point]
        return [*named, *ordered][0]

    @property
    def hidden(self) -> list[str]:
        """The parts of a case that the function does not read."""
        unseen = [name for name in LAYOUT if not self.takes(name)]
        return unseen if self.takes("old_logp") else [*unseen, "old"]

    def __call__(self, case: Case, *, whole: Case | None = None) -> Any:
        """The function's result on `case`, with the statistics of `whole` (default: of `case`)."""
        layout = {name: getattr(case, name) for name in LAYOUT if self.takes(name)}
        batch = case if whole is None else whole
        floats = [x.dtype for x in case.streams.values() if x.is_floating_point()]
        options = {k: _like(x, floats) for k, x in self.options.items()}
        statistics = {name: f(batch) for name, f in self.statistics.items()}
        return self.fn(**case.streams, **layout, **options, **statistics)


class Outcome(NamedTuple):
    """The result, its tensors in order, and the gradient of each float stream."""

    result: Any
    outputs: list[Tensor]
    grads: dict[str, Tensor]


def subject(
    fn: Callable[..., Any] | Subject,
    *,
    name: str | None = None,
    streams: Mapping[str, Stream | None] | None = None,
    options: Mapping[str, Any] | None = None,
    statistics: Mapping[str, Callable[[Case], Any]] | None = None,
    axis: str | None = None,
) -> Subject:
    """The subject described by `fn`'s signature. `streams` adds or replaces recognised streams (None: do not pass it).

    Errors: TypeError naming a required argument that is neither recognised nor given.
    """
    if isinstance(fn, Subject):
        return fn
    signature = _signature(fn)
    fixed = {*(options or {}), *(statistics or {}), *LAYOUT}
    by_name = dict(streams or {})
    params = {k: p for k, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    per_seq = "group_ids" in params and "mask" not in params
    for key, param in params.items():
        if key in fixed or key in by_name:
            continue
        stream = recognised(key, param.annotation, default_axis="N" if per_seq or key == "bootstrap" else "T")
        if stream is not None and (param.default is param.empty or param.default is None or _axes(param.annotation)):
            by_name[key] = stream
        elif param.default is param.empty:
            fault = f"argument {key} is not recognised: pass a value, options={{'{key}': 0.1}}, or for a tensor its"
            raise TypeError(f"{fault} range, streams={{'{key}': Stream(low=0.0, high=1.0)}} (docs/laws.md, Arguments)")
    used = {key: s for key, s in by_name.items() if s is not None}
    default_axis = "N" if {s.axis for s in used.values()} == {"N"} and "mask" not in params else "T"
    return Subject(
        fn=fn,
        name=name or str(getattr(fn, "__name__", "function")),
        params=tuple(params),
        streams=used,
        options=options or {},
        statistics=statistics or {},
        axis=_output_axis(signature.return_annotation, default_axis) if axis is None else axis,
    )


def recognised(name: str, annotation: Any, *, default_axis: str = "T") -> Stream | None:
    """The stream of an argument with this name and annotation; None if it is not a stream."""
    kind = next((s for pattern, s in NAMES if re.search(rf"(^|_)({pattern})$", name)), None)
    if (axes := _axes(annotation)) is None:
        plain = annotation is inspect.Parameter.empty or annotation is Tensor
        return kind._replace(axis=default_axis) if plain and kind is not None else None
    if axes.dims[0] not in ("T", "N") and not axes.dims[0].startswith("*"):
        return None
    if not {*axes.dims[1:]} <= {*SIZES}:
        return None
    axis = "N" if axes.dims[0] == "N" else "T"
    size = tuple(SIZES[d] for d in axes.dims[1:])
    if axes.kind == "Bool":
        return Stream(dtype=torch.bool, axis=axis, size=size)
    if axes.kind == "Int":
        return LENGTH._replace(axis=axis, size=size)
    return (kind or Stream())._replace(axis=axis, size=size)


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result: itself, or those of a tuple or a dict of tuples, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [x for key in sorted(result) for x in tensors(result[key])]
    if isinstance(result, tuple):
        return [x for part in result for x in tensors(part)]
    raise AssertionError(f"returned {type(result).__name__}, not a tensor, a tuple or a dict of tensors")


def run(s: Subject, case: Case, *, whole: Case | None = None, upstream: list[Tensor] | None = None) -> Outcome:
    """Result and gradients of `sum(upstream * output)`; `upstream` defaults to random weights fixed by the case."""
    leaves = {k: x.clone().requires_grad_() for k, x in case.streams.items() if x.is_floating_point()}
    if whole is case:
        whole = None
    result = s(replaced(case, **leaves), whole=whole)
    outputs = tensors(result)
    if upstream is None:
        upstream = random_upstream(case, outputs)
    attached = [(x, g) for x, g in zip(outputs, upstream, strict=True) if x.requires_grad]
    if not attached or not leaves:
        return Outcome(result, [x.detach() for x in outputs], {k: torch.zeros_like(x) for k, x in leaves.items()})
    total = torch.stack([(x * g.to(x.dtype)).sum().to(torch.float64) for x, g in attached]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return Outcome(result, [x.detach() for x in outputs], dict(zip(leaves, grads, strict=True)))


def random_upstream(case: Case, outputs: list[Tensor]) -> list[Tensor]:
    """A weight in [0.5, 1.5] for each entry of each output."""
    random = case.random()
    return [torch.rand(x.shape, generator=random, dtype=torch.float64) + 0.5 for x in outputs]


class _Axes(NamedTuple):
    kind: str
    dims: list[str]


def _axes(annotation: Any) -> _Axes | None:
    """Kind and axes of a jaxtyping annotation, or of the first annotated member of a union; otherwise None."""
    for option in (annotation, *get_args(annotation)):
        if (dims := getattr(option, "dim_str", None)) is not None:
            return _Axes(option.__name__.split("[")[0], dims.split() or [""])
    return None


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn, eval_str=True)
    except Exception:  # annotations that cannot be evaluated: use names only
        return inspect.signature(fn)


def _output_axis(annotation: Any, default: str) -> str:
    if isinstance(annotation, type) and hasattr(annotation, "_fields"):
        annotation = next(iter(get_type_hints(annotation).values()))
    if getattr(annotation, "__origin__", None) is dict:
        return "metrics"
    if (axes := _axes(annotation)) is None:
        return default
    if axes.dims[0] in ("", "N"):
        return axes.dims[0]
    return "N" if axes.dims[0] == "M" else "T"


def _like(x: Any, floats: list[torch.dtype]) -> Any:
    """A float tensor option, cast to the batch's dtype."""
    return x.to(floats[0]) if isinstance(x, Tensor) and x.is_floating_point() and floats else x
