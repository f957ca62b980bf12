"""The laws that prove rlkit's functions, to run on your own: one call prints which hold and what breaks the others.

    from rlkit.testing import check_loss
    check_loss(my_loss)

`FakeEngine` is a rollout engine without a model. Needs the extra `testing` (hypothesis). The laws by themselves are in
`rlkit.testing.laws`, the strategies for packed batches in `rlkit.testing.strategies`.
"""

from rlkit._util.extras import missing

try:
    import hypothesis  # noqa: F401
except ImportError as error:
    raise missing(error, "hypothesis", "testing", "rlkit.testing needs") from None

from rlkit.testing import laws, strategies
from rlkit.testing.cases import Case, Stream, Vocab
from rlkit.testing.check import Report, Result, check_estimator, check_kl, check_loss, check_weights, examine, failures
from rlkit.testing.fake_engine import FakeEngine
from rlkit.testing.subject import Subject, subject

__all__ = [
    "Case", "FakeEngine", "Report", "Result", "Stream", "Subject", "Vocab", "check_estimator", "check_kl",
    "check_loss", "check_weights", "examine", "failures", "laws", "strategies", "subject",
]  # fmt: skip
