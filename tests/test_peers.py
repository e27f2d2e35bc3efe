import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from colo.engine import peers
from colo.engine.gather import BucketGather, Wanted
from colo.engine.layouts import check_sources, lay_out
from colo.engine.peers import PolicyShards, check_shared_memory
from colo.engine.strided import Strided
from colo.ranks import Ranks
from colo.types import TensorShard
from tests.ranks import run_ranks

EXPERTS = 4


def wholes() -> dict[str, Tensor]:
    """The policy's tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "uneven": draw(5, 6),
        "short": draw(2, 4),
        "transposed": draw(9, 7),
        "half": draw(9, 3).bfloat16(),
        "bias": draw(7).double(),
        **{f"experts.{e}": draw(3, 5) for e in range(EXPERTS)},
        "buffer": torch.arange(11),
        "scale": draw(),
    }


def rows_of(num_rows: int, ranks: Ranks) -> slice:
    size = -(-num_rows // ranks.world_size)
    return slice(min(num_rows, ranks.rank * size), min(num_rows, (ranks.rank + 1) * size))


def shards_of(ranks: Ranks) -> dict[str, TensorShard]:
    """This rank's part of each: rows as FSDP2 deals them, experts as views of one storage, buffers whole."""
    handed, full = {}, wholes()
    mine = rows_of(EXPERTS, ranks)
    packed = torch.stack([full[f"experts.{e}"] for e in range(EXPERTS)])[mine].clone()
    for name, whole in full.items():
        if name in ("buffer", "scale"):
            start, local = 0, whole
        elif name.startswith("experts."):
            expert = int(name.removeprefix("experts.")) - mine.start
            held = 0 <= expert < len(packed)
            start, local = 0, packed[expert] if held else packed.new_empty(0, 5)
        else:
            rows = rows_of(len(whole), ranks)
            start, local = rows.start * math.prod(whole.shape[1:]), whole[rows].clone()
            if name == "transposed":
                local = local.t().contiguous().t()
        handed[name] = TensorShard(shape=tuple(whole.shape), start=start, local=local)
    return handed


def read_by_peer(shards: PolicyShards, name: str) -> Tensor:
    whole = shards.layouts[0][name]
    flat = torch.full((math.prod(whole.whole_shape),), -7).to(whole.dtype)
    for owner in shards.owners(name):
        local = shards.local_of(owner, name)
        assert local is not None, f"{name} of rank {owner} must be readable"
        start = shards.layouts[owner][name].start
        flat[start : start + local.numel()] = local.reshape(-1)
    return flat.reshape(whole.whole_shape)


def own_of(handed: dict[str, TensorShard]) -> Any:
    return lambda name: handed[name].local


