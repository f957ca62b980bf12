"""Property tests ("laws") of rlkit's functions, to run on your own: one call prints which hold, with counterexamples.

    from rlkit.testing import check_loss
    check_loss(my_loss)

Needs the extra `testing` (hypothesis). Single laws are in `rlkit.testing.laws`, strategies for packed batches in
`rlkit.testing.strategies`.
"""

from rlkit._extras import missing

try:
    import hypothesis  # noqa: F401
except ImportError as error:
    raise missing(error, "hypothesis", "testing", "rlkit.testing needs") from None

from rlkit.testing import laws, strategies
from rlkit.testing.cases import Case, Stream, Vocab
from rlkit.testing.check import Report, Result, check_estimator, check_kl, check_loss, check_weights, examine, failures
from rlkit.testing.subject import Subject, subject

__all__ = [
    "Case",
    "Report",
    "Result",
    "Stream",
    "Subject",
    "Vocab",
    "check_estimator",
    "check_kl",
    "check_loss",
    "check_weights",
    "examine",
    "failures",
    "laws",
    "strategies",
    "subject",
]
