"""Which way a model's weights are reloaded: found by writing the model folder's own tensors, which must change nothing.

A parameter that changes is computed or laid out anew by vLLM after it loads, so that the policy's bytes in its place
would be wrong weights, although they are the policy's bytes.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from colo.engine.build import VllmParts, folder_tensors
from colo.engine.cpu import expert_modules, repack_experts
from colo.engine.plan import ReloadPlan
from colo.engine.proof import shorten, whole_sums
from colo.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Route:
    """How each reload is done; the same on every rank."""

    by_bracket: dict[str, str] = field(default_factory=dict)
    """Why vLLM's own reload is taken, by engine tensor; empty where the plan is replayed."""
    packed: list[nn.Module] = field(default_factory=list)
    """Expert modules to pack again after each reload, on CPU."""
    lost: list[str] = field(default_factory=list)
    """Engine tensors that no way writes rightly."""


def find_route(
    parts: VllmParts, model: nn.Module, plan: ReloadPlan, targets: dict[str, Tensor], folder: Path, ranks: Ranks
) -> Route:
    """Try the plan, then vLLM's reload bracket. Collective; the engine holds what vLLM read from `folder`.

    What it holds afterwards is those weights, or, where the route is not found, anything.
    """
    trial = _Trial(parts, model, targets, ranks)
    problems: dict[str, str] = {}
    for told in ranks.gather(plan.problems, "comparing the reload plans"):
        problems |= told
    route = Route()
    if parts.has_random_weights:
        logger.info("the model has random weights: the reload was not tried with the folder's own tensors")
        route.packed = expert_modules(model) if parts.on_cpu else []
    else:

        def write() -> None:
            missing = write_by_plan(plan, targets, folder_tensors(folder))
            if missing:
                raise ValueError(f"model must be a folder with every tensor of its plan, got one without {missing[0]}")

        changed = trial.changed(write, route)
        problems = dict.fromkeys(changed, "laid out anew by vLLM after it loads") | problems
    if problems and model is not parts.model:  # vLLM's reload is of the target alone
        route.lost = [name or "every parameter" for name in sorted(problems)]
    elif problems:
        route.by_bracket = problems
        if not parts.has_random_weights:
            route.lost = trial.changed(lambda: write_by_bracket(parts, folder_tensors(folder), plan, targets), route)
    if route.by_bracket and not route.lost:
        reasons = [f"{name or 'every parameter'}: {why}" for name, why in sorted(route.by_bracket.items())]
        logger.info("each reload takes vLLM's own reload_weights: %s", shorten(reasons))
    return route


class _Trial:
    """The engine's sums after the build, and what a way of writing the folder's tensors changes of them."""

    def __init__(self, parts: VllmParts, model: nn.Module, targets: dict[str, Tensor], ranks: Ranks) -> None:
        self._parts, self._targets, self._ranks = parts, targets, ranks
        self._experts = expert_modules(model) if parts.on_cpu else []
        self._built = whole_sums(targets)

    def changed(self, write: Callable[[], None], route: Route) -> list[str]:
        """Write, and return the engine tensors that changed on any rank; packing is added where it mends one."""

        def found() -> list[str]:
            write()
            self._parts.synchronize()
            repack_experts(route.packed)
            return self._differing()

        changed = self._union(found)
        owned = {name: module for module in self._experts for name in names_in(module, self._targets)}
        found_packed = list(dict.fromkeys(owned[name] for name in changed if name in owned))
        route.packed += found_packed

        def packed() -> list[str]:
            repack_experts(found_packed)
            return self._differing()

        return self._union(packed) if found_packed else changed

    def _differing(self) -> list[str]:
        now = whole_sums(self._targets)
        return [name for name, value in self._built.items() if now[name] != value]

    def _union(self, find: Callable[[], list[str]]) -> list[str]:
        told = self._ranks.agreed(find, "trying a reload")
        return sorted({name for names in told for name in names})


def names_in(module: nn.Module, targets: dict[str, Tensor]) -> list[str]:
    """The engine's names of a module's own parameters."""
    storages = {tensor.untyped_storage()._cdata for tensor in module.parameters(recurse=False)}
    return [name for name, tensor in targets.items() if tensor.untyped_storage()._cdata in storages]


def write_by_plan(plan: ReloadPlan, targets: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Write whole tensors through the plan, one at a time; return the sources that were not among them."""
    by_source: dict[str, list[tuple[Tensor, int]]] = {}
    for number, copy in enumerate(plan.copies):
        by_source.setdefault(copy.source, []).append((copy.places.view_of(targets[copy.target]), number))
    with torch.no_grad():
        for name, tensor in weights:
            for place, number in by_source.pop(name, []):
                place.copy_(plan.copies[number].read.view_of(tensor.contiguous()))
        plan.write_fills(targets)
    return sorted(by_source)


def write_by_bracket(
    parts: VllmParts, weights: Iterable[tuple[str, Tensor]], plan: ReloadPlan, targets: dict[str, Tensor]
) -> None:
    """Write whole tensors through vLLM's layerwise reload, which lays out and computes as the build does.

    It sets buffers back to what a model starts with (calibrated scales of the KV cache), so those are put back.
    """
    kept = {name: targets[name].clone() for name in plan.kept}
    with torch.no_grad():
        try:
            parts.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
            )
        finally:
            for name, value in kept.items():
                targets[name].copy_(value)
