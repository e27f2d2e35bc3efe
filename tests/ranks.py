"""Run a function on every rank of a fresh process group, as torchrun would."""

import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from colo.ranks import Ranks, start_ranks, stop_ranks


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2, tensor_parallel_size: int = 1) -> list[Any]:
    """Call fn(ranks, *args) on every rank; return the results in rank order.

    fn must be importable (module level) and its result picklable.

    Raises:
        ChildFailedError: a rank raised; the message carries the first failing rank's traceback.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        max_restarts=0,
        monitor_interval=0.1,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    results = elastic_launch(config, _rank_main)(fn, args, tensor_parallel_size)
    return [results[rank] for rank in range(world_size)]


@record
def _rank_main(fn: Callable[..., Any], args: tuple[Any, ...], tensor_parallel_size: int) -> Any:
    ranks: Ranks = start_ranks(tensor_parallel_size=tensor_parallel_size, timeout_s=300)
    result = fn(ranks, *args)
    if dist.is_initialized():  # closing an engine ends the process group
        dist.barrier()
    stop_ranks()  # on success only: leaving while an error propagates makes the others fail first
    return result