class Allocations(TorchDispatchMode):
    """Counts the bytes of every tensor that is made, and of none that is a view."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view and "out" not in str(func) and "_." not in str(func):
            self.num_bytes += result.untyped_storage().nbytes()
        return result


def gathers_what_it_wants(ranks: Ranks, shards: PolicyShards, handed: dict[str, TensorShard], bucket: int) -> None:
    full, spread = wholes(), [name for name in handed if not shards.is_whole(name)]
    gather = BucketGather(ranks, shards.layouts, own_of(handed), spread, bucket, ranks.device)
    assert gather.extra_bytes <= bucket
    targets = {name: torch.zeros(full[name].shape, dtype=torch.bfloat16) for name in spread}
    columns = {name: torch.zeros(full[name].shape) for name in spread if full[name].dim() == 2}
    wanted = []
    for name in spread:
        for owner in shards.owners(name):
            layout = shards.layouts[owner][name]
            part = targets[name].view(-1)[layout.start : layout.start + layout.numel].view(layout.shape)
            width = 1 if len(layout.shape) == 1 else layout.shape[1]
            stride = (1,) if len(layout.shape) == 1 else (width, 1)
            wanted.append(Wanted(target=part, owner=owner, name=name, places=Strided(0, layout.shape, stride)))
            if name in columns and ranks.rank == 0:  # the others want less: what is wanted may differ
                first = layout.start // width
                part = columns[name][first : first + layout.shape[0], 1:3]
                places = Strided(1, (layout.shape[0], 2), (width, 1))
                wanted.append(Wanted(target=part, owner=owner, name=name, places=places))
    gather.pull(wanted)
    for name, target in targets.items():
        assert torch.equal(target, full[name].bfloat16()), (name, bucket)
    for name, target in columns.items() if ranks.rank == 0 else ():
        assert torch.equal(target[:, 1:3], full[name].float()[:, 1:3]), (name, bucket)
        target[:, 1:3] = 0
        assert not target.any(), (name, bucket)
    for name, whole in full.items():
        assert torch.equal(gather.whole(name), whole), (name, bucket)


def allocates_a_bucket(ranks: Ranks) -> None:
    num_rows, bucket = 2048 // ranks.world_size, 1 << 16
    local = (torch.arange(512 * num_rows).view(512, num_rows) + ranks.rank).float().t()
    handed = {"w": TensorShard(shape=(num_rows * ranks.world_size, 512), start=ranks.rank * local.numel(), local=local)}
    shards = PolicyShards(ranks, "gather")
    shards.refresh(handed)
    gather = BucketGather(ranks, shards.layouts, own_of(handed), ["w"], bucket, ranks.device)
    target = torch.zeros(num_rows, 512, dtype=torch.bfloat16)
    owner = (ranks.rank + 1) % ranks.world_size
    with Allocations() as allocations:
        gather.pull([Wanted(target=target, owner=owner, name="w", places=Strided(0, (num_rows, 512), (512, 1)))])
    assert torch.equal(target, (local - ranks.rank + owner).bfloat16())
    assert gather.num_rounds > 40
    assert bucket // 2 < allocations.num_bytes < bucket + 4096, "the bucket, and the messages of the agreement before"


def refuses(shards: PolicyShards, handed: dict[str, TensorShard], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        shards.refresh(handed)
    assert said in str(caught.value)


def reads_every_shard(ranks: Ranks) -> str:
    handed, full, last = shards_of(ranks), wholes(), ranks.world_size - 1
    shards = PolicyShards(ranks, "peer")
    assert shards.refresh(handed)
    assert not shards.refresh(handed)
    assert [shards.generation, shards.is_gathering] == [1, False]
    ways = ["own" if rank == ranks.rank else "peer" for rank in range(ranks.world_size)]
    assert [shards.transport_of(rank) for rank in range(ranks.world_size)] == ways
    for name, whole in full.items():
        assert torch.equal(read_by_peer(shards, name), whole), name
    assert shards.owners("buffer") == [ranks.rank]
    assert shards.owners("uneven") == list(range(ranks.world_size))
    assert shards.owners("short") == [0, 1]
    used = {layout.storage for layout in shards.layouts[0].values() if layout.storage is not None}
    assert len(used) < sum(layout.numel > 0 for layout in shards.layouts[0].values()), "experts lie in one storage"

    gathered = PolicyShards(ranks, "gather")
    assert gathered.refresh(handed)
    assert gathered.is_gathering
    assert gathered.local_of((ranks.rank + 1) % ranks.world_size, "uneven") is None
    for bucket in (64, 4096):
        gathers_what_it_wants(ranks, gathered, handed, bucket)

    allocates_a_bucket(ranks)

    dist.barrier()
    handed["uneven"].local.add_(100)  # a write after the exchange: the peers see it
    handed["transposed"].local.mul_(2)
    assert not shards.refresh(handed)
    assert torch.equal(read_by_peer(shards, "uneven"), full["uneven"] + 100)
    assert torch.equal(read_by_peer(shards, "transposed"), full["transposed"] * 2)

    dist.barrier()
    if ranks.rank == last:  # one rank's storage moved: all of them exchange
        old = handed["uneven"]
        handed["uneven"] = TensorShard(shape=old.shape, start=old.start, local=old.local.clone() + 1)
        old.local.fill_(-1)
    assert shards.refresh(handed)
    assert shards.generation == 2
    moved = full["uneven"] + 100
    moved[-(-5 // ranks.world_size) * last :] += 1
    assert torch.equal(read_by_peer(shards, "uneven"), moved)
    assert not shards.refresh(handed)

    shards.drop()
    assert shards.refresh(handed)
    assert shards.generation == 3
    assert torch.equal(read_by_peer(shards, "uneven"), moved)

    broken = dict(handed)
    start = handed["uneven"].start - (ranks.rank == last)
    broken["uneven"] = TensorShard(shape=(5, 6), start=start, local=handed["uneven"].local)
    refuses(shards, broken, ValueError, "shards of uneven must hold each of its 30 elements once")
    if ranks.rank == last:
        broken["uneven"] = TensorShard(shape=(5, 6), start=0, local=torch.empty(1, device="meta"))
    refuses(shards, broken, ValueError, "uneven must be a dense tensor on cpu")
    assert shards.refresh(handed)
    assert torch.equal(read_by_peer(shards, "uneven"), moved)
    return shards.describe()


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_reads_every_shard_live_and_by_gather(world_size: int) -> None:
    said = run_ranks(reads_every_shard, world_size=world_size)

    peers_of_each = world_size - 1
    assert said == [
        f"each rank reads {peers_of_each} peers of its host through memory handles and 0 ranks by gather"
    ] * (world_size)


def reads_over_two_hosts(ranks: Ranks) -> tuple[str, list[str]]:
    handed, full, host = shards_of(ranks), wholes(), f"host-{ranks.rank // 2}"
    refuses(PolicyShards(ranks, "peer", host), handed, RuntimeError, "rank 0 cannot read rank 2: it is on another host")
    shards = PolicyShards(ranks, "auto", host)
    shards.refresh(handed)
    assert shards.is_gathering
    neighbour, far = ranks.rank ^ 1, (ranks.rank + 2) % 4
    near = shards.local_of(neighbour, "half")
    layout = shards.layouts[neighbour]["half"]
    assert near is not None
    assert torch.equal(near.reshape(-1), full["half"].view(-1)[layout.start : layout.start + layout.numel])
    assert shards.local_of(far, "half") is None
    gathers_what_it_wants(ranks, shards, handed, 96)

    peers.free_shared_memory = lambda: 0  # as on a host where it is too small
    fresh = shards_of(ranks)
    refuses(PolicyShards(ranks, "peer", "one host"), fresh, RuntimeError, "/dev/shm has 0 MiB free of the 1 MiB")
    crowded = PolicyShards(ranks, "auto", "one host")
    crowded.refresh(fresh)
    assert not any(shard.local.is_shared() for name, shard in fresh.items() if shard.local.numel())
    assert [crowded.transport_of(rank) for rank in range(4) if rank != ranks.rank] == ["gather"] * 3
    gathers_what_it_wants(ranks, crowded, fresh, 1 << 16)

    def failing(name: str) -> Tensor:
        if ranks.rank == 1 and name == "half":
            raise OSError("planted")
        return fresh[name].local

    gather = BucketGather(ranks, crowded.layouts, failing, list(fresh), 160, ranks.device)
    if ranks.rank == 1:
        with pytest.raises(OSError, match="planted"):
            gather.pull([])
    else:
        gather.pull([])  # a rank that fails goes on to the last round, so that nobody hangs
    return shards.describe(), [shards.transport_of(rank) for rank in range(4)]


def test_auto_takes_handles_inside_a_host_and_gathers_across_hosts() -> None:
    results = run_ranks(reads_over_two_hosts, world_size=4)

    assert {said for said, _ in results} == {
        "each rank reads 1 peers of its host through memory handles and 2 ranks by gather"
    }
    assert results[0][1] == ["own", "peer", "gather", "gather"]
    assert results[3][1] == ["gather", "gather", "peer", "own"]


def places_shards(ranks: Ranks, folder: Path, is_killed: bool) -> list[str]:
    handed = shards_of(ranks)
    shards = PolicyShards(ranks, "peer")
    shards.refresh(handed)
    read_by_peer(shards, "uneven")
    names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    (folder / f"{ranks.rank}").write_text("\n".join(names))
    dist.barrier()
    if is_killed and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # fails where the other rank is gone
    return names


@pytest.mark.parametrize("is_killed", [False, True])
def test_shared_memory_is_gone_after_the_ranks(tmp_path: Path, is_killed: bool) -> None:
    if is_killed:
        with pytest.raises(ChildFailedError):
            run_ranks(places_shards, tmp_path, True)
    else:
        run_ranks(places_shards, tmp_path, False)

    placed = [name for rank in range(2) for name in (tmp_path / f"{rank}").read_text().split()]
    assert len(placed) >= 8
    deadline = time.monotonic() + 10  # a process of torch's own removes them once the ranks are gone
    while time.monotonic() < deadline and any((Path("/dev/shm") / name).exists() for name in placed):
        time.sleep(0.1)
    assert [name for name in placed if (Path("/dev/shm") / name).exists()] == []


def trains_sharded(ranks: Ranks) -> None:
    def losses_and_weights(is_placed: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        shards = PolicyShards(ranks, "peer")
        seen = []
        for step in range(4):
            if is_placed:
                handed = {}
                for name, parameter in model.named_parameters():
                    local = parameter.to_local().detach()  # pyright: ignore[reportAttributeAccessIssue]
                    rows = -(-len(parameter) // ranks.world_size)
                    start = min(len(parameter), rows * ranks.rank) * math.prod(parameter.shape[1:])
                    handed[name] = TensorShard(shape=tuple(parameter.shape), start=start, local=local)
                assert shards.refresh(handed) == (step == 0), "an optimizer step leaves the storages where they are"
                for name, parameter in model.named_parameters():
                    whole = parameter.full_tensor().detach()  # pyright: ignore[reportAttributeAccessIssue]
                    assert torch.equal(read_by_peer(shards, name), whole), (name, step)
                dist.barrier()
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 24).view(4, 6) + ranks.rank).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        full = [p.full_tensor().detach() for p in model.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
        return seen, full

    losses, weights = losses_and_weights(False)
    placed_losses, placed_weights = losses_and_weights(True)
    assert losses == placed_losses
    assert losses[-1] != losses[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, placed_weights, strict=True))


def test_fsdp_trains_the_same_with_its_storages_in_shared_memory() -> None:
    run_ranks(trains_sharded)


def one_rank() -> Ranks:
    """No process group: a collective would fail."""
    place = {"rank": 0, "world_size": 1, "local_rank": 0, "device": torch.device("cpu"), "tensor_parallel_size": 1}
    return Ranks(**place, notice_s=30.0, store=dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]


def test_one_rank_makes_no_collective_and_moves_no_storage() -> None:
    shards, handed = PolicyShards(one_rank(), "auto"), shards_of(one_rank())
    before = {name: shard.local.data_ptr() for name, shard in handed.items()}

    assert shards.refresh(handed)
    assert not shards.refresh(handed)
    for name, whole in wholes().items():
        assert shards.is_whole(name)
        assert torch.equal(read_by_peer(shards, name), whole)
    assert before == {name: shard.local.data_ptr() for name, shard in handed.items()}
    shards.drop()
    assert shards.refresh(handed)


def check_spans(total: int, *spans: tuple[int, int]) -> None:
    rows = [
        lay_out({"w": TensorShard(shape=(total,), start=start, local=torch.empty(stop - start))})[0]
        for start, stop in spans
    ]
    check_sources(rows)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 4), (3, 6)], "got elements 3 to 3 on rank 0 and on rank 1"),
        ([(0, 2), (4, 6)], "got elements 2 to 3 on no rank (rank 1 has those from 4 on)"),
        ([(0, 4), (0, 0)], "got elements 4 to 5 on no rank (1 of 2 ranks hold some)"),
        ([(0, 4), (4, 9)], "got elements up to 8 on rank 1"),
        ([(0, 6), (0, 6), (0, 2)], "got elements 0 to 1 on rank 2 and on rank 0"),
        ([(0, 0), (0, 0)], "got elements 0 to 5 on no rank (0 of 2 ranks hold some)"),
    ],
)
def test_overlaps_and_holes_are_refused_by_name_and_rank(spans: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match="shards of w must hold each of its 6 elements once") as caught:
        check_spans(6, *spans)
    assert said in str(caught.value)


def test_spread_and_whole_sources_are_told_apart() -> None:
    check_spans(6, (4, 6), (0, 4), (9, 9))
    check_spans(6, (0, 6), (0, 6))
    check_spans(6, (0, 6), (0, 0))
    check_spans(0, (0, 0), (0, 0))


def test_too_little_shared_memory_refuses_peer_alone() -> None:
    check_shared_memory(1, "peer")
    check_shared_memory(2**60, "gather")
    check_shared_memory(2**60, "auto")
    with pytest.raises(ValueError, match=r"reload\.transport must be gather or auto where /dev/shm has less than"):
        check_shared_memory(2**60, "peer")
