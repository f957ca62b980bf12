import pytest

from rlkit.parallel.mesh import Parallel, resolve, start


@pytest.mark.parametrize(
    ("sizes", "world", "shard"),
    [
        ({}, 1, 1),
        ({}, 8, 8),
        ({"tp": 2}, 8, 4),
        ({"tp": 2, "cp": 2, "replicate": 2}, 16, 2),
        ({"shard": 4, "tp": 2}, 8, 4),
        ({"pp": 2, "ep": 4}, 8, 4),
        ({"tp": 4, "ep": 8}, 8, 2),
    ],
)
def test_the_shard_size_is_what_is_left(sizes, world, shard):
    assert resolve(Parallel(**sizes), world_size=world).shard == shard


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"shard": 2, "tp": 2}, 8, r"shard 2 \* tp 2 = 4 ranks, but there are 8; use shard=4"),
        ({"tp": 3}, 8, r"tp 3 = 6 ranks, but there are 8; with shard=0 any one of these changes fits: tp=2"),
        ({"tp": 8, "cp": 2}, 8, r"cp 2 \* tp 8 = 16 ranks, but there are 8; .* tp=4; cp=1"),
        ({"tp": 0}, 8, r"`tp` must be at least 1, got 0"),
        ({"ep": 3}, 8, r"ep=3 must divide shard \* cp \* tp = 8 \* 1 \* 1"),
    ],
)
def test_sizes_that_do_not_fit_are_told_what_would(sizes, world, message):
    with pytest.raises(ValueError, match=message):
        resolve(Parallel(**sizes), world_size=world)


@pytest.mark.parametrize(("device", "local_rank", "gpu"), [("cuda", None, 0), ("cuda:1", None, 1), ("cuda", "3", 3)])
def test_a_rank_takes_its_own_gpu_and_a_process_alone_the_one_it_names(monkeypatch, device, local_rank, gpu):
    taken = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False) if local_rank is None else monkeypatch.setenv(name, local_rank)
    start(device=device)
    assert taken == [gpu]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_zigzag_gives_every_rank_the_same_attention_work(cp):
    """Query-key pairs of one long sequence; contiguous chunks would give the last rank almost twice the mean."""
    from rlkit.parallel.attention import Segment
    from rlkit.parallel.context import _local_segments

    chunk = 64
    size = 2 * cp * chunk
    pairs = []
    for rank in range(cp):
        spans = _local_segments([Segment(0, size, [(0, size)])], rank, cp, chunk)
        assert sum(s.length for s in spans) == 2 * chunk
        pairs.append(sum(k - s.length + i + 1 for s in spans for k in [s.keys[-1][1]] for i in range(s.length)))
    assert sum(pairs) == size * (size + 1) // 2
    assert len(set(pairs)) == 1
