"""Configs and batches of a made-up rollout, for tests of the policy."""

from pathlib import Path
from typing import Any

import torch

from colo.config import Config, LossConfig, PolicyConfig, UpdateConfig
from colo.types import Batch, MicroBatch

MAX_NEW_TOKENS = 6


def policy_config(folder: Path, **sections: Any) -> Config:
    """A run in float32 whose sections `policy`, `update` and `loss` are given as maps, the rest as they are."""
    policy = PolicyConfig(**{"compute_dtype": "float32", **sections.pop("policy", {})})
    # A large eps: where a gradient is nearly 0, AdamW would else step by the sign of its rounding.
    update = UpdateConfig(**{"lr": 1e-2, "eps": 1e-3, **sections.pop("update", {})})
    loss = LossConfig(**sections.pop("loss", {}))
    return Config(
        model=str(folder),
        run_dir="unused",
        prompts="tests.none",
        reward="tests.none",
        num_steps=10,
        policy=policy,
        update=update,
        loss=loss,
        **sections,
    )


def made_up_rows(num_rows: int, seed: int = 0) -> list[MicroBatch]:
    """Rows of several lengths, each a micro-batch of its own."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        prompt, completion = 2 + index % 3, 1 + (index * 2) % MAX_NEW_TOKENS
        length = prompt + completion
        mask = torch.zeros(1, length, dtype=torch.bool)
        mask[:, prompt:] = True
        rows.append(
            MicroBatch(
                token_ids_BT=torch.randint(2, 250, (1, length), generator=generator),
                loss_mask_BT=mask,
                engine_logprobs_BT=torch.where(mask, -5.5 + 0.8 * torch.randn(1, length, generator=generator), 0.0),
                ages_BT=torch.where(mask, index % 2, 0).int(),
                advantages_B=torch.randn(1, generator=generator),
            )
        )
    return rows


def pack(rows: list[MicroBatch]) -> MicroBatch:
    """One micro-batch of several rows, right-padded."""
    longest = max(row.token_ids_BT.shape[1] for row in rows)

    def padded(name: str) -> torch.Tensor:
        tensors = [getattr(row, name) for row in rows]
        return torch.cat([torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors])

    return MicroBatch(
        token_ids_BT=padded("token_ids_BT"),
        loss_mask_BT=padded("loss_mask_BT"),
        engine_logprobs_BT=padded("engine_logprobs_BT"),
        ages_BT=padded("ages_BT"),
        advantages_B=torch.cat([row.advantages_B for row in rows]),
    )


def as_batch(*minibatches: list[list[MicroBatch]]) -> Batch:
    """A batch of minibatches, each a list of micro-batches given as lists of rows."""
    return Batch(
        minibatches=[[pack(rows) for rows in minibatch] for minibatch in minibatches],
        max_new_tokens=MAX_NEW_TOKENS,
    )
