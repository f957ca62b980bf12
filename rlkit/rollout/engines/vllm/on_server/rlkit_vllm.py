"""`--worker-extension-cls rlkit_vllm.Reload`: new weights for a model whose head is tied, on a CPU.

vLLM's CPU build packs each matrix when it is loaded. `reload_weights` packs again what the files hold; a head that is
tied to the embedding is not in them, so it would keep the packed weights of the start, without an error (vLLM 0.32). On
GPUs both are one tensor, which is written in place.
"""

from __future__ import annotations

from typing import Any


class Reload:
    """A part of vLLM's worker, called by /collective_rpc."""

    reload_weights: Any
    model_runner: Any

    def rlkit_reload(self, weights_path: str) -> None:
        """`reload_weights`, then pack the head again where it is the embedding."""
        self.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        if not getattr(model.config, "tie_word_embeddings", False):
            return
        embedding = next(m for name, m in model.named_modules() if name.endswith("embed_tokens"))
        model.lm_head.weight = embedding.weight
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
