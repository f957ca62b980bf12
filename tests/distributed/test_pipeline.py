"""Pipeline stages: what each holds, the order of its work, weights, heads, refusals. More numbers: test_layouts."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.distributed as dist

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import compute_log_probs, forward, prepare_model
from rlkit.model.heads import values
from rlkit.model.lora import adapter_weights, add_lora
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.weights import stream_weights
from rlkit.packing import microbatches, pack
from rlkit.parallel.data import any_ranks, rank_microbatches, summed
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.types import Trajectory


def model(**options):
    sizes = {"hidden": 32, "layers": 5, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **{**sizes, **options})


def data():
    draw = lambda n: [(7 * i * i + n) % 263 for i in range(n)]
    groups = []
    for p, lens in [(9, [5, 7, 3]), (1, [4]), (14, [12, 1]), (3, [9, 9, 2])]:
        groups.append([Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n) for n in lens])
    batch = pack(groups)
    return batch, torch.sin(torch.arange(batch.num_tokens) + 1.0) / batch.num_tokens


EMBEDDING = "model.embed_tokens.weight"
TIED = {"tie_word_embeddings": True}


def objective(out, w):
    return (w * (out.logp - 0.1 * out.entropy)).sum()


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


@pytest.fixture(scope="module")
def truth():
    return {False: alone(model()), True: alone(model(**TIED))}


def alone(made):
    trained, out = prepare_model(made), {"loss": [], "norm": []}
    optimizer = adamw(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)
    for step in range(3):
        total = torch.zeros(())
        for micro, w in microbatches(data(), max_tokens=40):
            loss = objective(forward(trained, micro, temperature=0.7), w)
            loss.backward()
            total += loss.detach()
        if step == 0:
            out["grads"] = {n: p.grad.clone() for n, p in trained.named_parameters()}
        out["norm"].append(float(optimizer_step(optimizer, max_norm=0.05)["grad_norm"].total))
        out["loss"].append(total.item())
    return out | {"params": {n: whole(p) for n, p in trained.named_parameters()}}


class Order:
    """The forwards and backwards of a stage, as they happen."""

    def __init__(self, stage):
        self.said = ""
        first = next(x for x in stage.base_model.layers if next(x.parameters(), None) is not None)
        first.register_forward_pre_hook(self.forward)
        first.register_full_backward_hook(self.backward)

    def forward(self, *_):
        self.said += "F"

    def backward(self, *_):
        self.said += "B"


def stage_on_rank(rank, world, delayed, tied):
    """Four stages, one layer or two each; `delayed`: the schedule of `pipelined`, or plain backwards."""
    mesh = make_mesh(Parallel(pp=4))
    stage = parallelize(model(tie_word_embeddings=tied), mesh)
    order, optimizer = Order(stage), adamw(stage, lr=1e-2, weight_decay=0.1, eps=1e-4)
    with pytest.raises(TypeError, match="needs model="):
        optimizer_step(optimizer, max_norm=0.05)
    out = {"loss": [], "norm": []}
    for step in range(3):
        total = torch.zeros(())
        with pipelined(mesh) if delayed else nullcontext(torch.Tensor.backward) as backward:
            for micro, w in rank_microbatches(data(), mesh=mesh, max_tokens=40):
                loss = objective(forward(stage, micro, temperature=0.7), w)
                backward(loss)
                total += loss.detach()
        if step == 0:
            out["grads"] = {n: whole(p.grad) for n, p in stage.named_parameters()}
            out["order"] = order.said
        out["norm"].append(float(optimizer_step(optimizer, max_norm=0.05, model=stage)["grad_norm"].total))
        out["loss"].append(float(summed(total, mesh=mesh)))
    return out | {"params": {n: whole(p) for n, p in stage.named_parameters()}}


@pytest.fixture(scope="module")
def ran(ranks):
    """What four stages found, of (delayed, tied)."""
    return cache(lambda delayed, tied: ranks.run(stage_on_rank, delayed, tied))


@pytest.mark.slow_cases("True-False", "False-False")
@pytest.mark.parametrize(("delayed", "tied"), [(True, False), (False, False), (True, True)])
def test_four_stages_equal_one_process(ran, truth, delayed, tied):
    names, truth, stages = [], truth[tied], deepcopy(ran(delayed, tied))
    if tied:  # a copy each, which get their parts of the gradient, and took the same steps
        first, last = stages[0], stages[-1]
        first["grads"][EMBEDDING] += last["grads"].pop(EMBEDDING)
        assert torch.equal(first["params"][EMBEDDING], last["params"].pop(EMBEDDING))
    for found in stages:
        assert found["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-6)
        assert found["norm"] == pytest.approx(truth["norm"], rel=1e-5)
        for kind in ("grads", "params"):
            for name, x in found[kind].items():
                scale = truth[kind][name].abs().max().item()
                gap = (x - truth[kind][name]).abs().max().item() / scale
                assert gap < 1e-5, (kind, name, gap)
        names += found["params"]
    assert names == list(truth["params"]), "each parameter is on one stage, and they come in the order of the model"
    of_stage = [{name.split(".")[2] for name in found["params"] if ".layers." in name} for found in stages]
    assert of_stage == [{"0"}, {"1"}, {"2", "3"}, {"4"}], "the head costs nearly as much as a layer"


@pytest.mark.slow
def test_the_schedule_is_one_forward_one_backward(ran):
    """As many micro-batches are in flight on a stage as there are stages from it to the end."""
    num = sum(1 for _ in microbatches(data(), max_tokens=40))
    assert num > 2
    for stage, found in enumerate(ran(True, False)):
        ahead = min(num, 3 - stage)
        assert found["order"] == "F" * ahead + "FB" * (num - ahead) + "B" * ahead
    for found in ran(False, False):
        assert found["order"] == "FB" * num


def weights_on_rank(rank, world, sizes, lora, tied):
    made = model(tie_word_embeddings=tied)
    made = add_lora(made, rank=2) if lora else made
    for name, p in made.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.constant_(p, 0.01)
    stage = parallelize(made, make_mesh(Parallel(**sizes)))
    found = {name: x.clone() for name, x in stream_weights(stage, bucket_bytes=20_000)}
    halves = {name: x.clone() for name, x in stream_weights(stage, dtype=torch.bfloat16)}
    assert lora or all(torch.equal(x.bfloat16(), halves[name]) for name, x in found.items())  # cast, then merged
    return found | dict(adapter_weights(stage))


@pytest.mark.slow_cases("sizes4-True-True", "sizes0-False-False")
@pytest.mark.parametrize(
    ("sizes", "lora", "tied"),
    [
        ({"pp": 2, "tp": 2}, False, False),
        ({"pp": 4}, False, True),
        pytest.param({"pp": 4}, False, False, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, True, False, marks=pytest.mark.slow),
        ({"pp": 2}, True, True),
    ],
)
def test_every_rank_streams_the_weights_of_all_stages(ranks, sizes, lora, tied):
    true = prepare_model(model(tie_word_embeddings=tied))
    if lora:
        add_lora(true, rank=2)
        for name, p in true.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.constant_(p, 0.01)
    true = dict(stream_weights(true)) | dict(adapter_weights(true))
    assert len([name for name in true if "lora" in name]) == (5 * 7 * 2 if lora else 0)
    for found in ranks.run(weights_on_rank, sizes, lora, tied):
        assert list(found) == list(true)
        for name, x in true.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-7 if lora else 0)


def critic():
    made = model()
    made.lm_head = None
    made.score = torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.constant_(made.score.weight, 0.1)
    return made


def values_on_rank(rank, world):
    mesh = make_mesh(Parallel(pp=2))
    stage = parallelize(critic(), mesh)
    batch, w = data()
    found = values(stage, batch)
    (w * found).sum().div(mesh.dp).backward()
    grads = {n: whole(p.grad) for n, p in stage.named_parameters()}
    return summed(found.detach() / mesh.dp, mesh=mesh), grads


@pytest.mark.slow
def test_a_critic_in_stages(ranks):
    one = prepare_critic()
    batch, w = data()
    true = values(one, batch)
    (w * true).sum().backward()
    grads = {n: p.grad for n, p in one.named_parameters()}
    seen = set()
    for found, some in ranks.run(values_on_rank):
        torch.testing.assert_close(found, true.detach(), rtol=1e-5, atol=1e-6)
        for name, x in some.items():
            torch.testing.assert_close(x, grads[name], rtol=1e-4, atol=1e-7)
        seen |= some.keys()
    assert seen == grads.keys()


def prepare_critic():
    from rlkit.parallel.attention import register

    made = critic()
    made.set_attn_implementation(register())
    return made.eval()


def score_on_rank(rank, world, truth):
    """Many micro-batches, no gradients, on a stage that is far ahead of the last: no deadlock, all get the numbers."""
    mesh = make_mesh(Parallel(pp=4))
    stage = parallelize(model(), mesh)
    policy = lambda b: forward(stage, b, temperature=0.7)
    for max_tokens in (26, 4096):
        torch.testing.assert_close(compute_log_probs(policy, data()[0], max_tokens=max_tokens, mesh=mesh), truth)
    return any_ranks([rank == 2, False, True])


def test_scoring_gives_every_rank_the_last_stage_s_numbers(ranks):
    one = prepare_model(model())
    with torch.no_grad():
        truth = forward(one, data()[0], temperature=0.7).logp
    assert ranks.run(score_on_rank, truth) == [[True, False, True]] * 4


def refused_on_rank(rank, world):
    with pytest.raises(ValueError, match="at least as many layers"):
        parallelize(model(layers=3), make_mesh(Parallel(pp=4)))


def test_more_stages_than_layers_are_refused(ranks):
    ranks.run(refused_on_rank)


def groups_on_rank(rank, world):
    mesh = make_mesh(Parallel(pp=2))
    ahead, back = mesh.group("pp"), mesh.backward_group()
    assert back is mesh.backward_group()
    return dist.get_process_group_ranks(ahead), dist.get_process_group_ranks(back), ahead is back


def test_what_goes_back_has_a_group_of_its_own(ranks):
    """NCCL keeps the sends and receives of two ranks in one order per group; two that both begin with a send wait."""
    assert ranks.run(groups_on_rank) == [([0, 2],) * 2 + (False,), ([1, 3],) * 2 + (False,)] * 2
