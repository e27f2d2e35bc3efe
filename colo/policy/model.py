"""The policy: the trained model on this rank's shard, its optimizer, and the frozen reference."""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colo.config import Config
from colo.policy import optimizer as adamw
from colo.policy.names import stored_tensors
from colo.policy.offload import Offload
from colo.policy.scorer import check_head, head_difference
from colo.policy.shard import LocalShards, decoder_layers, load_weights, sharded_model
from colo.policy.update import update_policy
from colo.ranks import Ranks
from colo.types import Batch, TensorShard

logger = logging.getLogger(__name__)


class Policy:
    """The trained model, sharded over all ranks. Every method that says so is collective."""

    def __init__(self, config: Config, ranks: Ranks, model_folder: Path) -> None:
        """Build, shard and load. Collective.

        Args:
            config: The run's.
            ranks: All of them share the model.
            model_folder: The starting weights, which the reference keeps; `load` then takes a checkpoint's.

        Raises:
            ValueError: a model that colo cannot train, or a folder that does not hold it, by name.
        """
        self.config = config
        self.ranks = ranks
        self.num_updates = 0
        dtype, compute_dtype = (getattr(torch, name) for name in (config.policy.dtype, config.policy.compute_dtype))
        chunk_tokens = config.policy.logprob_chunk_tokens
        self.scorer: Any
        self.scorer, self.pieces = sharded_model(
            model_folder, ranks, dtype=dtype, compute_dtype=compute_dtype, chunk_tokens=chunk_tokens
        )
        self._shards = LocalShards(self.scorer, self.pieces, ranks)
        # Rounding may differ between ranks, and a rank that refuses alone would leave the others waiting.
        difference = head_difference(self.scorer, ranks.device)
        ranks.agreed(lambda: check_head(self.scorer, difference, compute_dtype), "checking the head")
        if config.policy.gradient_checkpointing:
            _recompute_layers(self.scorer)
        self._sharded = list(self.parameters.values())
        self.optimizer = adamw.make_optimizer(self._sharded, config.update)
        self.reference: Any = None
        if config.loss.kl_coef > 0:
            self.reference, _ = sharded_model(
                model_folder, ranks, dtype=compute_dtype, compute_dtype=compute_dtype, chunk_tokens=chunk_tokens
            )
            self.reference.requires_grad_(False)
        self._frozen = list(self.reference.hf.parameters()) if self.reference is not None else []
        self.offload = Offload(config.policy.offload, ranks.device, self.optimizer, self._sharded, self._frozen)
        self.gradient_bytes = 0
        """What this rank's gradients took at the end of the last backward pass."""
        if ranks.is_main and config.update.num_minibatches * config.update.num_epochs == 1:
            logger.info(
                "loss.clip_low and loss.clip_high have no effect: one optimizer step a rollout, so the ratio is 1"
            )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by transformers' names, tied ones once."""
        return dict(self.scorer.hf.named_parameters())

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on a rollout: num_minibatches x num_epochs optimizer steps. Collective.

        Returns:
            Metrics, equal on every rank, but for times and `offload/`.

        Raises:
            RuntimeError: a loss or gradient is not finite on some rank: on every rank, before that optimizer step.
        """
        metrics = update_policy(self, batch)
        self.offload.start_leaving()
        return metrics | self.offload.take_metrics()

    def weights(self) -> Iterator[tuple[str, TensorShard]]:
        """Return (checkpoint name, this rank's part) of parameters and persistent buffers, in one order on every rank.

        The parts are views of what the policy trains, in policy.dtype (buffers in their own, whole on every rank);
        their storages stay the same over updates and `load`, and their addresses too, unless the policy steps aside.
        Nothing is copied on the device and no rank waits for another. Read them before the next update.

        With policy.offload the optimizer's device memory is freed by the time this returns: the engine's turn begins.
        """
        self.offload.bring_weights_back(to_change=False)
        self.offload.set_moments_aside()
        return iter(self._shards.now())

    def step_aside(self) -> None:
        """With policy.offload=all, free the device memory of the policy's and the reference's parameters.

        They come back with the next `update`, `weights`, `full_weights` or `load`, at other addresses. Every rank's
        views of this rank's shards must have been dropped.
        """
        self._shards.reshard()
        self.offload.set_weights_aside()

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds on its device now: policy_parameters (the reference's too), gradients, optimizer.

        Storages are counted, each once: shards, not what FSDP2 gathers for a layer. What was set aside is not counted,
        on CPU neither: there the host's copies are no part of this, and what lies in shared memory stays counted, since
        it is not freed.
        """
        moments = [state[name] for state in self.optimizer.state.values() for name in adamw.MOMENTS if name in state]
        return {
            "policy_parameters": adamw.storage_bytes([*self._sharded, *self._frozen]),
            "gradients": adamw.storage_bytes(adamw.local_gradients(self._sharded)),
            "optimizer": adamw.storage_bytes(moments),
        }

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, whole tensor) of what `weights` yields. Collective: take all of them.

        One parameter is whole at a time, as long as the caller drops a tensor before it takes the next. The tensors
        may be views of what the policy trains: read them, before the next update.
        """
        self.offload.bring_weights_back(to_change=False)
        self._shards.reshard()
        tensors = stored_tensors(self.scorer.hf)
        for parameter, pieces in groupby(self.pieces, lambda piece: piece.parameter):
            tensor = tensors[parameter].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for piece in pieces:
                yield piece.name, piece.of(whole)
            del whole  # before the next is made

    def load(self, folder: Path) -> None:
        """Take the weights of a folder in the Hugging Face layout, each rank its own slices. Collective."""
        self.offload.bring_weights_back(to_change=True)
        self.ranks.agreed(lambda: load_weights(self.scorer.hf, self.pieces, folder, self.ranks), "loading the weights")

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of AdamW's moments, as "exp_avg.PARAMETER". Collective: take all of them."""
        return adamw.optimizer_tensors(self.optimizer, self.parameters, self.offload.whole_moment)

    def load_optimizer(self, folder: Path) -> None:
        """Take AdamW's moments from a folder's optimizer*.safetensors, written by any number of ranks. Collective."""
        self.offload.bring_moments_back()
        self.ranks.agreed(
            lambda: adamw.load_optimizer_tensors(self.optimizer, self.parameters, folder, self.ranks),
            "loading the optimizer",
        )

    def state(self) -> dict[str, int]:
        """What a checkpoint holds beside tensors; fit for JSON."""
        return {"num_updates": self.num_updates}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from what `state` returned: the schedule's place and AdamW's bias correction."""
        self.num_updates = state["num_updates"]
        adamw.set_step(self.optimizer, self.parameters, self.num_updates)


def _recompute_layers(scorer: Any) -> None:
    scorer.hf.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers recomputes where a layer is in training mode; the modules inside stay in eval mode.
    for layer in decoder_layers(scorer.hf):
        layer.training = True
