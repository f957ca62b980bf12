"""Rows of controllers, objectives, segments, packing and the kernels' references."""

from __future__ import annotations

import itertools
import math

import loops
import torch
from row import PACKED, Row, row

from rlkit import controllers as C
from rlkit import objectives as O
from rlkit import packing, segments
from rlkit.kernels.linear_logp import linear_logp
from rlkit.kernels.linear_scan import linear_scan
from rlkit.testing import Case, Stream, laws
from rlkit.testing.check import ESTIMATOR
from rlkit.testing.subject import UNIT

IGNORES = "a schedule ignores the measurement"
RULE = (laws.state_is_plain, laws.update_is_pure, laws.feedback, laws.within_bounds, laws.refuses_nan)


def rule(fn, *start, direction: int = 1, high: float = math.inf, low: float = 0.0, skip=None, **constants):
    subject = laws.Rule(fn(**constants), start, direction, low, high, fn.__name__)
    return Row(fn, subject, RULE, skip or {})


CONTROLLERS = [
    rule(C.fixed, 0.5, direction=0, low=0.5, high=0.5),
    rule(C.kl_exponential, 0.5, target=1.0, horizon=100.0, num_samples=50.0),
    rule(C.kl_linear, 0.5, target=1.0, rate=0.25, max_coef=2.0, high=2.0),
    rule(C.kl_pid, 0.5, target=1.0, kp=0.5, ki=0.25, kd=0.125, max_coef=2.0, high=2.0),
    rule(C.schedule_linear, 1.0, end=0.25, num_updates=4.0, direction=0, low=0.25, high=1.0,
         skip={"refuses_nan": IGNORES}),
    rule(C.schedule_cosine, 1.0, end=0.25, num_updates=4.0, direction=0, low=0.25, high=1.0,
         skip={"refuses_nan": IGNORES}),
    rule(C.target_entropy, 0.5, target=1.0, delta=0.25, direction=-1, high=1.0),
    rule(C.moving_average, 0.5, decay=0.75),
    rule(C.lagrange_at_most, 0.5, bound=1.0, rate=0.25, penalty=0.5, max_coef=2.0, high=2.0),
    rule(C.lagrange_at_least, 0.5, bound=1.0, rate=0.25, penalty=0.5, max_coef=2.0, high=2.0, direction=-1),
]  # fmt: skip

COLUMNS = Stream(axis="N", size=(3,))
POINTS = {"points": COLUMNS}
WEIGHTS = {"weights": torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)}
IDEAL = {**WEIGHTS, "ideal": torch.full((3,), 4.0, dtype=torch.float64)}
FRONT = "a point is compared with all others"
COMPARES = {"additive": FRONT}
SCALAR = "it is one number for the whole set of points"


def beats(a: list[float], b: list[float]) -> bool:
    return all(x >= y for x, y in zip(a, b)) and a != b


def count_dominating(case: Case) -> torch.Tensor:
    points = case.seqs["points"].tolist()
    return torch.tensor([sum(beats(b, a) for b in points) for a in points])


def inclusion_exclusion(case: Case) -> torch.Tensor:
    """The volume of a union of boxes by all their intersections."""
    boxes = [p for p in (case.seqs["points"] + 2.0).tolist() if all(x > 0 for x in p)]
    total = 0.0
    for k in range(1, len(boxes) + 1):
        for chosen in itertools.combinations(boxes, k):
            total -= (-1) ** k * math.prod(min(column) for column in zip(*chosen))
    return torch.tensor(total, dtype=torch.float64)


def archived(points: torch.Tensor) -> torch.Tensor:
    """1 for each point whose value the archive holds after all were inserted, one by one."""
    archive = O.archive_init()
    for i, point in enumerate(points.tolist()):
        archive = O.archive_insert(archive, tuple(point), i)
    return torch.tensor([tuple(p) in archive.points for p in points.tolist()], dtype=torch.bool)


