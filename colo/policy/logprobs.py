"""Logprobs and entropy in chunks of tokens: the logits of a whole batch never exist in float32."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from colo.config import Distribution


class TokenScores(NamedTuple):
    """What a model says of tokens, each given those before it; 0 and False at position 0, which nothing predicts."""

    logprobs_BT: Tensor
    """[B, T] float32 nats."""
    entropy_BT: Tensor
    """[B, T] float32 nats, of the distribution that the token's logprob is of; without gradient."""
    is_outside_BT: Tensor
    """[B, T] bool: the distribution would have dropped the token, which is counted as kept all the same."""


def token_scores(
    hidden_BTH: Tensor,
    token_ids_BT: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    distribution: Distribution,
    chunk_tokens: int,
) -> TokenScores:
    """Score each token given those before it.

    Which tokens are kept is decided by the logits here, as vLLM decides it by its own: temperature, then min-p, top-k
    and top-p, each among what the one before left. The token itself is always kept: at the edge the engine's rounding
    and ours may differ, and its logprob would be minus infinity. In the backward pass the kept set is a constant.

    Args:
        hidden_BTH: [B, T, H] last hidden states.
        token_ids_BT: [B, T] int64.
        head: [N, H] to [N, V] logits; recomputed in the backward pass.
        distribution: What the logprobs are of.
        chunk_tokens: Tokens whose logits exist at a time, in the backward pass too. Where tokens are dropped a chunk
            is sorted, which takes several times the memory of its logits.
    """
    num_rows = token_ids_BT.shape[0]
    hidden_NH = hidden_BTH.flatten(0, 1)
    # Position t predicts token t + 1. The last position of a row is paired with its first token and cut off below:
    # cheaper than a copy of the hidden states without it.
    targets_N = token_ids_BT.roll(-1, dims=1).flatten()
    chunks = [
        checkpoint(_chunk_scores, hidden, targets, head, distribution, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_NH.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True)
    ]
    whole = []
    for parts in zip(*chunks, strict=True):
        values_BT = torch.cat(parts).view(num_rows, -1)[:, :-1]
        whole.append(torch.cat([values_BT.new_zeros(num_rows, 1), values_BT], dim=1))
    return TokenScores(*whole)


def _chunk_scores(
    hidden_NH: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], distribution: Distribution
) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV = head(hidden_NH).float() / distribution.temperature
    target_logits_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    is_outside_N = torch.zeros_like(targets_N, dtype=torch.bool)
    kept_NV = logits_NV
    if distribution.truncates:
        with torch.no_grad():
            edge_N, share_N = _kept_edge(logits_NV, distribution)
            is_outside_N = target_logits_N < edge_N
            log_weights_NV = _log_weights(logits_NV, edge_N, share_N)
            sampled_N = torch.where(is_outside_N, 0.0, log_weights_NV.gather(-1, targets_N[:, None]).squeeze(-1))
            log_weights_NV.scatter_(-1, targets_N[:, None], sampled_N[:, None])
        kept_NV = logits_NV + log_weights_NV
    normalizer_N = kept_NV.logsumexp(dim=-1)
    with torch.no_grad():
        probabilities_NV = (kept_NV - normalizer_N[:, None]).exp_()
        entropy_N = normalizer_N - (probabilities_NV * logits_NV).sum(dim=-1)
    return target_logits_N - normalizer_N, entropy_N, is_outside_N


def _kept_edge(logits_NV: Tensor, distribution: Distribution) -> tuple[Tensor, Tensor]:
    """[N] the lowest logit that is kept, and [N] how many of the tokens that have just this one are, as a share.

    vLLM drops some of several tokens that are tied at the edge, by their index, and not the same ones on every device.
    Their probability is the same, so a share of each stands for it: the mass that is kept is vLLM's.

    Source: vllm/v1/sample/ops/topk_topp_sampler.py (CPU), topk_topp_triton.py and vllm/v1/worker/gpu/sample/min_p.py
    (CUDA).
    """
    ascending_NV, vocab_size = logits_NV.sort(dim=-1).values, logits_NV.shape[-1]
    is_kept_NV = torch.ones_like(ascending_NV, dtype=torch.bool)
    if distribution.min_p > 0:
        is_kept_NV = ascending_NV >= ascending_NV[:, -1:] + math.log(distribution.min_p)
    if 0 < distribution.top_k < vocab_size:
        lowest = vocab_size - distribution.top_k
        if logits_NV.is_cuda:  # vLLM's Triton kernel keeps just top_k, its CPU sampler all that are tied with the last
            is_kept_NV[:, :lowest] = False
        else:
            is_kept_NV &= ascending_NV >= ascending_NV[:, lowest, None]
    if distribution.top_p < 1:
        mass_NV = ascending_NV.masked_fill(~is_kept_NV, -math.inf).softmax(dim=-1).cumsum(dim=-1)
        is_kept_NV &= mass_NV > 1 - torch.tensor(distribution.top_p, dtype=torch.float32).item()
        del mass_NV
    num_kept_N = is_kept_NV.sum(dim=-1).clamp(min=1)  # the likeliest stays, and NaN has an edge that is in the row
    edge_N1 = ascending_NV.gather(-1, (vocab_size - num_kept_N)[:, None])
    num_above_N = (ascending_NV > edge_N1).sum(dim=-1)
    num_tied_N = (ascending_NV == edge_N1).sum(dim=-1)
    return edge_N1.squeeze(-1), (num_kept_N - num_above_N) / num_tied_N


def _log_weights(logits_NV: Tensor, edge_N: Tensor, share_N: Tensor) -> Tensor:
    """[N, V]: 0 above the edge, the log of the share at it, minus infinity below."""
    tied_NV = torch.where(logits_NV == edge_N[:, None], share_N.log()[:, None], -math.inf)
    return torch.where(logits_NV > edge_N[:, None], 0.0, tied_NV)
