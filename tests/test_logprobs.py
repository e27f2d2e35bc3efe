"""Logprobs and entropy in chunks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colo.policy.logprobs import token_logprobs


class _LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def _inputs(num_rows: int, num_tokens: int, vocab_size: int, width: int = 8) -> tuple[Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    hidden_BTH = torch.randn(num_rows, num_tokens, width, requires_grad=True)
    return hidden_BTH, torch.randint(vocab_size, (num_rows, num_tokens)), nn.Linear(width, vocab_size, bias=False)


def test_a_position_has_the_logprob_of_its_own_token_given_those_before_it() -> None:
    logits_BTV = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    logprobs_BT, entropy_BT = token_logprobs(
        logits_BTV, torch.tensor([[1, 0, 0]]), nn.Identity(), temperature=0.5, chunk_tokens=2
    )
    # Divided by 0.5 the logits are 4 apart: log(1 / (1 + exp(-4))) and 4 less.
    assert logprobs_BT[0].tolist() == pytest.approx([0.0, -0.01815, -4.01815], abs=1e-5)
    unlikely = 1 / (1 + math.exp(4))
    entropy = -unlikely * math.log(unlikely) - (1 - unlikely) * math.log(1 - unlikely)
    assert entropy_BT[0].tolist() == pytest.approx([0.0, entropy, entropy], abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
def test_chunks_give_the_logprobs_and_gradients_of_the_whole(chunk_tokens: int) -> None:
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=3, num_tokens=6, vocab_size=11)
    chunked_BT, entropy_BT = token_logprobs(hidden_BTH, token_ids_BT, head, temperature=0.7, chunk_tokens=chunk_tokens)
    whole_BTV = (head(hidden_BTH) / 0.7).log_softmax(dim=-1)[:, :-1]
    whole_BT = whole_BTV.gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(chunked_BT[:, 1:], whole_BT)
    torch.testing.assert_close(entropy_BT[:, 1:], -(whole_BTV.exp() * whole_BTV).sum(dim=-1))
    weights_BT = torch.randn_like(whole_BT)
    inputs = [hidden_BTH, head.weight]
    ours = torch.autograd.grad((chunked_BT[:, 1:] * weights_BT).sum(), inputs)
    theirs = torch.autograd.grad((whole_BT * weights_BT).sum(), inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their)


def test_logits_of_all_tokens_never_exist_forward_or_backward() -> None:
    num_tokens, vocab_size, chunk_tokens = 64, 1000, 8
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=1, num_tokens=num_tokens, vocab_size=vocab_size)
    with _LargestTensor() as largest:
        logprobs_BT, _ = token_logprobs(hidden_BTH, token_ids_BT, head, temperature=1.0, chunk_tokens=chunk_tokens)
        logprobs_BT.sum().backward()
    assert largest.num_elements == chunk_tokens * vocab_size


def test_bfloat16_logits_are_normalized_in_float32() -> None:
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=1, num_tokens=5, vocab_size=300)
    logprobs_BT, _ = token_logprobs(
        hidden_BTH.bfloat16(), token_ids_BT, head.bfloat16(), temperature=1.0, chunk_tokens=4
    )
    logits_BTV = head.bfloat16()(hidden_BTH.bfloat16())[:, :-1].float()
    expected_BT = logits_BTV.log_softmax(dim=-1).gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    assert logprobs_BT.dtype == torch.float32
    torch.testing.assert_close(logprobs_BT[:, 1:], expected_BT)
