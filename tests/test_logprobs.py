"""Logprobs and entropy in chunks, of the distribution that vLLM draws from."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from colo.config import Distribution, RolloutConfig
from colo.engine.build import folder_tensors
from colo.engine.engine import Engine
from colo.policy.logprobs import TokenScores, token_scores
from colo.policy.model import Policy
from colo.policy.scorer import Scorer
from colo.ranks import Ranks
from colo.types import MicroBatch, Sampling
from tests.engines import GREEDY, PROMPT, engine_config, make_requests
from tests.ranks import run_ranks
from tests.rollouts import MAX_NEW_TOKENS, as_batch, policy_config

TEMPERED = Distribution(temperature=0.7)
TRUNCATED = [
    Distribution(top_p=0.9),
    Distribution(temperature=0.5, top_k=7),
    Distribution(min_p=0.3),
    Distribution(temperature=0.7, top_p=0.6, top_k=9),
    Distribution(temperature=1.3, top_p=0.8, top_k=50, min_p=0.02),
]

TIED = [
    Distribution(top_k=20),
    Distribution(temperature=0.7, top_k=50),
    Distribution(top_p=0.9),
    Distribution(temperature=0.7, top_p=0.6),
    Distribution(top_k=50, top_p=0.8),
]


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
    logprobs_BT, entropy_BT, is_outside_BT = token_scores(
        logits_BTV,
        torch.tensor([[1, 0, 0]]),
        nn.Identity(),
        distribution=Distribution(temperature=0.5),
        chunk_tokens=2,
    )
    # Divided by 0.5 the logits are 4 apart: log(1 / (1 + exp(-4))) and 4 less.
    assert logprobs_BT[0].tolist() == pytest.approx([0.0, -0.01815, -4.01815], abs=1e-5)
    unlikely = 1 / (1 + math.exp(4))
    entropy = -unlikely * math.log(unlikely) - (1 - unlikely) * math.log(1 - unlikely)
    assert entropy_BT[0].tolist() == pytest.approx([0.0, entropy, entropy], abs=1e-6)
    assert not is_outside_BT.any()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
def test_chunks_give_the_logprobs_and_gradients_of_the_whole(chunk_tokens: int) -> None:
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=3, num_tokens=6, vocab_size=11)
    chunked_BT, entropy_BT, _ = token_scores(
        hidden_BTH, token_ids_BT, head, distribution=TEMPERED, chunk_tokens=chunk_tokens
    )
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


@pytest.mark.parametrize("distribution", [Distribution(), TRUNCATED[-1]])
def test_logits_of_all_tokens_never_exist_forward_or_backward(distribution: Distribution) -> None:
    num_tokens, vocab_size, chunk_tokens = 64, 1000, 8
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=1, num_tokens=num_tokens, vocab_size=vocab_size)
    with _LargestTensor() as largest:
        scores = token_scores(hidden_BTH, token_ids_BT, head, distribution=distribution, chunk_tokens=chunk_tokens)
        scores.logprobs_BT.sum().backward()
    assert largest.num_elements == chunk_tokens * vocab_size


def test_bfloat16_logits_are_normalized_in_float32() -> None:
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=1, num_tokens=5, vocab_size=300)
    logprobs_BT, _, _ = token_scores(
        hidden_BTH.bfloat16(), token_ids_BT, head.bfloat16(), distribution=Distribution(), chunk_tokens=4
    )
    logits_BTV = head.bfloat16()(hidden_BTH.bfloat16())[:, :-1].float()
    expected_BT = logits_BTV.log_softmax(dim=-1).gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    assert logprobs_BT.dtype == torch.float32
    torch.testing.assert_close(logprobs_BT[:, 1:], expected_BT)


def _scores_of(probabilities: list[float], distribution: Distribution) -> tuple[list[float], list[bool], float]:
    """Each token's probability and whether it is outside, under one row's distribution; the entropy of the first."""
    num_tokens = len(probabilities)
    rows_B2V = torch.tensor(probabilities).log().expand(num_tokens, 2, -1)
    token_ids_B2 = torch.stack([torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)], dim=1)
    scores = token_scores(rows_B2V, token_ids_B2, nn.Identity(), distribution=distribution, chunk_tokens=3)
    return (
        scores.logprobs_BT[:, 1].exp().tolist(),
        scores.is_outside_BT[:, 1].tolist(),
        scores.entropy_BT[0, 1].item(),
    )


@pytest.mark.parametrize(
    ("distribution", "num_kept"),
    [
        (Distribution(top_p=0.7), 2),  # 0.5 is not 0.7 yet, so the second is kept whole
        (Distribution(top_p=0.01), 1),
        (Distribution(top_k=3), 3),
        (Distribution(top_k=9), 4),
        (Distribution(min_p=0.2), 3),
        (Distribution(min_p=1.0), 1),
        (Distribution(top_p=0.82), 3),
        (Distribution(top_p=0.82, min_p=0.2), 2),  # of what min-p leaves, two have 0.84
        (Distribution(top_p=0.62, top_k=2), 1),  # of what top-k leaves, the first has 0.625
    ],
)
def test_each_rule_keeps_of_what_the_one_before_left_and_the_token_itself(
    distribution: Distribution, num_kept: int
) -> None:
    given = [0.5, 0.3, 0.15, 0.05]
    probabilities, is_outside, entropy = _scores_of(given, distribution)
    mass = sum(given[:num_kept])
    expected = [p / (mass if place < num_kept else mass + p) for place, p in enumerate(given)]
    assert probabilities == pytest.approx(expected, abs=1e-6)
    assert is_outside == [place >= num_kept for place in range(4)]
    assert entropy == pytest.approx(-sum(p / mass * math.log(p / mass) for p in given[:num_kept]), abs=1e-6)


def test_the_temperature_comes_before_what_drops_tokens() -> None:
    probabilities, _, _ = _scores_of([0.5, 0.3, 0.15, 0.05], Distribution(temperature=0.5, top_p=0.7))
    # Squared and renormalised the first two have 0.685 and 0.247.
    assert probabilities[:2] == pytest.approx([0.25 / 0.34, 0.09 / 0.34], abs=1e-6)


def test_of_tokens_tied_at_the_edge_the_mass_that_vllm_keeps_counts_and_none_is_outside() -> None:
    tied = [0.25, 0.25, 0.25, 0.25]
    assert _scores_of(tied, Distribution(top_p=0.45))[:2] == (pytest.approx([0.5] * 4), [False] * 4)
    assert _scores_of(tied, Distribution(top_k=2))[:2] == (pytest.approx([0.25] * 4), [False] * 4)  # on CPU: all tied
    assert _scores_of(tied, Distribution(top_p=0.45))[2] == pytest.approx(math.log(2))


def masses_of_tied_logits(device: torch.device, distribution: Distribution, num_rows: int) -> dict[str, Tensor]:
    """What is kept of rows of bfloat16 logits, of which many are tied, by the policy and by vLLM's own function.

    Returns:
        On the CPU, for each row: `policy_N` and `vllm_N`, the kept shares of the probability; `num_kept_N`, how many
        tokens vLLM keeps; `edge_mass_N`, the probability of all that have the lowest logit it keeps.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: PLC0415 - as the V2 runner does

    generator = torch.Generator().manual_seed(0)
    logits_NV = (20 + 2 * torch.randn(num_rows, 1000, generator=generator)).bfloat16().to(device)  # 0.125 apart
    token_ids_N2 = torch.stack([torch.zeros(num_rows, dtype=torch.int64, device=device), logits_NV.argmax(dim=-1)], 1)

    def likeliest_N(of: Distribution) -> Tensor:
        logits_N2V = logits_NV[:, None].expand(-1, 2, -1)
        return token_scores(logits_N2V, token_ids_N2, nn.Identity(), distribution=of, chunk_tokens=64).logprobs_BT[:, 1]

    tempered_NV = logits_NV.float() / distribution.temperature
    top_k = torch.full((num_rows,), distribution.top_k, dtype=torch.int32, device=device)
    top_p = torch.full((num_rows,), distribution.top_p, device=device)
    kept_NV = apply_top_k_top_p(
        tempered_NV.clone(), top_k if distribution.top_k else None, top_p if distribution.top_p < 1 else None
    )
    is_kept_NV, share_NV = kept_NV > -math.inf, tempered_NV.double().softmax(dim=-1)
    edge_N1 = tempered_NV.masked_fill(~is_kept_NV, math.inf).amin(dim=-1, keepdim=True)
    found = {
        "policy_N": (likeliest_N(Distribution(temperature=distribution.temperature)) - likeliest_N(distribution)).exp(),
        "vllm_N": (share_NV * is_kept_NV).sum(dim=-1),
        "num_kept_N": is_kept_NV.sum(dim=-1),
        "edge_mass_N": (share_NV * (tempered_NV == edge_N1)).sum(dim=-1),
    }
    return {name: values.detach().cpu() for name, values in found.items()}


