"""Logprobs and entropy in chunks of tokens: the logits of a whole batch never exist in float32."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden_BTH: Tensor,
    token_ids_BT: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """The logprob of each token given those before it, and the entropy of what it was drawn from.

    Args:
        hidden_BTH: [B, T, H] last hidden states.
        token_ids_BT: [B, T] int64.
        head: [N, H] to [N, V] logits; recomputed in the backward pass.
        temperature: Logits are divided by it.
        chunk_tokens: Tokens whose logits exist at a time, in the backward pass too.

    Returns:
        Logprobs and entropies, both [B, T] float32 in nats; 0 at position 0, which nothing predicts. No gradient
        flows through the entropy: it is a metric.
    """
    num_rows = token_ids_BT.shape[0]
    hidden_NH = hidden_BTH.flatten(0, 1)
    # Position t predicts token t + 1. The last position of a row is paired with its first token and cut off below:
    # cheaper than a copy of the hidden states without it.
    targets_N = token_ids_BT.roll(-1, dims=1).flatten()
    logprobs, entropies = [], []
    for hidden, targets in zip(hidden_NH.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        logprob, entropy = checkpoint(
            _chunk_logprobs, hidden, targets, head, temperature, use_reentrant=False, preserve_rng_state=False
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    first = torch.zeros(num_rows, 1, device=hidden_BTH.device)
    logprobs_BT, entropy_BT = (torch.cat(parts).view(num_rows, -1)[:, :-1] for parts in (logprobs, entropies))
    return torch.cat([first, logprobs_BT], dim=1), torch.cat([first, entropy_BT], dim=1)


def _chunk_logprobs(
    hidden_NH: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_NH).float() / temperature
    normalizer_N = logits_NV.logsumexp(dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - normalizer_N
    with torch.no_grad():
        probabilities_NV = (logits_NV - normalizer_N[:, None]).exp_()
        entropy_N = normalizer_N - (probabilities_NV * logits_NV).sum(dim=-1)
    return logprobs_N, entropy_N
