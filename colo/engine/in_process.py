"""What a vLLM in this process does to it, at the build and at the end, put right."""

import importlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Undo what a build does to this process: it seeds every generator, and sets LOCAL_WORLD_SIZE.

    It also freezes all live objects out of the garbage collector's sight. They stay so: a collection over those 700,000
    takes 0.3 s, and vLLM collects four times a switch.
    """
    cuda = torch.cuda.is_available()
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    kept = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if cuda else None,
    )
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
    if kept[3] is not None:
        torch.cuda.set_rng_state(kept[3])
    if local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_size


def map_before_freeing() -> None:
    """Let vLLM's allocator free what sleeps without an error of the driver at the end of the process.

    vLLM 0.32.0 unmaps each allocation when it is freed, also one whose pages a sleep has unmapped already: the driver
    refuses that, and "CUDA Error: invalid argument" is the last that a user reads of a good run.
    """
    cumem: Any = importlib.import_module("vllm.device_allocator.cumem")
    allocator = cumem.CuMemAllocator.get_instance()
    torch.cuda.empty_cache()  # each is mapped again before it is freed: the room that an update left cached is needed

    def free(pointer: int) -> Any:
        data = allocator.pointer_to_data[pointer]
        if data.is_asleep:
            cumem.create_and_map(data.handle)
            data.is_asleep = False
        return allocator.python_free_callback(pointer)

    allocator.freed_at_exit = free  # the C side borrows the reference
    cumem.init_module(allocator.python_malloc_callback, free)
