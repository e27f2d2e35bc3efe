"""What a rollout asks of an engine, with which seeds, and whether the ranks of one engine got the same."""

import hashlib
from typing import Protocol

from colo.ranks import Ranks
from colo.types import Completion, Request, Sampling


class Generator(Protocol):
    """What the sampler needs of an engine."""

    def generate(self, requests: list[Request], sampling: Sampling, what: str) -> list[Completion]:
        """Sample every request to its end, in order."""
        ...

    def require_ready(self) -> None:
        """Refuse an engine that cannot generate now."""
        ...

    def submit(self, request: Request, sampling: Sampling) -> str:
        """Queue one request."""
        ...

    def step(self) -> int:
        """One scheduler step; return how many requests it finished."""
        ...

    def finished(self) -> list[Completion]:
        """The completions that finished since the last call."""
        ...

    def abort(self) -> list[Completion]:
        """Drop what is in flight; return what it has so far, with the finish reason "abort"."""
        ...


def request_seed(run_seed: int, step: int, slot: int, sample: int, num_tokens: int = 0) -> int:
    """The seed of one request: a 63-bit hash of what identifies it, the same on every rank and platform.

    Args:
        step: In which the prompt was first submitted, as its `slot`-th prompt over all replicas.
        num_tokens: That the completion has already, from earlier steps.
    """
    identity = f"{run_seed}/{step}/{slot}/{sample}" + (f"/{num_tokens}" if num_tokens else "")
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") >> 1


def require_same_tokens(completions: list[Completion], ranks: Ranks, what: str) -> None:
    """Compare a digest of the tokens over the ranks of one engine. Collective over the group.

    Raises:
        RuntimeError: they differ: a rank drew from another generator than the others.
    """
    tokens = repr([(c.slot, c.sample, c.token_ids) for c in completions])
    digests = ranks.gather_in_group(hashlib.sha256(tokens.encode()).hexdigest(), f"{what}: comparing tokens")
    differ = [rank for rank, digest in zip(ranks.group_ranks, digests, strict=True) if digest != digests[0]]
    if differ:
        raise RuntimeError(
            f"{what}: the ranks of one engine sampled different tokens: rank {ranks.group_ranks[0]} "
            f"and rank {', '.join(map(str, differ))}"
        )
