"""Operations with kernels: one folder each, with its definition (`reference`), its fast paths, and its operators.

Import them from their folders: `linear_logp` (hidden states to log-probs and entropies, and the fused loss),
`logits_logp` (the same from logits), `linear_scan` (the recurrence of the trace estimators).
"""
