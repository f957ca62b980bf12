"""rlkit's losses, group baselines and fused log-probs in TRL: a tiny model learns to write digits.

    python examples/in_trl.py [SURROGATE [MODEL]]           a function of rlkit.losses, a folder or hub id

`Trainer` takes `surrogate(log_ratio, advantages, *, mask)` and `baseline(rewards, *, group_ids)`. It replaces log-probs,
loss and advantages of TRL 1.16.0 (trl/trainer/grpo_trainer.py). For one process or DDP: FSDP and ZeRO-3 shard the head.
"""

import argparse
import sys
from importlib.util import find_spec

if __name__ == "__main__":  # before TRL is imported
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surrogate", nargs="?", default="ppo_clip")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/in_trl")
    given = parser.parse_args()
    if find_spec("trl") is None:
        sys.exit("error: trl is not installed here: pip install trl==1.16.0")

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rlkit import advantages, losses
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.kernels.linear_logp import linear_logp
from rlkit.model.families import logit_scale

REPLACED = ("loss_type", "epsilon", "epsilon_high", "delta", "scale_rewards", "importance_sampling_level", "entropy_coef",
            "use_adaptive_entropy", "off_policy_mask_threshold", "top_entropy_quantile", "use_bias_correction_kl",
            "multi_objective_aggregation")  # fmt: skip


class Trainer(GRPOTrainer):
    def __init__(self, *args, surrogate=losses.ppo_clip, baseline=advantages.group_centered, **kwargs):
        super().__init__(*args, **kwargs)
        self.surrogate, self.baseline = surrogate, baseline
        for name in REPLACED:
            if getattr(self.args, name) != GRPOConfig.__dataclass_fields__[name].default:
                raise ValueError(f"{name} has no effect here; use surrogate=partial(...), or baseline=...")
        if self._is_vlm or self.aux_loss_enabled:
            raise ValueError("images, and auxiliary losses of experts (router_aux_loss_coef), are not handled here")

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=0, **_):
        plain, outputs = self.accelerator.unwrap_model(model), []
        head, config = plain.get_output_embeddings(), plain.config.get_text_config()
        for rows in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            ids, attended = input_ids[rows], attention_mask[rows]
            with self.accelerator.autocast():  # the logits of one position only; ours need none
                out = model(input_ids=ids, attention_mask=attended, logits_to_keep=1, output_hidden_states=True)
            hidden = out.hidden_states[-1][:, -logits_to_keep - 1 : -1]  # the states before the completion's tokens
            targets, mask = ids[:, -logits_to_keep:], attended[:, -logits_to_keep:].bool()
            fused = linear_logp(
                hidden.flatten(0, 1).to(head.weight.dtype), head.weight, targets.flatten(), bias=head.bias,
                mask=mask.flatten(), temperature=self.temperature / logit_scale(config),
                softcap=getattr(config, "final_logit_softcapping", None),
            )  # fmt: skip
            outputs.append([x.view_as(targets) for x in fused])
        return *map(torch.cat, zip(*outputs, strict=True)), None

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        logp, entropy, _ = self._get_per_token_logps_and_entropies(model, ids, attended, mask.shape[1])
        old_logp = inputs.get("old_per_token_logps", logp.detach())
        per_token = inputs["advantages"][:, None].expand_as(logp)  # [B] to [B, L]
        loss = self.surrogate(logp - old_logp, per_token, mask=mask) * inputs.get("importance_sampling_ratio", 1)
        if self.beta:
            loss = loss + self.beta * losses.unbiased_kl(logp, inputs["ref_per_token_logps"], old_logp, mask=mask)
        scale = self.accelerator.num_processes  # num_items_in_batch counts all tokens generated at once, over the ranks
        if self.model.training:  # they may be trained on in several optimizer steps
            scale = scale * self.args.steps_per_generation / self.current_gradient_accumulation_steps
        self._metrics["train" if self.model.training else "eval"]["entropy"].append(entropy[mask].mean().item())
        return scale * (losses.token_mean(mask, num_tokens=inputs["num_items_in_batch"]) * loss).sum()

    def _calculate_rewards(self, *args):
        self.rewards = super()._calculate_rewards(*args)  # [completions of all ranks, reward functions]
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.rewards.isnan().all(1).any():
            raise ValueError("a completion has no reward: every reward function returned None")
        rewards = (self.rewards * self.reward_weights.to(self.rewards.device)).nansum(1)
        size = self.num_generations if self.model.training else self.num_generations_eval
        of_all_ranks = self.baseline(rewards, group_ids=torch.arange(len(rewards), device=rewards.device) // size)
        batch["advantages"] = of_all_ranks.split(len(inputs))[self.accelerator.process_index]
        return batch


def digits(completions, **_):
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def main(surrogate="ppo_clip", model=None, *, steps=30, output="runs/in_trl", **options):
    tokenizer = None if model else tiny_tokenizer()
    settings = {"max_steps": steps, "max_completion_length": 8, "per_device_train_batch_size": 32, "bf16": bool(model),
                "learning_rate": 1e-6 if model else 3e-3, "logging_steps": 5, "report_to": "none"}  # fmt: skip
    trainer = Trainer(model or tiny_model(tokenizer), digits, GRPOConfig(output, **(settings | options)),
                      Dataset.from_list([{"prompt": f"{i}: "} for i in range(64)]),
                      processing_class=tokenizer, surrogate=getattr(losses, surrogate))  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(**vars(given))
