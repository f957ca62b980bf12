"""Operations with kernels: one folder per operation, with its reference, its implementations and its operators.

Import from the folders: `linear_logp` (hidden states to log-probs and entropies), `logits_logp`
(the same from logits), `linear_scan` (the recurrence of the trace estimators), `decode` (a decoding step on a GPU).
"""

from rlkit._util.elsewhere import elsewhere

__getattr__ = elsewhere(__name__)