REFERENCE = {"reference": torch.full((3,), -2.0, dtype=torch.float64)}
OBJECTIVES = [
    row(O.weighted_sum, laws.monotone(), laws.scales(degree=1), options=WEIGHTS),
    row(O.lexicographic, skip={"additive": "compares the rows of one group with each other"}),
    row(O.tchebycheff, laws.monotone(), options={**IDEAL, "slope": 0.01}),
    row(O.smooth_tchebycheff, laws.monotone(), options={**IDEAL, "temperature": 0.5}),
    row(
        O.dominates,
        laws.limit(
            lambda case: torch.tensor(
                [beats(a, b) for a, b in zip(case.seqs["a"].tolist(), case.seqs["b"].tolist())], dtype=torch.bool
            ),
            note="it is the definition, in Python",
        ),
        family=PACKED,
        streams={"a": COLUMNS, "b": COLUMNS},
        axis="N",
    ),
    row(
        O.num_dominating,
        laws.limit(count_dominating, note="it is the definition, in Python"),
        family=PACKED,
        streams=POINTS,
        skip=COMPARES,
    ),
    row(
        O.pareto_mask,
        laws.limit(lambda case: count_dominating(case) == 0, note="it is the definition, in Python"),
        family=PACKED,
        streams=POINTS,
        skip=COMPARES,
    ),
    row(
        O.hypervolume,
        laws.monotone(name="points"),
        laws.limit(inclusion_exclusion, note="it is inclusion and exclusion of boxes"),
        family=[*(x for x in PACKED if x is not laws.dtypes), laws.detached],
        streams=POINTS,
        options=REFERENCE,
        axis="",
        skip={"additive": SCALAR},
    ),
    row(
        O.archive_insert,
        laws.limit(lambda case: count_dominating(case) == 0, note="it holds the Pareto front"),
        family=PACKED,
        call=archived,
        streams=POINTS,
        axis="N",
        skip=COMPARES,
    ),
    row(O.archive_init, family=(), call=archived, streams=POINTS, axis="N", variant="see archive_insert"),
]


def padded_and_back(x, cu_seqlens):
    """Rows of equal length, one per sequence, and packed again."""
    lens = segments.seq_lens(cu_seqlens)
    width = int(lens.max()) if lens.numel() else 0
    real = torch.arange(width) < lens.unsqueeze(1)
    (rows,) = packing.to_padded(x, padding_mask=real, fill=float("nan"))
    packed = packing.from_padded(rows, padding_mask=real)
    assert packed.cu_seqlens.tolist() == cu_seqlens.tolist()
    return packed.streams[0]


NUMBERS = {"x": Stream()}
BY_SEQ = {"x": Stream(axis="N")}
SPREAD = laws.equals_loop(lambda x: [sum(x)] * len(x))
UNCAST = {"dtypes": "it only rearranges values and keeps their dtype"}
PADDED = {"call": padded_and_back, "streams": NUMBERS, "skip": UNCAST}


def original(case: Case) -> torch.Tensor:
    return case.tokens["x"]


SEGMENTS = [
    row(segments.sum_per_seq),
    row(segments.mean_per_seq),
    row(segments.seq_count, family=PACKED),
    row(segments.broadcast_to_tokens, call=lambda x, cu_seqlens: segments.broadcast_to_tokens(x, cu_seqlens=cu_seqlens),
        streams=BY_SEQ, axis="T", skip=UNCAST),
    row(segments.group_sum, SPREAD),
    row(segments.group_mean, laws.equals_loop(lambda x: [sum(x) / len(x)] * len(x))),
    row(segments.group_count, family=PACKED, axis="N"),
    row(packing.from_padded, laws.limit(original, note="it inverts to_padded"), **PADDED),
    row(packing.to_padded, laws.limit(original, note="from_padded inverts it"), **PADDED),
]  # fmt: skip

VOCAB = 5
HEAD = torch.linspace(-9.0, 9.0, 3 * VOCAB, dtype=torch.float64).sin().mul(16).round().div(16).reshape(VOCAB, 3)
TARGETS = Stream(low=0.0, high=VOCAB - 1.0, hard_low=0.0, step=1.0, dtype=torch.int64)


def packed_logp(hidden, weight, targets, mask, cu_seqlens, temperature, impl):
    """As a function of packed tokens: `linear_logp` takes [T, D], not any shape."""
    return linear_logp(hidden, weight, targets, mask=mask, temperature=temperature, impl=impl)


KERNELS = [
    row(
        linear_scan,
        laws.equals_loop(loops.scan),
        laws.scales(degree=1, names=("b", "x_end")),
        family=ESTIMATOR,
        streams={"a": UNIT},
    ),
    *(
        row(
            linear_logp,
            laws.normalised(vocab=VOCAB),
            laws.temperature_is_scale(vocab=VOCAB),
            variant=impl,
            call=packed_logp,
            streams={"hidden": Stream(size=(3,)), "targets": TARGETS},
            options={"weight": HEAD, "temperature": 0.7, "impl": impl},
        )
        for impl in ("reference", "chunked")
    ),
]

ROWS = [*CONTROLLERS, *OBJECTIVES, *SEGMENTS, *KERNELS]
