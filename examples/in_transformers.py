"""rlkit's losses and fused log-probs in transformers.Trainer: SFT with an exact token mean, and DPO.

    python examples/in_transformers.py sft [MODEL]          a folder or hub id; default: a tiny model made here
    python examples/in_transformers.py dpo [MODEL]

Checked with transformers 5.23 (src/transformers/trainer.py). The `[B, L, V]` logits are never stored. For one process or
DDP: under FSDP and DeepSpeed ZeRO-3 the head's weight is sharded outside the forward.
"""

import argparse
import copy

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.kernels.linear_logp import linear_logp
from rlkit.losses import dpo, token_mean
from rlkit.model.families import logit_scale


class Trainer(transformers.Trainer):
    """A Trainer whose `log_probs` gives the log-prob of each labelled token without storing logits."""

    def log_probs(self, model, inputs):
        """`logp` and `mask` [B, L-1]: entry t is of token t + 1; logp is 0 where the label is -100."""
        ids, mask = inputs["input_ids"], inputs["labels"][:, 1:] != -100
        out = model(ids, inputs["attention_mask"], logits_to_keep=1, output_hidden_states=True)
        hidden, targets = out.hidden_states[-1][:, :-1], ids[:, 1:]
        plain = self.accelerator.unwrap_model(model)
        head, config = plain.get_output_embeddings(), plain.config.get_text_config()
        logp = linear_logp(
            hidden.flatten(0, 1).to(head.weight.dtype), head.weight, targets.flatten(), bias=head.bias,
            mask=mask.flatten(), temperature=1 / logit_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
        ).logp  # fmt: skip
        return logp.view_as(targets), mask


class SFT(Trainer):
    """The mean over all labelled tokens of an optimizer step, whatever its batches and ranks."""

    loss_is_scaled_for_ga = True  # do not divide by the number of batches once more

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # count the labels of the whole step: num_items_in_batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logp, mask = self.log_probs(model, inputs)
        loss = -(token_mean(mask, num_tokens=num_items_in_batch) * logp).sum()
        if self.args.average_tokens_across_devices:  # the count is of all ranks, whose gradients DDP averages
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss


class DPO(Trainer):
    """DPO. A batch holds the chosen rows, then the rejected ones."""

    loss_is_scaled_for_ga = False  # a mean over the pairs of a batch; all batches have equally many (drop_last)

    def __init__(self, *args, beta=0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.beta, self.reference = beta, copy.deepcopy(self.model).eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        with torch.no_grad():
            reference, _ = self.log_probs(self.reference, inputs)
        chosen, rejected = (self.log_probs(model, inputs)[0] - reference).sum(1).chunk(2)
        loss = dpo(chosen, rejected, beta=self.beta).mean()
        return (loss, {}) if return_outputs else loss


def row(tokenizer, prompt, response):
    prompt, response = tokenizer.encode(prompt), [*tokenizer.encode(response), tokenizer.eos_token_id]
    return {"input_ids": prompt + response, "labels": [-100] * len(prompt) + response}


def main(task="sft", model=None, *, steps=40, output="runs/in_transformers", **options):
    tokenizer = AutoTokenizer.from_pretrained(model) if model else tiny_tokenizer()
    policy = AutoModelForCausalLM.from_pretrained(model) if model else tiny_model(tokenizer)
    pad = DataCollatorForSeq2Seq(tokenizer)
    settings = {"max_steps": steps, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
                "learning_rate": 1e-5 if model else 1e-3, "logging_steps": 10, "report_to": "none"}  # fmt: skip
    args = TrainingArguments(output, remove_unused_columns=False, dataloader_drop_last=True, **(settings | options))
    sums = [[row(tokenizer, f"{a}+{b}=", str(answer)) for answer in (a + b, a * b + 1)]
            for a in range(20) for b in range(20)]  # fmt: skip
    if task == "sft":
        trainer = SFT(policy, args, pad, [right for right, _ in sums])
    else:
        trainer = DPO(policy, args, lambda pairs: pad([pair[i] for i in (0, 1) for pair in pairs]), sums)
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("sft", "dpo"), default="sft")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/in_transformers")
    main(**vars(parser.parse_args()))
