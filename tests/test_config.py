"""Every recipe loads, and a wrong one is refused by name before torch is imported."""

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from colo.config import CORRECTIONS, Config, Distribution, EngineConfig, check_config
from colo.installed import ENGINE_ARGS, SPECULATIVE_CONFIG, known_choices, known_options
from colo.ranks import Ranks
from colo.recipe import RECIPES, config_hash, load_config, recipe_names, to_yaml
from colo.start import check_transport, shard_bytes

DEBUG = ["--config-name", "debug"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_begins_with_what_it_is(name: str) -> None:
    assert isinstance(load_config(["--config-name", name]), Config)
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert sum(not line.startswith("#") for line in lines) <= 25


def test_overrides_win_and_numbers_arrive_as_numbers() -> None:
    config = load_config([*DEBUG, "update.lr=3e-6", "rollout.group_size=4", "engine.sleep=1", "rollout.stop=[a,b]"])
    assert config.update.lr == 3e-6
    assert config.rollout.group_size == 4
    assert config.engine.sleep == "1"
    assert config.rollout.stop == ["a", "b"]
    assert config.rollout.num_prompts == load_config(DEBUG).rollout.num_prompts


def test_vllm_options_and_reward_maps_need_no_plus() -> None:
    plain = load_config(
        [*DEBUG, "engine.vllm.max_num_seqs=7", "engine.vllm.block_size=16", "reward={a.b: 1, c.d: 0.5}"]
    )
    plus = load_config(
        [*DEBUG, "+engine.vllm.max_num_seqs=7", "++engine.vllm.block_size=16", "reward={a.b: 1, c.d: 0.5}"]
    )
    assert plain == plus
    assert plain.engine.vllm == load_config(DEBUG).engine.vllm | {"max_num_seqs": 7, "block_size": 16}
    assert plain.reward_weights == {"a.b": 1.0, "c.d": 0.5}


def test_the_resolved_config_is_a_recipe_that_gives_the_same_config(tmp_path: Path) -> None:
    config = load_config(
        [
            *DEBUG,
            r"rollout.stop=['\${x}',': #']",
            "reward={a.b: 0.25}",
            "engine.vllm.a={b: [1, null]}",
            "reload.proof=off",
            "loss.correction=off",
        ]
    )
    assert config.rollout.stop == ["${x}", ": #"]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    for arguments in (
        ["--config-dir", str(tmp_path), "--config-name", "config"],
        [f"--config-name={tmp_path / 'config.yaml'}"],
    ):
        again = load_config(arguments)
        assert again == config
        assert config_hash(again) == config_hash(config)


def test_the_hash_tells_configs_apart_by_any_option() -> None:
    hashes = {
        config_hash(load_config([*DEBUG, *more])) for more in ([], ["seed=1"], ["engine.vllm.x=1"], ["update.eps=1e-7"])
    }
    assert len(hashes) == 4


def _first_line(arguments: list[str]) -> str:
    with pytest.raises(ValueError, match=r" must | is not ") as raised:
        load_config(arguments)
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.grup_size=4", "rollout.grup_size is not an option (did you mean rollout.group_size?), got 4"),
        ("rollout={grup_size: 4}", "rollout.grup_size is not an option (did you mean rollout.group_size?), got 4"),
        ("lr=1e-3", "lr is not an option (did you mean update.lr?), got 0.001"),
        ("+nothing_like_it=x", "nothing_like_it is not an option, got 'x'"),
        ("rolout.group_size=4", "rolout.group_size is not an option (did you mean rollout.group_size?), got 4"),
        ("rollout.group_size=abc", "rollout.group_size must be an integer, got 'abc'"),
        ("seed=3.5", "seed must be an integer, got 3.5"),
        ("seed=true", "seed must be an integer, got True"),
        ("rollout.group_size=null", "rollout.group_size must be an integer, got None"),
        ("rollout.temperature=hot", "rollout.temperature must be a number, got 'hot'"),
        ("tracking.tensorboard=maybe", "tracking.tensorboard must be true or false, got 'maybe'"),
        ("model=[a]", "model must be a string, got ['a']"),
        ("rollout.stop=x", "rollout.stop must be a list of strings, got 'x'"),
        ("engine.vllm=3", "engine.vllm must be a map, got 3"),
        ("rollout=3", "rollout must be a map of options, got 3"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2, got 1"),
        ("update.lr=nan", "update.lr must be at least 0, got nan"),
        ("update.lr=inf", "update.lr must be a finite number, got inf"),
        ("scoring.timeout_reward=nan", "scoring.timeout_reward must be a finite number, got nan"),
        ("reward={a.b: inf}", "reward.a.b must be a finite number, got inf"),
        ("loss.kl_coef=inf", "loss.kl_coef must be a finite number, got inf"),
        ("loss.importance_cap=2", "loss.importance_cap is not an option, got 2"),
        ("loss.correction=tis", f"loss.correction must be one of {', '.join(CORRECTIONS)}, got 'tis'"),
        ("loss.correction_high=0.9", "loss.correction_high must be at least 1, got 0.9"),
        (
            "loss.correction_low=0.5",
            "loss.correction_low must be 0 with loss.correction=token_truncate, which masks nothing, got 0.5",
        ),
        ("loss={correction: token_mask, correction_low: 1.5}", "loss.correction_low must be in [0, 1], got 1.5"),
        (
            "loss={correction: geometric_mask, correction_low: 1, correction_high: 1}",
            "loss.correction_low must be below loss.correction_high 1.0, got 1.0",
        ),
        ("gap.warn=-1", "gap.warn must be at least 0, got -1.0"),
        ("gap.stop=nan", "gap.stop must be at least 0, got nan"),
        ("gap.window=1", "gap.window must be at least 2, got 1"),
        ("gap.warn_growth=0.5", "gap.warn_growth must be 0 or above 1, got 0.5"),
        ("rollout.min_p=1.5", "rollout.min_p must be in [0, 1], got 1.5"),
        ("rollout.presence_penalty=3", "rollout.presence_penalty must be in [-2, 2], got 3.0"),
        ("rollout.frequency_penalty=-3", "rollout.frequency_penalty must be in [-2, 2], got -3.0"),
        ("rollout.repetition_penalty=0", "rollout.repetition_penalty must be above 0, got 0.0"),
        ("rollout.logprobs=both", "rollout.logprobs must be one of auto, raw, processed, got 'both'"),
        (
            "rollout={logprobs: processed, frequency_penalty: 0.5}",
            "rollout.frequency_penalty must be 0.0 with rollout.logprobs=processed (the policy's side applies no "
            "penalty), got 0.5",
        ),
        (
            "rollout={carry_over: true, presence_penalty: 0.5}",
            "rollout.presence_penalty must be 0.0 with rollout.carry_over, got 0.5",
        ),
        ("rollout.temperature=0.005", "rollout.temperature must be at least 0.01, got 0.005"),
        ("seed=2147483648", "seed must be at most 2147483647, got 2147483648"),
        ("ranks.timeout_s=1e15", "ranks.timeout_s must be above 0 and at most 100000000, got 1000000000000000.0"),
        ("run_dir=''", "run_dir must be a folder's path, got ''"),
        ("engine.vllm.nnodes=2", "engine.vllm.nnodes must be left out (colo sets it), got 2"),
        (
            "engine.vllm.quantization=fp8",
            "engine.vllm.quantization must be left out (a reload would not quantise), got 'fp8'",
        ),
        ("engine.sleep=3", "engine.sleep must be one of none, kv, 1, 2, auto, got '3'"),
        ("engine.sleep_margin_gib=-1", "engine.sleep_margin_gib must be at least 0, got -1.0"),
        ("reload.transport=nccl", "reload.transport must be one of auto, peer, gather, got 'nccl'"),
        ("reload.proof=never", "reload.proof must be one of every, first, off, got 'never'"),
        ("reload.bucket_mib=0", "reload.bucket_mib must be at least 1, got 0"),
        ("engine.vllm.seed=3", "engine.vllm.seed must be left out (colo sets it), got 3"),
        ("engine.vllm.spec_tokens=3", "engine.vllm.spec_tokens must be left out (engine.speculative has it), got 3"),
        (
            "engine.vllm.sleep_preserve_parameter_names=lm_head.*",
            "engine.vllm.sleep_preserve_parameter_names must be a list of strings, got 'lm_head.*'",
        ),
        ("engine.draft_floor=1.5", "engine.draft_floor must be in [0, 1], got 1.5"),
        (
            "engine.vllm.enable_lora=true",
            "engine.vllm.enable_lora must be left out (LoRA: not built yet), got True",
        ),
        (
            "engine.vllm.logits_processors=[a.B]",
            "engine.vllm.logits_processors must be left out (they change what the engine draws from, and the policy "
            "applies none), got ['a.B']",
        ),
        (
            "engine.vllm.watermark_config={key: 3}",
            "engine.vllm.watermark_config must be left out (a watermark decides what is drawn, and no logprob says "
            "so), got {'key': 3}",
        ),
        (
            "engine.vllm.diffusion_config={canvas_length: 8}",
            "engine.vllm.diffusion_config must be left out (the policy scores tokens from left to right), "
            "got {'canvas_length': 8}",
        ),
        (
            "engine.vllm.override_generation_config={top_k: 5}",
            "engine.vllm.override_generation_config must be left out (requests bring all of their options, from "
            "rollout.*: it would have no effect), got {'top_k': 5}",
        ),
        (
            "engine.vllm.hf_config_path=elsewhere",
            "engine.vllm.hf_config_path must be left out (the policy reads the config.json of `model`), "
            "got 'elsewhere'",
        ),
        (
            "engine.vllm.hf_overrides={head_dtype: float32, rope_theta: 5}",
            "engine.vllm.hf_overrides must be left out, but for head_dtype (the policy reads the config.json of "
            "`model`), got {'head_dtype': 'float32', 'rope_theta': 5}",
        ),
        (
            "engine.vllm.quantization_config={linear: {weight: mxfp8}}",
            "engine.vllm.quantization_config must be left out (a reload would not quantise), "
            "got {'linear': {'weight': 'mxfp8'}}",
        ),
        ("reward={a.b: high}", "reward must be a map of dotted path to number, got {'a.b': 'high'}"),
        ("model=???", "model must be set, got nothing"),
        ("model=${nope}", "model must be a value that resolves, got '${nope}'"),
        ("seed=1,2", "seed must be one value (a list is written [a,b]), got 1,2"),
        ("~seed", "seed must be given a value, got '~seed'"),
        ("seed", "an override must be option=value, got 'seed'"),
        ("hydra.run.dir=x", "hydra.run.dir is not an option, got 'x': hydra writes nothing here"),
        ("-m", "-m must be left out, got -m: one launch is one run"),
        ("--config-nam=x", "--config-nam is not an option (did you mean --config-name?), got '--config-nam=x'"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line_that_names_option_limit_and_value(override: str, message: str) -> None:
    assert _first_line([*DEBUG, override]) == message


def test_what_changes_the_engines_rounding_alone_or_nothing_is_taken() -> None:
    options = {"hf_overrides": {"head_dtype": "float32"}, "logits_processors": None, "override_generation_config": {}}
    assert EngineConfig(vllm=options).vllm == options


@pytest.mark.parametrize(
    ("overrides", "mode", "scored", "unscored"),
    [
        ([], "processed", Distribution(), {}),
        (["temperature=0.7"], "processed", Distribution(temperature=0.7), {}),
        (["temperature=0.7", "logprobs=raw"], "raw", Distribution(), {"temperature": 0.7}),
        (["temperature=0.7", "top_p=0.9"], "raw", Distribution(), {"temperature": 0.7, "top_p": 0.9}),
        (["min_p=0.1"], "raw", Distribution(), {"min_p": 0.1}),
        (["repetition_penalty=1.2"], "raw", Distribution(), {"repetition_penalty": 1.2}),
        (
            ["temperature=0.7", "top_p=0.9", "top_k=5", "min_p=0.1", "logprobs=processed"],
            "processed",
            Distribution(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1),
            {},
        ),
    ],
)
def test_engine_and_policy_score_one_distribution(
    overrides: list[str], mode: str, scored: Distribution, unscored: dict[str, float]
) -> None:
    config = load_config([*DEBUG, "rollout.temperature=1.0", *(f"rollout.{override}" for override in overrides)])
    assert config.logprobs_mode == f"{mode}_logprobs"
    assert config.scored == scored
    assert config.unscored == unscored


def test_what_would_need_another_kept_set_is_refused() -> None:
    truncated = [*DEBUG, "rollout.logprobs=processed", "rollout.top_k=5", "rollout.min_p=0.1", "loss.kl_coef=0.1"]
    assert _first_line(truncated) == (
        "loss.kl_coef must be 0 with rollout.logprobs=processed and rollout.top_k, rollout.min_p (the reference would "
        "drop other tokens), got 0.1"
    )
    assert load_config([*truncated, "rollout.logprobs=raw"]).scored == Distribution()
    drafts = ["+engine.speculative.method=ngram", "+engine.speculative.num_speculative_tokens=2", "rollout.min_p=0.1"]
    assert _first_line([*DEBUG, *drafts]) == (
        "rollout.min_p must be 0.0 with engine.speculative (vLLM refuses it there), got 0.1"
    )


START = "defaults: [base, _self_]\n"
WHOLE = START + "model: m\nnum_steps: 1\nprompts: a.b\nreward: a.b\nrun_dir: r\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            START + "rollout: {grup_size: 4}",
            "rollout.grup_size is not an option (did you mean rollout.group_size?), got 4",
        ),
        (START + "rollout: {group_size: abc}", "rollout.group_size must be an integer, got 'abc'"),
        (START + "rollout: {group_size: null}", "rollout.group_size must be an integer, got None"),
        # YAML reads an off without quotes as false.
        (WHOLE + "reload: {proof: off}", "reload.proof must be one of every, first, off, got 'False'"),
        (START + "rollout: 3", "rollout must be a map of options, got 3"),
        (START + "model: m", "num_steps must be set, got nothing; nor prompts, reward, run_dir"),
        ("model: m", "{path} must start with 'defaults: [base, _self_]', got a file without it"),
        (
            START + "rollout: {group_size: 3\nseed: 1",
            "{path} must be YAML, got line 3, column 5: expected ',' or '}', but got ':'",
        ),
        (START + "seed: 1\nseed: 2", "{path} must be YAML, got line 3, column 1: found duplicate key seed"),
        ("defaults: [bse, _self_]", "{path} must compose, got In 'mine': Could not load 'bse'."),
    ],
)
def test_a_wrong_recipe_is_refused_in_the_same_way(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert _first_line(["--config-name", str(path)]) == message.replace("{path}", str(path))


def test_an_unknown_recipe_is_refused_with_those_there_are(tmp_path: Path) -> None:
    known = ", ".join(recipe_names())
    assert "debug" in known
    assert (
        _first_line(["--config-name", "debg"]) == f"--config-name must be a recipe of {RECIPES} ({known}), got 'debg'"
    )
    assert _first_line([]) == f"--config-name must be a recipe of {RECIPES} ({known}), got nothing"
    gone = tmp_path / "gone"
    assert (
        _first_line(["--config-dir", str(gone), *DEBUG])
        == f"--config-dir must be a folder that exists, got {str(gone)!r}"
    )


@pytest.mark.parametrize(
    ("world_size", "overrides", "message"),
    [
        (
            3,
            [],
            "rollout.num_prompts must be a multiple of the 3 engine replicas "
            "(3 ranks / engine.tensor_parallel_size 1), got 8",
        ),
        (3, ["engine.tensor_parallel_size=2"], "engine.tensor_parallel_size must divide the number of ranks 3, got 2"),
        (2, ["update.num_minibatches=3"], "update.num_minibatches must divide rollout.num_prompts 8, got 3"),
        (2, ["model=no/such"], "model must be a folder that holds config.json, or tiny:FAMILY, got 'no/such'"),
        (
            2,
            ["prompts=no/such.jsonl"],
            "prompts must be a JSONL file that exists, or a function's dotted path, got 'no/such.jsonl'",
        ),
        (2, ["engine.vllm.max_model_len=long"], "engine.vllm.max_model_len must be an integer, got 'long'"),
        (
            2,
            ["engine.vllm.gpu_memory_utilisation=0.5"],
            "engine.vllm.gpu_memory_utilisation is not an option of vLLM "
            "(did you mean engine.vllm.gpu_memory_utilization?), got 0.5",
        ),
        (2, ["engine.vllm.nothing_like_it=1"], "engine.vllm.nothing_like_it is not an option of vLLM, got 1"),
        (2, ["resume=no/such"], "resume must be auto, never or a checkpoint's folder, got 'no/such'"),
    ],
)
def test_what_needs_the_world_size_or_the_disk_is_refused(world_size: int, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r" must | is not ") as raised:
        check_config(load_config([*DEBUG, *overrides]), world_size)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "must be a folder whose config.json is JSON, got '{folder}': Expecting property name"),
        ("[1]", "must be a folder whose config.json is an object, got '{folder}' with [1]"),
    ],
)
def test_a_broken_config_of_the_model_is_refused_by_the_options_name(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^model must be") as raised:
        check_config(load_config([*DEBUG, f"model={tmp_path}"]), 2)
    assert str(raised.value).startswith(f"model {reason.replace('{folder}', str(tmp_path))}")


def test_an_evaluation_deals_no_steps_over_replicas_but_still_needs_whole_engines() -> None:
    config = load_config([*DEBUG, "rollout.num_prompts=7", "update.num_minibatches=5"])
    check_config(config, 2, is_training=False)
    with pytest.raises(ValueError, match=r"^rollout\.num_prompts must be a multiple of the 2 engine replicas"):
        check_config(config, 2)
    with pytest.raises(ValueError, match=r"^engine\.tensor_parallel_size must divide the number of ranks 3, got 2"):
        check_config(load_config([*DEBUG, "engine.tensor_parallel_size=2"]), 3, is_training=False)


def test_weights_and_biases_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # what the package leaves where it runs is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    config = load_config([*DEBUG, "tracking.wandb_project=letters"])
    with pytest.raises(ValueError, match=r"^tracking\.wandb_project must be empty without the package wandb") as raised:
        check_config(config, 2)
    assert str(raised.value).endswith("(pip install 'colo[wandb]'), got 'letters'")
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    check_config(config, 2)


def test_where_vllm_is_not_installed_its_options_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"gpu_memory_utilization", "enforce_eager", "max_model_len", "block_size"} <= known_options(ENGINE_ARGS)
    assert {"method", "model", "num_speculative_tokens"} <= known_options(SPECULATIVE_CONFIG)
    assert {"ngram", "draft_model", "eagle3", "mtp"} <= known_choices(SPECULATIVE_CONFIG[0], "SpeculativeMethod")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert known_options(ENGINE_ARGS) == known_choices(SPECULATIVE_CONFIG[0], "SpeculativeMethod") == set()
    check_config(load_config([*DEBUG, "engine.vllm.nothing_like_it=1"]), 2)
    check_config(_drafting({"method": "new"}), 2)


