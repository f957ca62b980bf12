import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, load_model, with_old_logp
from rlkit.packing import microbatches, pack, select
from rlkit.parallel.attention import Segment, attend, plan, register
from rlkit.types import Trajectory


@pytest.fixture(scope="module")
def model():
    model = tiny_model(tiny_tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    model.set_attn_implementation(register())
    return model.eval()


def trajectory(generator, prompt, n, *, truncated=False):
    ids = torch.randint(0, 263, (n,), generator=generator).tolist()
    mask = (torch.rand(n, generator=generator) < 0.8).tolist()
    return Trajectory(prompt, ids, mask, [-1.0] * n, [0] * n, reward=1.0, truncated=truncated)


def make_groups(seed, shape):
    """`shape`: for each group a prompt length and the samples' lengths."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for prompt_len, lens in shape:
        prompt = torch.randint(0, 263, (prompt_len,), generator=generator).tolist()
        groups.append([trajectory(generator, prompt, n, truncated=n % 3 == 0) for n in lens])
    return groups


def own_forward(model, trajectory, temperature):
    """Log-probs and entropies of one sequence alone, by the model's own forward with transformers' sdpa."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([trajectory.prompt_ids + trajectory.ids])
    logp = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
    model.set_attn_implementation(register())
    places = range(len(trajectory.prompt_ids) - 1, ids.shape[1] - 1)
    chosen = logp[places].gather(1, ids[0, len(trajectory.prompt_ids) :, None])[:, 0]
    return chosen, -(logp[places].exp() * logp[places]).sum(-1)


shapes = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(shapes, st.booleans())
def test_packed_forward_equals_each_sequence_alone(model, shape, share):
    groups = make_groups(0, shape)
    batch = pack(groups, share_prompts=share)
    with torch.no_grad():
        out = forward(model, batch, temperature=0.7)
        for i, t in enumerate(t for g in groups for t in g):
            logp, entropy = own_forward(model, t, 0.7)
            end = int(batch.cu_seqlens[i + 1]) - t.truncated
            mine = slice(end - len(t.ids), end)
            mask = torch.tensor(t.mask)
            torch.testing.assert_close(out.logp[mine], logp.where(mask, 0.0), atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(out.entropy[mine], entropy.where(mask, 0.0), atol=2e-5, rtol=1e-5)


def loss_and_grads(model, parts):
    """A loss with a different weight for every token, so that a permutation or a lost token shows."""
    model.zero_grad()
    total = 0.0
    for batch, weights in parts:
        out = forward(model, batch)
        loss = (weights * (out.logp + 0.1 * out.entropy)).sum()
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters()}


def token_weights(batch):
    """A function of the target and its log-prob's place in the sequence only: the same under every packing."""
    return torch.sin(batch.targets.double() + 1).float() * batch.mask


SHAPE = [(9, [5, 7, 3, 7]), (1, [4]), (14, [12, 1, 1]), (3, [9, 9, 9, 2])]


def test_shared_prompts_equal_unshared_in_loss_and_every_gradient(model):
    groups = make_groups(1, SHAPE)
    shared, unshared = pack(groups), pack(groups, share_prompts=False)
    assert shared.num_tokens + shared.prefix_tokens.numel() < 0.7 * unshared.num_tokens
    a, grads_a = loss_and_grads(model, [(shared, token_weights(shared))])
    b, grads_b = loss_and_grads(model, [(unshared, token_weights(unshared))])
    assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5)
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("max_tokens", [27, 40, 64])
def test_any_microbatching_adds_up(model, max_tokens):
    batch = pack(make_groups(2, SHAPE))
    weights = token_weights(batch)
    whole, grads = loss_and_grads(model, [(batch, weights)])
    parts = list(microbatches((batch, weights), max_tokens=max_tokens))
    assert len(parts) > 1
    cut, cut_grads = loss_and_grads(model, parts)
    assert math.isclose(whole, cut, rel_tol=1e-5, abs_tol=1e-5)
    for name in grads:
        torch.testing.assert_close(cut_grads[name], grads[name], atol=1e-5, rtol=1e-4, msg=name)


