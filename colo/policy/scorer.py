"""The module that FSDP2 shards as a whole: token ids in, logprobs and entropy out."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from colo.config import Distribution
from colo.policy.logprobs import TokenScores, token_scores

NUM_CHECK_TOKENS = 8
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Nats by compute dtype: rounding of the same product, well below what a forgotten scale does to real logits."""


class Scorer(nn.Module):
    """A language model and its head, which runs in chunks inside this module's forward.

    The head's weight belongs to FSDP's root, and so is whole only there.
    """

    def __init__(self, hf: PreTrainedModel, *, chunk_tokens: int) -> None:
        """Take transformers' model, which keeps its own names."""
        super().__init__()
        head = hf.get_output_embeddings()
        if hf.base_model is hf or not isinstance(head, nn.Linear):
            raise ValueError(f"model must be a decoder with a linear head, got {hf.config.model_type}")
        self.hf = hf
        self.chunk_tokens = chunk_tokens
        self._softcap: float | None = hf.config.get_text_config().to_dict().get("final_logit_softcapping")

    def forward(self, token_ids_BT: Tensor, distribution: Distribution, *, by_hf: bool = False) -> TokenScores:
        """Score every token. Collective, once the module is sharded.

        Rows are right-padded and attention is causal, so padding needs no mask: nothing before it sees it.

        Args:
            token_ids_BT: [B, T] int64.
            distribution: What the logprobs are of.
            by_hf: Take the logits from transformers' own forward, whole: for comparisons, not for training.

        Returns:
            As `token_scores`.
        """
        if by_hf:
            logits_BTV = self.hf(input_ids=token_ids_BT, use_cache=False).logits
            return token_scores(
                logits_BTV, token_ids_BT, nn.Identity(), distribution=distribution, chunk_tokens=self.chunk_tokens
            )
        hidden_BTH = self.hf.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        return token_scores(
            hidden_BTH, token_ids_BT, self._head, distribution=distribution, chunk_tokens=self.chunk_tokens
        )

    def _head(self, hidden_NH: Tensor) -> Tensor:
        head = self.hf.get_output_embeddings()
        assert head is not None, "a scorer must have a head: it was there when the scorer was made"
        logits_NV: Tensor = head(hidden_NH)
        if self._softcap is not None:
            logits_NV = torch.tanh(logits_NV / self._softcap) * self._softcap
        return logits_NV


def head_difference(scorer: Any, device: torch.device) -> float:
    """The largest difference, in nats, of the chunked head's logprobs and transformers' own. Collective."""
    vocab_size = scorer.hf.config.get_text_config().vocab_size
    token_ids_BT = (torch.arange(NUM_CHECK_TOKENS, device=device) * 31 % vocab_size)[None]
    with torch.no_grad():
        ours_BT = scorer(token_ids_BT, Distribution()).logprobs_BT
        theirs_BT = scorer(token_ids_BT, Distribution(), by_hf=True).logprobs_BT
    scorer.reshard()
    return (ours_BT - theirs_BT).abs().max().item()


def check_head(scorer: Any, difference: float, compute_dtype: torch.dtype) -> None:
    """Judge what `head_difference` found.

    Raises:
        ValueError: too much: the model does something to its logits that colo does not know.
    """
    if not difference <= CHECK_TOLERANCE[compute_dtype]:
        raise ValueError(
            "model must compute its logits as its head times the last hidden states, "
            f"got {scorer.hf.config.model_type}, whose own logprobs differ by {difference:.2g} nats"
        )
