"""AdamW over sharded parameters: its learning rate, the gradient norm over all ranks, and its state in checkpoints."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colo.config import UpdateConfig
from colo.policy.folder import optimizer_files
from colo.policy.shard import local_rows
from colo.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(update_index: int, num_updates_total: int, update: UpdateConfig) -> float:
    """The learning rate of an optimizer step.

    It rises linearly over `warmup_steps`, whose last step has the peak, then stays or falls such that it would be at
    `min_lr_ratio` of the peak one step after the last: no step is spent at 0.

    Args:
        update_index: 0-based optimizer step of the run.
        num_updates_total: Optimizer steps of the whole run.
        update: Gives lr, schedule, warmup_steps and min_lr_ratio.
    """
    if update_index < update.warmup_steps:
        return update.lr * (update_index + 1) / update.warmup_steps
    if update.schedule == "constant":
        return update.lr
    progress = (update_index - update.warmup_steps) / max(1, num_updates_total - update.warmup_steps)
    left = 1 - progress if update.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return update.lr * (update.min_lr_ratio + (1 - update.min_lr_ratio) * left)


def make_optimizer(parameters: list[nn.Parameter], update: UpdateConfig) -> torch.optim.AdamW:
    """AdamW with its moments in the parameters' dtype; each optimizer step sets the learning rate anew.

    Source: arxiv.org/abs/1711.05101.
    """
    return torch.optim.AdamW(
        parameters,
        lr=update.lr,
        betas=(update.beta1, update.beta2),
        eps=update.eps,
        weight_decay=update.weight_decay,
        fused=True,
    )


def local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients there are, as views."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a graph."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What this rank's parts take: each storage once, however many tensors are in it; 0 for one that is freed."""
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def sum_of_squares(gradients: list[Tensor]) -> float:
    """Of all elements of this rank's shards."""
    # In float32 whatever the gradients are in: a norm in bfloat16 has 8 bits.
    return torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients]).item() ** 2


def clip(gradients: list[Tensor], grad_norm: float, max_grad_norm: float) -> None:
    """Scale this rank's shards so that the global norm is at most max_grad_norm; 0 clips nothing."""
    if max_grad_norm and grad_norm > max_grad_norm:
        torch._foreach_mul_(gradients, max_grad_norm / grad_norm)  # pyright: ignore[reportPrivateImportUsage]


def optimizer_tensors(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield ("exp_avg.PARAMETER", whole tensor) and so on. Collective: every rank takes all of them.

    Args:
        optimizer: Of the parameters.
        parameters: By name.
        whole: Collective: makes a moment whole.
    """
    for name, parameter in parameters.items():
        state = moments(optimizer, parameter)
        for moment in MOMENTS:
            yield f"{moment}.{name}", whole(state[moment])


def load_optimizer_tensors(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], folder: Path, ranks: Ranks
) -> None:
    """Fill this rank's shards of the moments from a checkpoint that any number of ranks wrote.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    files = optimizer_files(folder)
    for name, parameter in parameters.items():
        for moment in MOMENTS:
            stored = f"{moment}.{name}"
            if stored not in files or files.shape(stored) != tuple(parameter.shape):
                found = list(files.shape(stored)) if stored in files else "none"
                raise ValueError(
                    f"resume must be a checkpoint with {stored} {list(parameter.shape)}, got {found} in {str(folder)!r}"
                )
            local, rows = local_rows(moments(optimizer, parameter)[moment], ranks)
            local.copy_(files.read(stored, rows))


def moments(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of a parameter, made as AdamW would in its first step where there is none yet."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
    return state


def set_step(optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], step: int) -> None:
    """Say how many steps the moments have seen, for AdamW's bias correction."""
    for parameter in parameters.values():
        moments(optimizer, parameter)["step"].fill_(step)
