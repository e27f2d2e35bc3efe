"""colo check logprobs: raw logprobs are the reference's own, processed ones lack the mass that truncation drops."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from colo.commands.check_logprobs import BUILT_IN, read_options
from colo.commands.check_logprobs_compare import compare, read_prompts, table
from colo.config import Distribution

ROOT = Path(__file__).resolve().parent.parent


def _colo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "colo.cli", "check", "logprobs", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such"], "--model must be a folder that holds config.json, got 'no/such'"),
        (["--top-p", "1.5"], "--top-p must be in (0, 1], got 1.5"),
        (["--temperature", "0"], "--temperature must be at least 0.01, got 0.0"),
        (["--num-prompts", "17"], f"--num-prompts must be at most {len(BUILT_IN)} without --prompts, got 17"),
        (["--new-tokens", "0"], "--new-tokens must be at least 1, got 0"),
        (["--dtype", "float16"], "--dtype must be one of float32, bfloat16, got 'float16'"),
        (["--prompts", "no.jsonl"], "--prompts must be a JSONL file that exists, got 'no.jsonl'"),
        (["--json", "no/such/file"], "--json must be a file in a folder that exists, got 'no/such/file'"),
        (["--nope"], "check logprobs: unrecognized arguments: --nope"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(
    tiny_models: dict[str, Path], arguments: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=r"^(--|check)") as refusal:
        read_options(["--model", str(tiny_models["qwen3"]), *arguments])
    assert str(refusal.value) == message


def test_a_refused_option_ends_with_status_two_and_help_with_none() -> None:
    refused = _colo("--model", "no/such")
    assert refused.returncode == 2
    assert refused.stderr == "colo: --model must be a folder that holds config.json, got 'no/such'\n"
    told = _colo("--help")
    assert told.returncode == 0
    assert "--top-p" in told.stdout


def test_prompts_are_cut_and_counted(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    model = ["--model", str(tiny_models["qwen3"])]
    prompts = read_prompts(read_options([*model, "--num-prompts", "3", "--prompt-tokens", "5"]))
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a few words"}\n{"prompt": "b"}\n')
    prompts = read_prompts(read_options([*model, "--prompts", str(file), "--num-prompts", "2"]))
    assert len(prompts) == 2
    with pytest.raises(ValueError, match=r"^--num-prompts must be at most the 2 of --prompts, got 3$"):
        read_prompts(read_options([*model, "--prompts", str(file), "--num-prompts", "3"]))


def test_the_residual_is_what_the_kept_mass_leaves_unexplained(tiny_models: dict[str, Path]) -> None:
    folder = tiny_models["qwen3"]
    options = read_options(["--model", str(folder), "--temperature", "0.5", "--top-k", "40", "--top-p", "1"])
    prompt = [5, 6, 7]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt])).logits[0]
    likeliest = int(logits_TV[-1].argmax())
    unlikely = int(logits_TV[-1].argmin())
    halved_V = (logits_TV[-1] / 0.5).log_softmax(dim=-1)
    minus_log_mass = -halved_V.topk(40).values.logsumexp(dim=-1).item()
    raw = {
        "prompt_token_ids": prompt,
        "token_ids": [likeliest],
        "logprobs": [logits_TV[-1].log_softmax(dim=-1)[likeliest].item() + 0.25],
    }
    kept = raw | {"logprobs": [halved_V[likeliest].item() + minus_log_mass - 0.5]}
    dropped = raw | {"token_ids": [unlikely], "logprobs": [0.0]}
    result = compare(options, {"raw": [raw], "processed": [kept, kept, dropped]})
    assert result["raw"]["median"] == pytest.approx(0.25, abs=1e-5)
    assert result["processed"]["median"] == pytest.approx(minus_log_mass - 0.5, abs=1e-5)
    assert result["residual"]["median"] == pytest.approx(-0.5, abs=1e-5)
    assert result["residual"]["num_outside"] == 1
    printed = table(result | {"command": "colo check logprobs", "torch": "2"})
    assert "processed, less -log(kept mass)" in printed
    assert "-0.5000" in printed
    assert "1 of 3 tokens are outside" in printed


def test_an_option_of_the_check_is_one_of_the_recipe(tiny_models: dict[str, Path]) -> None:
    options = read_options(["--model", str(tiny_models["qwen3"]), "--top-p", "0.8", "--min-p", "0.1"])
    assert options.config("raw").scored == Distribution()
    assert options.config("processed").scored == Distribution(top_p=0.8, min_p=0.1)
    assert options.config("processed").logprobs_mode == "processed_logprobs"


@pytest.mark.slow
def test_on_a_float32_engine_nothing_but_the_mass_is_left(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    done = _colo("--model", str(tiny_models["qwen3"]), "--dtype", "float32", "--top-k", "30", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "processed, less -log(kept mass)" in done.stdout
    result = json.loads(file.read_text())
    assert result["raw"]["max_abs"] < 1e-3
    assert result["processed"]["median"] > math.log(320 / 30) / 2, "30 of about 320 near-equal tokens are kept"
    assert result["residual"]["median_abs"] < 1e-5
    assert result["residual"]["num_outside"] <= 1