def _drafting(options: dict[str, Any]) -> Config:
    engine = EngineConfig(speculative={"num_speculative_tokens": 2} | options)
    return dataclasses.replace(load_config(DEBUG), engine=engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": {"num_speculative_tokens": 3}}, "engine.speculative must be a map with method or model, got"),
        (
            {"speculative": {"method": "ngram", "num_speculative_tokens": 0}},
            "engine.speculative.num_speculative_tokens must be an integer, at least 1, got 0",
        ),
        (
            {"speculative": {"method": "ngram"}},
            "engine.speculative.num_speculative_tokens must be an integer, at least 1, got None",
        ),
        (
            {"speculative": {"method": 3, "num_speculative_tokens": 1}},
            "engine.speculative.method must be a string, got 3",
        ),
        (
            {"speculative": {"method": "mtp", "num_speculative_tokens": 1, "tensor_parallel_size": 1}},
            "engine.speculative.tensor_parallel_size must be left out (vLLM sets it), got 1",
        ),
        (
            {"speculative": {"method": "extract_hidden_states", "num_speculative_tokens": 1}},
            "engine.speculative.method must be one that drafts, got 'extract_hidden_states'",
        ),
        (
            {"speculative": {"method": "mtp", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic"}},
            "engine.speculative.rejection_sample_method must be standard or block, got 'synthetic': it accepts tokens",
        ),
        (
            {"speculative": {"method": "mtp", "num_speculative_tokens": 1}, "vllm": {"disable_log_stats": True}},
            "engine.vllm.disable_log_stats must be left out with engine.speculative (acceptance is read from the",
        ),
    ],
)
def test_a_draft_that_cannot_be_is_refused_before_vllm_is_looked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^engine\.") as raised:
        EngineConfig(**options)
    assert str(raised.value).startswith(message)


def test_a_draft_that_this_installation_cannot_make_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = str(tmp_path)

    def refused(options: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match=r"^engine\.speculative\.") as raised:
            check_config(_drafting(options), 2)
        return str(raised.value)

    assert refused({"method": "ngramm"}).startswith("engine.speculative.method must be one of bailing_hybrid_mtp, ")
    assert refused({"method": "ngram", "prompt_lookup_maxx": 2}) == (
        "engine.speculative.prompt_lookup_maxx is not an option of vLLM "
        "(did you mean engine.speculative.prompt_lookup_max?), got 2"
    )
    assert refused({"method": "suffix"}) == (
        "engine.speculative.method must be another one without the package arctic-inference "
        "(pip install arctic-inference==0.1.1), got 'suffix'"
    )
    no_folder = "engine.speculative.model must be a folder that holds config.json, got"
    assert refused({"method": "draft_model"}) == f"{no_folder} None"
    assert refused({"method": "eagle3", "model": "no/such"}) == f"{no_folder} 'no/such'"
    assert refused({"method": "draft_model", "model": folder, "draft_tensor_parallel_size": 2}) == (
        "engine.speculative.draft_tensor_parallel_size must be engine.tensor_parallel_size 1, got 2"
    )
    for options in ({"model": folder}, {"method": "draft_model", "model": folder}, {"method": "mtp"}):
        check_config(_drafting(options), 2)


def test_a_model_that_sees_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    with pytest.raises(
        ValueError, match=r"^model must be of text alone \(vision: not built yet\), got vision_config in"
    ):
        check_config(load_config([*DEBUG, f"model={tmp_path}"]), 2)


def test_shards_that_shared_memory_cannot_hold_are_refused_where_ranks_must_read_each_other(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models["qwen3_moe"]
    config = load_config([*DEBUG, "reload.transport=peer"])
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert shard_bytes(config, folder) == num_bytes, "both in float32"
    assert shard_bytes(load_config([*DEBUG, "policy.dtype=bfloat16"]), folder) == num_bytes // 2

    def check(config: Config, world_size: int = 2, local_rank: int = 0) -> None:
        ranks = Ranks(
            rank=local_rank,
            world_size=world_size,
            local_rank=local_rank,
            device=torch.device("cpu"),
            tensor_parallel_size=1,
            notice_s=30.0,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        )
        check_transport(config, folder, ranks)

    monkeypatch.setattr("colo.engine.peers.free_shared_memory", lambda: num_bytes)
    check(config)
    monkeypatch.setattr("colo.engine.peers.free_shared_memory", lambda: num_bytes - 1)
    with pytest.raises(ValueError, match=r"^reload\.transport must be gather or auto where .* got 'peer' with"):
        check(config)
    for transport in ("auto", "gather"):
        check(load_config([*DEBUG, f"reload.transport={transport}"]))
    check(config, world_size=1)
    check(config, local_rank=1)  # its host's first rank looks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one rank on each of two hosts
    check(config)


def test_reading_a_recipe_imports_neither_torch_nor_vllm_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from colo.config import check_config; from colo.recipe import load_config;"
        "check_config(load_config(['--config-name', 'debug']), 2);"
        "sys.exit(' '.join(name for name in ('torch', 'vllm', 'transformers') if name in sys.modules) or 0)"
    )
    root = str(RECIPES.parent)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=20
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
