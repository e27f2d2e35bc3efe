"""A draft's weights over a sleep: kept on the host and proven, or written anew with the policy's."""

from pathlib import Path

import torch
from torch import Tensor

from colo.config import Config
from colo.engine.build import VllmParts
from colo.engine.plan import engine_tensors
from colo.engine.proof import shorten, whole_sums
from colo.engine.reload import Reloader
from colo.ranks import Ranks
from colo.types import NamedTensors, TensorShard


class DraftWeights:
    """The tensors of a draft that are not the target's; nothing where there is no draft with weights."""

    def __init__(self, parts: VllmParts, config: Config, model_folder: Path, ranks: Ranks) -> None:
        """Note what the draft holds after the build.

        Args:
            parts: The engine; its draft may be None.
            config: The run's.
            model_folder: The target's, which holds the draft's weights too where `engine.speculative` names no model.
            ranks: Of the launch.
        """
        self._parts, self._config, self._ranks = parts, config, ranks
        self._folder = Path(config.engine.speculative.get("model") or model_folder)
        self._targets: dict[str, Tensor] = {}
        if parts.draft is not None:
            shared = {tensor.untyped_storage()._cdata for tensor in engine_tensors(parts.model).values()}
            own = engine_tensors(parts.draft).items()
            self._targets = {name: tensor for name, tensor in own if tensor.untyped_storage()._cdata not in shared}
        self._sums: dict[str, int] = {}
        self.keep_as_is()
        self._reloader: Reloader | None = None

    def prove_kept(self) -> None:
        """Compare the draft with what it held at its last load. Collective.

        Raises:
            RuntimeError: a tensor is another: on every rank.
        """

        def compare() -> None:
            now = whole_sums(self._targets)
            lost = [name for name, value in self._sums.items() if now[name] != value]
            if lost:
                raise RuntimeError(f"the draft's weights are not those that were kept: {shorten(lost)}")

        if self._targets:
            self._ranks.agreed(compare, "proving the draft")

    def reload(self, weights: NamedTensors) -> dict[str, float]:
        """Write a draft that is trained with the policy, through a plan of its own, and prove it. Collective.

        The plan is made, and tried with the draft's own folder, at the first call: until then the draft is as built.

        Raises:
            ValueError: the engine has no draft with weights, or not of these tensors.
            RuntimeError: as `Reloader.reload`.
        """
        draft = self._parts.draft
        if draft is None:
            raise ValueError("draft_weights must be left out: engine.speculative has no draft with weights")
        handed = dict(weights)
        if self._reloader is None:
            stand_ins = [(name, _on_meta(value)) for name, value in handed.items()]
            self._reloader = Reloader(
                self._parts, draft, self._targets, stand_ins, self._folder, self._ranks, self._config.reload
            )
        lost = self._reloader.route.lost
        if lost:
            raise ValueError(
                f"draft_weights must be of a draft that can be written in place, got {shorten(lost)} that cannot"
            )
        metrics = self._reloader.reload(handed.items())
        self.keep_as_is()
        return metrics

    def keep_as_is(self) -> None:
        """Take what the draft holds now for what is to be kept."""
        self._sums = whole_sums(self._targets)

    def drop_policy_views(self) -> None:
        """Forget every view of what was handed over. Collective."""
        if self._reloader is not None:
            self._reloader.drop_policy_views()


def _on_meta(value: Tensor | TensorShard) -> Tensor:
    dtype = value.local.dtype if isinstance(value, TensorShard) else value.dtype
    return torch.empty(value.shape, dtype=dtype, device="meta")