@pytest.mark.parametrize("distribution", TRUNCATED)
def test_the_kept_set_is_a_constant_of_the_backward_pass(distribution: Distribution) -> None:
    hidden_BTH, token_ids_BT, head = _inputs(num_rows=3, num_tokens=8, vocab_size=60)
    token_ids_BT[:, 1::2] = head(hidden_BTH)[:, :-1].argmax(dim=-1)[:, ::2]  # every second token is the likeliest
    scores = token_scores(hidden_BTH, token_ids_BT, head, distribution=distribution, chunk_tokens=5)
    assert scores.is_outside_BT.any()
    assert not scores.is_outside_BT[:, 1:].all()
    logits_BTV = head(hidden_BTH)[:, :-1] / distribution.temperature
    targets_BT1 = token_ids_BT[:, 1:, None]
    kept_BTV = _kept_one_by_one(logits_BTV.detach(), distribution).scatter(-1, targets_BT1, True)
    whole_BTV = logits_BTV.masked_fill(~kept_BTV, -math.inf).log_softmax(dim=-1)
    whole_BT = whole_BTV.gather(-1, targets_BT1).squeeze(-1)
    torch.testing.assert_close(scores.logprobs_BT[:, 1:], whole_BT)
    entropy_BT = torch.distributions.Categorical(logits=whole_BTV).entropy()
    torch.testing.assert_close(scores.entropy_BT[:, 1:], entropy_BT)
    weights_BT = torch.randn_like(whole_BT)
    inputs = [hidden_BTH, head.weight]
    ours = torch.autograd.grad((scores.logprobs_BT[:, 1:] * weights_BT).sum(), inputs)
    theirs = torch.autograd.grad((whole_BT * weights_BT).sum(), inputs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def _kept_one_by_one(logits_BTV: Tensor, distribution: Distribution) -> Tensor:
    """Which tokens are kept, by the words of the rules."""
    kept_BTV = torch.zeros_like(logits_BTV, dtype=torch.bool)
    for row_V, kept_V in zip(logits_BTV.flatten(0, 1), kept_BTV.view(-1, kept_BTV.shape[-1]), strict=True):
        likeliest_first = row_V.argsort(descending=True).tolist()
        probability = row_V.double().softmax(dim=-1).tolist()
        floor = distribution.min_p * probability[likeliest_first[0]]
        left = [token for token in likeliest_first if probability[token] >= floor]
        left = left[: distribution.top_k or None]
        total, before = sum(probability[token] for token in left), 0.0
        for token in left:
            kept_V[token] = before < distribution.top_p * total
            before += probability[token]
    return kept_BTV


def test_a_logit_that_is_not_a_number_shows_in_the_logprob() -> None:
    logits_BTV = torch.randn(1, 3, 9)
    logits_BTV[0, 0, 4] = math.nan
    scores = token_scores(
        logits_BTV, torch.tensor([[0, 1, 2]]), nn.Identity(), distribution=TRUNCATED[-1], chunk_tokens=8
    )
    assert scores.logprobs_BT[0].isnan().tolist() == [False, True, False]


def _engine_and_policy(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The engine's logprobs and the policy's of the same tokens, from one engine that reports processed ones."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = dict(folder_tensors(folder))
    stand_ins = [(name, tensor.to("meta")) for name, tensor in weights.items()]
    engine = Engine(engine_config(), ranks, folder, stand_ins)
    scorer = Scorer(hf, chunk_tokens=16)
    saw: dict[str, Any] = {"gaps": [], "num_outside": [], "dropped": []}
    with engine.awake(weights.items(), "0"), torch.no_grad():
        for distribution in [TEMPERED, *TRUNCATED]:
            sampling = Sampling(
                temperature=distribution.temperature,
                top_p=distribution.top_p,
                top_k=distribution.top_k,
                min_p=distribution.min_p,
                stop=(),
            )
            gaps, num_outside, dropped = [], 0, []
            for completion in engine.generate(make_requests(0, max_new_tokens=24), sampling):
                ids_BT = torch.tensor([PROMPT + completion.token_ids])
                scores: TokenScores = scorer(ids_BT, distribution)
                ours_T, start = scores.logprobs_BT[0, len(PROMPT) :], len(PROMPT)
                gaps += (ours_T - torch.tensor(completion.logprobs)).abs().tolist()
                num_outside += int(scores.is_outside_BT[0, start:].sum())
                whole_T = scorer(ids_BT, Distribution(temperature=distribution.temperature)).logprobs_BT[0, start:]
                dropped += (ours_T - whole_T).tolist()
            saw["gaps"].append(sorted(gaps))
            saw["num_outside"].append(num_outside)
            saw["dropped"].append(sum(dropped) / len(dropped))
        penalties = [{}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}]
        saw["penalised"] = [
            [c.logprobs for c in engine.generate(make_requests(0, max_new_tokens=24), replace(GREEDY, **penalty))]
            for penalty in penalties
        ]
    saw["tied"] = [masses_of_tied_logits(ranks.device, tied, num_rows=6) for tied in TIED]
    engine.close()
    return saw


@pytest.fixture(scope="module")
def engine_and_policy(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """What one rank saw of an engine and a policy of the same weights."""
    return run_ranks(_engine_and_policy, tiny_models["qwen3"], world_size=1)[0]


def test_the_policy_scores_what_vllm_reports_for_every_way_to_draw(engine_and_policy: dict[str, Any]) -> None:
    saw = engine_and_policy
    for gaps in saw["gaps"]:
        assert len(gaps) >= 24
        assert gaps[-2] < 1e-4, "but for a token at the edge, which rounding may keep on one side alone"
    assert sum(saw["num_outside"]) <= 1
    assert saw["dropped"][0] == pytest.approx(0, abs=1e-6)
    assert min(saw["dropped"][1:]) > 0.05, "each rule must have dropped something"
    plain, *others = saw["penalised"]
    assert all(other != plain for other in others), "each penalty must reach vLLM"


def test_of_tied_logits_the_policy_keeps_the_mass_that_vllm_keeps(engine_and_policy: dict[str, Any]) -> None:
    for distribution, kept in zip(TIED, engine_and_policy["tied"], strict=True):
        torch.testing.assert_close(kept["policy_N"].double(), kept["vllm_N"], atol=1e-5, rtol=0)
        assert (kept["policy_N"] < 1 - 1e-3).all()
        if distribution.top_p == 1:  # vLLM's CPU sampler keeps all that are tied with the last
            assert (kept["num_kept_N"] >= distribution.top_k).all()
            assert (kept["num_kept_N"] > distribution.top_k).any()


PROMPT_TOKENS = 3
DROPPED = [{1, 4}, {0}, set()]
"""Places in each completion of six tokens where the token is one that truncation drops."""


def _likeliest_but(folder: Path, dropped: list[set[int]]) -> list[MicroBatch]:
    """Rows of the model's likeliest tokens, but for its least likely ones at the places that are given for each."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for index, places in enumerate(dropped):
        ids_BT = torch.arange(PROMPT_TOKENS)[None] * 7 + 40 + index
        for place in range(MAX_NEW_TOKENS):
            logits_V = model(ids_BT).logits[0, -1]
            token = logits_V.argmin() if place in places else logits_V.argmax()
            ids_BT = torch.cat([ids_BT, token.view(1, 1)], dim=1)
        mask_BT = (torch.arange(ids_BT.shape[1]) >= PROMPT_TOKENS)[None]
        rows.append(
            MicroBatch(
                token_ids_BT=ids_BT,
                loss_mask_BT=mask_BT,
                engine_logprobs_BT=torch.where(mask_BT, -1.0, 0.0),
                ages_BT=torch.zeros_like(ids_BT, dtype=torch.int32),
                advantages_B=torch.tensor([1.0 - 0.7 * index]),
            )
        )
    return rows


def _updated_by_dropped(ranks: Ranks, folder: Path) -> list[dict[str, float]]:
    with torch.no_grad():
        rows = _likeliest_but(folder, DROPPED)
    metrics = []
    for rollout, update in (
        (RolloutConfig(logprobs="processed", top_p=0.5), {}),
        (RolloutConfig(logprobs="processed", top_k=7), {}),
        (RolloutConfig(logprobs="processed", top_p=0.5, top_k=7), {"num_epochs": 2}),
        (RolloutConfig(), {}),
    ):
        policy = Policy(policy_config(folder, rollout=rollout, update=update), ranks, folder)
        metrics.append(policy.update(as_batch([[row] for row in rows[ranks.rank :: ranks.world_size]])))
    return metrics


def test_an_update_counts_the_trained_tokens_that_the_policy_alone_would_have_dropped(
    tiny_models: dict[str, Path],
) -> None:
    saw = run_ranks(_updated_by_dropped, tiny_models["qwen3"])
    for metrics in saw:
        *truncated, plain = metrics
        assert [of_kind["gap/outside_kept"] for of_kind in truncated] == [3.0] * 3, "over both ranks, once an update"
        assert "gap/outside_kept" not in plain
        for of_kind in metrics:
            assert math.isfinite(of_kind["loss"])
            assert 0 < of_kind["grad_norm"] < math.inf