def test_documents_never_see_each_other(model):
    groups = make_groups(3, SHAPE)
    before = forward(model, pack(groups)).logp.detach()
    changed = [list(g) for g in groups]
    t = groups[2][0]
    changed[2][0] = Trajectory(
        t.prompt_ids, [(x + 17) % 263 for x in t.ids], t.mask, t.logp, t.versions, truncated=True
    )
    after = forward(model, pack(changed)).logp.detach()
    batch = pack(groups)
    mine = slice(int(batch.cu_seqlens[5]), int(batch.cu_seqlens[6]))
    others = torch.ones(batch.num_tokens, dtype=torch.bool)
    others[mine] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[mine], after[mine])


def test_scoring_in_microbatches_keeps_the_order(model):
    batch = pack(make_groups(4, SHAPE))
    policy = lambda b: forward(model, b)
    scored = with_old_logp(policy, batch, max_tokens=27)
    torch.testing.assert_close(scored.old_logp, policy(batch).logp.detach(), atol=2e-5, rtol=1e-5)
    assert (scored.old_logp != 0).equal(batch.mask)


def test_attention_against_a_double_loop():
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 8).double(), torch.randn(12, 2, 8).double(), torch.randn(12, 2, 8).double()
    k_ranges = [[(0, 3)], [(0, 3), (5, 4)], [(9, 2)], [(3, 1), (0, 1)]]
    q_ranges = [(0, 3), (3, 3), (6, 2), (8, 1)]
    spans = [Segment(*a, b) for a, b in zip(q_ranges, k_ranges, strict=True)]
    out = attend(q, k, v, plan(spans), scale=0.3)
    for (start, n), ranges in zip(q_ranges, k_ranges, strict=True):
        rows = [r for s, m in ranges for r in range(s, s + m)]
        for i in range(n):
            seen = rows[: len(rows) - (n - 1 - i)]
            for head in range(4):
                weights = (0.3 * k[seen, head // 2] @ q[start + i, head]).softmax(0)
                torch.testing.assert_close(out[start + i, head], weights @ v[seen, head // 2])


def test_fewer_keys_than_queries_is_refused():
    with pytest.raises(ValueError, match="segment 0 has 1 keys for 2 queries"):
        plan([Segment(0, 2, [(0, 1)])])


def test_an_empty_batch_runs_and_is_connected(model):
    batch = select(pack(make_groups(0, SHAPE)), [])
    out = forward(model, batch)
    assert out.logp.shape == (0,)
    assert out.logp.requires_grad


def test_the_plain_model_call_says_what_to_do(model):
    with pytest.raises(ValueError, match="attention plan is missing"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_load_model_round_trip_and_errors(model, tmp_path):
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(tmp_path / "m")
    batch = pack(make_groups(5, SHAPE))
    assert torch.equal(forward(loaded, batch).logp, forward(model, batch).logp)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_model(tmp_path / "nowhere")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", num_labels=1).save_pretrained(tmp_path / "judge")
    with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
        load_model(tmp_path / "judge")
    with pytest.raises(ValueError, match="fp16 gradients underflow"):
        forward(loaded, batch, dtype="fp16")


def test_bf16_compute_is_close_and_its_gradients_are_fp32(model):
    batch = pack(make_groups(6, SHAPE))
    out, exact = forward(model, batch, dtype="bf16"), forward(model, batch)
    assert out.logp.dtype == torch.float32
    assert 0 < (out.logp - exact.logp).abs().max() < 0.1
    model.zero_grad()
    out.logp.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Gemma2", "GPT2"])
def test_families_are_right_or_refused_by_name(family, tmp_path):
    import transformers

    small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    small |= dict(head_dim=8, intermediate_size=48, n_embd=32, n_layer=2, n_head=4, pad_token_id=0)
    small |= dict(bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, f"{family}Config")(**small)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config).save_pretrained(
        tmp_path
    )
    load_model(tmp_path)


def test_a_model_that_was_not_prepared_is_refused():
    model = tiny_model(tiny_tokenizer())
    with pytest.raises(ValueError, match="prepare"):
        forward(model, pack([[Trajectory([1, 2], [3], [True], [0.0], [0])]]))
