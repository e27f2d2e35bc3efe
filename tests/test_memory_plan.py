"""The memory plan: its arithmetic by hand, what it is a function of, and what `colo plan` says and refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM

from colo.commands.plan import plan_command, verdict
from colo.config import TINY_FAMILIES, Config, check_config
from colo.engine.planned_kv import DEFAULT_GPU_SHARE, NO_GPU_SHARE, is_planned, kv_arguments, read_sizes
from colo.kv_size import MAX_CPU_KV_BYTES, MIN_CPU_KV_BYTES
from colo.memory_advice import advice, refuse_too_large, told
from colo.memory_plan import (
    CONTEXT_BYTES,
    ENGINE_BUFFER_BYTES,
    GIB,
    GRAPH_BYTES,
    LABELS,
    Plan,
    make_plan,
    sampler_state_bytes,
)
from colo.model_shape import DraftShape, ModelShape, UnknownSizeError, draft_shape, model_shape, read_draft
from colo.policy.shard import build_on_meta, stand_ins
from colo.policy.tiny import make_tiny_model
from colo.ranks import Ranks
from colo.start import check_memory, read_shape
from colo.update_peak import micro_batches, update_peak

LARGE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
SMALL = LARGE | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
BY_HAND = {"vocab_size": 100, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
TENSORS = [
    ("model.embed_tokens.weight", (100, 8)),
    ("model.layers.0.input_layernorm.weight", (8,)),
    ("model.layers.0.self_attn.q_proj.weight", (16, 8)),
    ("model.layers.0.self_attn.k_proj.weight", (8, 8)),
    ("model.layers.0.self_attn.v_proj.weight", (8, 8)),
    ("model.layers.0.self_attn.o_proj.weight", (8, 16)),
    ("model.layers.0.post_attention_layernorm.weight", (8,)),
    ("model.layers.0.mlp.gate_proj.weight", (32, 8)),
    ("model.layers.0.mlp.up_proj.weight", (32, 8)),
    ("model.layers.0.mlp.down_proj.weight", (8, 32)),
    ("model.norm.weight", (8,)),
]


def _config(*overrides: str) -> Config:
    """The defaults, but for what is overridden as on a command line."""
    values: dict[str, Any] = {}
    for override in overrides:
        option, _, text = override.partition("=")
        *sections, name = option.split(".")
        held = values
        for section in sections:
            held = held.setdefault(section, {})
        held[name] = yaml.safe_load(text)
    config = Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=1,
    )
    changed = {name: dataclasses.replace(getattr(config, name), **held) for name, held in values.items()}
    return dataclasses.replace(config, **changed)


def _shape() -> ModelShape:
    return model_shape(TENSORS, BY_HAND | {"intermediate_size": 32})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    return folder


def _plan(config: Config, shape: ModelShape, *, num_ranks: int = 1, card_gib: float = 80, **more: Any) -> Plan:
    return make_plan(config, shape, num_ranks=num_ranks, card_bytes=int(card_gib * GIB), **more)


def test_a_shape_is_that_of_its_tensors() -> None:
    shape = _shape()
    attention, mlp = 16 * 8 + 2 * 8 * 8 + 8 * 16, 3 * 32 * 8
    assert shape.num_parameters == 100 * 8 + 3 * 8 + attention + mlp
    assert (shape.whole_parameters, shape.kv_parameters) == (3 * 8, 2 * 8 * 8)
    assert (shape.root_parameters, shape.block_parameters) == (100 * 8 + 8, attention + mlp + 2 * 8)
    assert (shape.num_embeddings, shape.num_layers, shape.mlp_width) == (1, 1, 32)
    untied = model_shape([*TENSORS, ("lm_head.weight", (100, 8))], BY_HAND | {"intermediate_size": 32})
    assert untied.num_embeddings == 2
    assert untied.root_parameters == shape.root_parameters + 800


def test_an_engines_weights_are_cut_but_for_norms_and_a_head_of_keys_and_padded_to_64_rows() -> None:
    shape = _shape()
    padded = shape.num_parameters + 28 * 8  # 100 rows become 128
    assert shape.engine_parameters(1) == padded
    cut = padded - 24 - 128
    assert shape.engine_parameters(2) == cut // 2 + 128 // 2 + 24
    assert shape.engine_parameters(4) == cut // 4 + 128 // 2 + 24  # two heads of keys: each is on two ranks
    plan = _plan(_config("policy.compute_dtype=bfloat16"), shape)
    assert plan.generate["engine_weights"] - sampler_state_bytes(1024, 100) == 2 * padded


def test_kv_bytes_a_token_are_2_x_layers_x_heads_x_head_dim_x_bytes() -> None:
    shape = _shape()
    assert shape.kv_bytes_per_token(1, 2) == 2 * 1 * 2 * 4 * 2
    assert shape.kv_bytes_per_token(2, 2) == 2 * 1 * 1 * 4 * 2
    assert shape.kv_bytes_per_token(4, 2) == shape.kv_bytes_per_token(2, 2)
    latent = model_shape(TENSORS, BY_HAND | {"intermediate_size": 32, "kv_lora_rank": 5, "qk_rope_head_dim": 3})
    assert latent.kv_bytes_per_token(4, 2) == 1 * (5 + 3) * 2
    per_token = [
        _plan(_config(f"engine.vllm.kv_cache_dtype={dtype}"), shape).kv.bytes_per_token
        for dtype in ("auto", "fp8", "fp8_e5m2", "float32")
    ]
    assert per_token == [32, 16, 16, 64]


def test_what_the_kv_cache_needs_is_what_is_in_flight_at_full_length_with_a_prompt_once() -> None:
    options = [
        "rollout.num_prompts=8",
        "rollout.group_size=4",
        "rollout.max_prompt_tokens=32",
        "rollout.max_new_tokens=48",
    ]
    shape, prompts, completions = _shape(), 8 * 32, 32 * (48 + 16)  # a block of 16 more for each, in part its prompt's
    kv = _plan(_config(*options), shape).kv
    assert kv.needed == -(-105 * (prompts + completions) * 32 // 100)  # 32 bytes a token, and 5 %
    assert (kv.num_running, kv.bytes, kv.sequence_tokens) == (32, kv.needed, 80)
    assert kv.num_sequences == kv.bytes // (80 * 32)
    each = _plan(_config(*options, "engine.vllm.enable_prefix_caching=false"), shape).kv
    assert each.needed == -(-105 * (32 * 32 + completions) * 32 // 100)
    assert _plan(_config(*options), shape, num_ranks=2).kv.num_running == 16
    assert _plan(_config(*options, "engine.vllm.max_num_seqs=10"), shape).kv.num_running == 10
    carried = [*options, "rollout.carry_over=true"]
    assert _plan(_config(*carried, "rollout.carry_over_extra=2"), shape).kv.num_running == 40
    assert _plan(_config(*carried), shape).kv.num_running == 64
    evaluated = _plan(_config(*options), shape, num_eval_prompts=100).kv
    assert evaluated.num_running == 100
    assert evaluated.needed == -(-105 * 100 * (80 + 16) * 32 // 100)


def test_a_small_card_runs_256_sequences_at_once_and_a_large_one_1024() -> None:
    config = _config("rollout.num_prompts=512", "rollout.group_size=4")
    assert [_plan(config, _shape(), card_gib=gib).kv.num_running for gib in (24, 80, 140)] == [256, 1024, 1024]


def test_the_kv_cache_is_never_less_than_a_sequence_nor_more_than_the_room(large: Path) -> None:
    long = _config("rollout.num_prompts=64", "rollout.group_size=16", "rollout.max_new_tokens=4096")
    bf16 = dataclasses.replace(long, policy=dataclasses.replace(long.policy, dtype="bfloat16"))
    shape = read_shape(bf16, large)
    roomy, tight = _plan(bf16, shape), _plan(bf16, shape, card_gib=40)
    assert roomy.kv.bytes == roomy.kv.room < roomy.kv.needed
    assert roomy.generates
    assert sum(roomy.generate.values()) + roomy.margin_bytes == roomy.card_bytes
    assert tight.kv.room < 0
    assert tight.kv.bytes == tight.kv.least == (512 + 4096 + 16) * tight.kv.bytes_per_token
    assert not tight.generates
    longer = _plan(_config("engine.vllm.max_model_len=8192"), shape, card_gib=40)
    assert longer.kv.least == (8192 + 16) * longer.kv.bytes_per_token


def test_a_size_that_the_recipe_gives_is_kept() -> None:
    assert _plan(_config("engine.vllm.kv_cache_memory_bytes=12345678"), _shape()).kv.bytes == 12345678
    assert _plan(_config("engine.vllm.num_gpu_blocks_override=10"), _shape()).kv.bytes == 10 * 16 * 32
    shared = _plan(_config("engine.vllm.gpu_memory_utilization=0.5"), _shape())
    taken = shared.kv.bytes + shared.generate["engine_weights"] + shared.generate["activations"]
    assert taken == shared.card_bytes // 2
    too_small = _plan(_config("engine.vllm.kv_cache_memory_bytes=1000"), _shape())
    assert not too_small.generates


def test_on_cpu_the_kv_cache_is_between_64_and_512_mib_unless_one_sequence_needs_more(large: Path) -> None:
    def cpu(config: Config, shape: ModelShape) -> int:
        return _plan(config, shape, card_gib=8, is_cpu=True).kv.bytes

    assert cpu(_config(), _shape()) == MIN_CPU_KV_BYTES
    shape = read_shape(_config(), large)
    small = ("rollout.num_prompts=64", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=64")
    assert cpu(_config(*small, "policy.dtype=bfloat16"), shape) in (MAX_CPU_KV_BYTES, MIN_CPU_KV_BYTES)
    assert cpu(_config("rollout.max_new_tokens=8192"), shape) > MAX_CPU_KV_BYTES


def _ranks(device: str) -> Ranks:
    return Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device(device),
        tensor_parallel_size=1,
        notice_s=30.0,
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
    )


def test_the_engine_takes_the_planned_size_unless_the_recipe_gives_one(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path)
    tensors = stand_ins(tmp_path, torch.float32)

    def taken(device: str, *overrides: str) -> dict[str, Any]:
        return kv_arguments(_config(*overrides), _ranks(device), tmp_path, tensors, beside_policy=True)

    assert taken("cpu") == {"kv_cache_memory_bytes": MIN_CPU_KV_BYTES}
    assert taken("cpu", "engine.vllm.gpu_memory_utilization=0.5") == {"kv_cache_memory_bytes": MIN_CPU_KV_BYTES}
    assert taken("cpu", "engine.vllm.kv_cache_memory_bytes=99") == {}
    assert taken("cuda", "engine.vllm.kv_cache_memory_bytes=99") == {"gpu_memory_utilization": NO_GPU_SHARE}
    assert taken("cuda", "engine.vllm.gpu_memory_utilization=0.5") == {}
    blocks = taken("cuda", "engine.vllm.num_gpu_blocks_override=9")
    assert blocks == {"gpu_memory_utilization": DEFAULT_GPU_SHARE}


def test_the_parts_of_the_policy_are_its_shards() -> None:
    shape = _shape()
    plan = _plan(_config("loss.kl_coef=0.1"), shape, num_ranks=2)
    half = -(-shape.num_parameters // 2)
    assert plan.update["policy_parameters"] == 4 * half
    assert plan.update["optimizer"] == 2 * 4 * half
    assert plan.update["reference_model"] == 2 * half
    assert list(plan.update) == list(plan.generate) == list(LABELS)
    assert plan.update["communication"] > _plan(_config(), shape).update["communication"] == 0
    assert plan.update["context"] == plan.generate["context"] == CONTEXT_BYTES
    assert plan.update["cuda_graphs"] == GRAPH_BYTES
    assert plan.update["engine_buffers"] == ENGINE_BUFFER_BYTES
    assert _plan(_config("engine.vllm.enforce_eager=true"), shape).generate["cuda_graphs"] == 0
    alone = _plan(_config(), shape, is_training=False)
    assert alone.generate["policy_parameters"] == alone.generate["optimizer"] == sum(alone.host.values()) == 0


def test_what_is_offloaded_is_on_the_host_while_the_engine_generates(large: Path) -> None:
    shape = read_shape(_config(), large)
    plans = {
        name: _plan(_config(f"policy.offload={name}"), shape, card_gib=140) for name in ("none", "optimizer", "all")
    }
    size = 4 * shape.num_parameters
    assert [plans[name].generate["optimizer"] for name in plans] == [2 * size, 0, 0]
    assert [plans[name].generate["policy_parameters"] for name in plans] == [size, size, 0]
    assert [sum(plans[name].host.values()) for name in plans] == [0, 2 * size, 3 * size]
    assert [plans[name].update == plans["none"].update for name in plans] == [True] * 3
    assert plans["none"].kv.room < plans["optimizer"].kv.room < plans["all"].kv.room
    backed_up = _plan(_config("engine.sleep='1'"), shape)
    assert sum(backed_up.host.values()) == backed_up.generate["engine_weights"]


def test_more_tokens_take_more_and_more_ranks_take_less(large: Path) -> None:
    def peak(*overrides: str, num_ranks: int = 1) -> int:
        config = _config("rollout.num_prompts=64", "rollout.group_size=16", *overrides)
        return _plan(config, read_shape(config, large), num_ranks=num_ranks).update_bytes("2")

    by_tokens = [peak(f"batch.max_tokens={tokens}") for tokens in (4096, 8192, 16384)]
    assert by_tokens == sorted(set(by_tokens))
    assert peak("policy.gradient_checkpointing=true") < peak()
    assert peak("policy.logprob_chunk_tokens=512") < peak()
    assert peak("rollout.top_p=0.9", "rollout.logprobs=processed") > peak()
    by_ranks = [peak(num_ranks=ranks) for ranks in (1, 2, 4, 8)]
    assert by_ranks == sorted(set(by_ranks), reverse=True)
    config = _config("policy.compute_dtype=bfloat16")
    shape = read_shape(config, large)
    one, two, four = (
        _plan(dataclasses.replace(config, engine=dataclasses.replace(config.engine, tensor_parallel_size=size)), shape)
        for size in (1, 2, 4)
    )
    assert one.kv.bytes_per_token == 2 * two.kv.bytes_per_token == 4 * four.kv.bytes_per_token
    sampler = sampler_state_bytes(1024, shape.vocab_size)
    weights = [plan.generate["engine_weights"] - sampler for plan in (one, two)]
    assert weights[1] == pytest.approx(weights[0] / 2, rel=0.001)


def test_deeper_sleep_leaves_more_and_auto_takes_the_shallowest_that_fits(large: Path) -> None:
    config = _config("policy.dtype=bfloat16", "policy.gradient_checkpointing=true")
    shape = read_shape(config, large)
    found = []
    for gib in (80, 100, 115, 140):
        plan = _plan(config, shape, card_gib=gib)
        assert plan.update_bytes("none") - plan.update_bytes("kv") == plan.kv.bytes
        assert plan.update_bytes("kv") - plan.update_bytes("2") == plan.generate["engine_weights"]
        found.append((plan.is_possible, plan.auto_depth))
    assert found == [(False, "2"), (True, "2"), (True, "kv"), (True, "none")]


def test_at_depth_none_the_kv_cache_leaves_the_update_its_room_and_the_recipes_depth_is_judged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    long = ["rollout.num_prompts=128", "rollout.group_size=16", "rollout.max_new_tokens=7680"]
    long += ["batch.max_tokens=16384", "engine.sleep_margin_gib=0.5"]
    shape = read_shape(_config(), tmp_path)
    plans = {
        depth: _plan(_config(*long, f"engine.sleep='{depth}'"), shape, card_gib=140)
        for depth in ("auto", "1", "2", "kv", "none")
    }
    assert [plan.depth for plan in plans.values()] == ["2", "2", "2", "kv", "none"]
    two, none = plans["2"], plans["none"]
    assert two.is_possible
    assert not two.fits("none")
    assert two.kv.bytes == two.kv.room == plans["kv"].kv.bytes
    assert none.kv.least < none.kv.bytes == none.kv.room < two.kv.bytes
    assert none.update_bytes("none") + none.margin_bytes == none.card_bytes
    assert none.is_possible
    beside = int((sum(none.update.values()) + none.generate["engine_weights"]) / GIB)
    tight = {depth: _plan(_config(*long, f"engine.sleep='{depth}'"), shape, card_gib=beside) for depth in plans}
    found = {depth: plan.is_possible for depth, plan in tight.items()}
    assert found == {"auto": True, "1": True, "2": True, "kv": False, "none": False}
    assert tight["none"].kv.bytes == tight["none"].kv.least
    verdicts = [verdict(tight[depth], []).splitlines()[0] for depth in ("kv", "none")]
    assert verdicts == [f"does not fit: the update, at depth {depth} of sleep" for depth in ("kv", "none")]
    assert _advised(_config(*long, "engine.sleep=kv"), shape, beside) == "engine.sleep=2"
    assert _advised(_config(*long, "engine.sleep=none"), shape, beside) == "engine.sleep=2"
    given = _config(*long, "engine.sleep=none", f"engine.vllm.kv_cache_memory_bytes={70 * GIB}")
    needed = _plan(given, shape, card_gib=140).update_bytes("none")
    assert _advised(given, shape, (needed - GIB) / GIB) == "engine.sleep=kv"
    refuse_too_large(given, shape, 1, int(needed / 1.29))
    with pytest.raises(ValueError, match=r"^engine.sleep must be kv \(an update .*, got 'none'$"):
        refuse_too_large(given, shape, 1, int(needed / 1.31))


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_layers_store_what_the_shape_says(tmp_path: Path, family: str, compute_dtype: str) -> None:
    make_tiny_model(family, tmp_path)
    dtype = getattr(torch, compute_dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="sdpa").eval()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    num_tokens = 512
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(2, num_tokens // 2, dtype=torch.int64), use_cache=False)
    seen = sum(tensor.untyped_storage().nbytes() for tensor in stored.values()) / num_tokens
    bytes_of_number = dtype.itemsize
    shape = read_shape(_config(), tmp_path)
    rest = (
        shape.hidden_size * (4 + bytes_of_number) + shape.head_dim * bytes_of_number
    )  # the last norm, and two rotations
    planned = shape.stored.bytes(bytes_of_number) + rest
    assert planned == pytest.approx(seen, rel=0.03)


def test_the_update_peak_by_hand() -> None:
    config = _config("policy.compute_dtype=bfloat16", "batch.max_tokens=1024", "rollout.num_prompts=2")
    shape = _shape()
    tokens, num_micro = micro_batches(config, 1)
    assert (tokens, num_micro) == (1024, 16)  # 16 rows of 576 tokens, one at a time
    norms = 16 * (4 + 2) + 2 * 8 * 2
    attention, mlp = 2 * 2 * (16 + 8) + 4 * 4, 4 * 32 * 2
    assert shape.stored.bytes(2) == norms + attention + mlp
    layers = tokens * (norms + attention + mlp + 8 * (4 + 3 * 2)) + 2 * shape.root_parameters
    head = 1024 * 100 * (4 * 4 + 2) + 2 * 100 * 8
    assert update_peak(config, shape, 1) == (4 * shape.num_parameters, layers + head)
    # With one micro-batch no gradients are there yet.
    once = _config("policy.compute_dtype=bfloat16", "batch.max_tokens=65536", "rollout.num_prompts=2")
    assert micro_batches(once, 1) == (16 * 576, 1)
    assert update_peak(once, shape, 1)[0] == 0


def test_an_8b_in_bfloat16_peaks_where_its_gradients_are_copied_to_float32_for_their_norm(large: Path) -> None:
    config = _config("policy.dtype=bfloat16", "policy.gradient_checkpointing=true", "rollout.num_prompts=64")
    shape = read_shape(config, large)
    assert update_peak(config, shape, 1) == (2 * shape.num_parameters, 4 * shape.num_parameters)


def test_a_draft_adds_its_files_and_its_keys_and_values(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    draft = read_draft(tmp_path)
    model = build_on_meta(tmp_path, torch.float32)
    assert draft.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert draft.kv_numbers == 2 * 2 * 2 * 32
    config = _config("policy.compute_dtype=bfloat16")
    without, with_draft = _plan(config, _shape()), _plan(config, _shape(), draft=draft)
    assert with_draft.kv.bytes_per_token == without.kv.bytes_per_token + 2 * draft.kv_numbers
    assert with_draft.generate["engine_weights"] == without.generate["engine_weights"] + draft.weight_bytes
    assert _plan(config, _shape(), draft=DraftShape()) == without


def test_a_draft_is_the_folder_that_the_recipe_names_and_never_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model("llama", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert draft_shape({}) is None
    assert draft_shape({"method": "mtp", "num_speculative_tokens": 1}) is None
    assert draft_shape({"method": "ngram", "model": "."}) is None
    assert draft_shape({"model": str(tmp_path), "num_speculative_tokens": 2}) == read_draft(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownSizeError, match=r"^engine.speculative.model must say hidden_size in its config.json"):
        draft_shape({"model": str(tmp_path)})
    plan_command(["--config-name", "debug", f"run_dir={tmp_path}/run", "--card", "80", "--ranks", "2"])
    assert capsys.readouterr().out.endswith("fits\n")
    make_tiny_model("qwen3", tmp_path / "model")
    tensors = stand_ins(tmp_path / "model", torch.float32)
    taken = kv_arguments(_config(), _ranks("cpu"), tmp_path / "model", tensors, beside_policy=True)
    assert taken == {"kv_cache_memory_bytes": MIN_CPU_KV_BYTES}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^engine.speculative.model must be a folder whose config.json") as raised:
        draft_shape({"model": str(tmp_path)})
    assert type(raised.value) is ValueError


def test_sizes_under_other_names_are_those_that_transformers_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 100})
    )
    shape = model_shape([("transformer.blocks.0.norm_1.weight", (64,))], read_sizes(tmp_path))
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 4, 16)
    attention = {"kv_n_heads": 2}
    dbrx = {"model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(dbrx | {"attn_config": attention}))
    shape = model_shape([], read_sizes(tmp_path))
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (64, 4, 2)


def test_a_run_is_refused_where_a_size_is_unknown_unless_the_recipe_gives_the_kv_cache(tmp_path: Path) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(mamba))
    # As an evaluation: transformers' Mamba has no SDPA, so that it is not trained.
    with pytest.raises(ValueError, match=r"^model must say num_attention_heads in its config.json") as raised:
        check_memory(_config(), tmp_path, _ranks("cpu"), is_training=False)
    assert type(raised.value) is ValueError  # which ends a run with exit status 2, not with a traceback
    draft = _config(f"engine.speculative={{model: {tmp_path}, num_speculative_tokens: 2}}")
    make_tiny_model("qwen3", tmp_path / "model")
    with pytest.raises(ValueError, match=r"^engine.speculative.model must say num_attention_heads") as raised:
        check_memory(draft, tmp_path / "model", _ranks("cpu"), is_training=True)
    assert type(raised.value) is ValueError
    for device, options, is_needed in (
        ("cpu", "{kv_cache_memory_bytes: 99}", False),
        ("cpu", "{gpu_memory_utilization: 0.5}", True),
        ("cuda", "{gpu_memory_utilization: 0.5}", False),
        ("cuda", "{num_gpu_blocks_override: 9}", False),
        ("cuda", "{kv_cache_memory_bytes: null}", True),
    ):
        config = _config(f"engine.vllm={options}")
        assert is_planned(config.engine.vllm, on_cpu=device == "cpu") is is_needed
        if not is_needed:
            check_memory(config, tmp_path, _ranks(device), is_training=False)


def test_an_evaluations_shape_is_that_of_its_files(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path)
    assert read_shape(_config(), tmp_path, is_training=False) == read_shape(_config(), tmp_path)


def test_a_model_without_a_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^model must say hidden_size in its config.json .* got 'odd' without it"):
        model_shape(TENSORS, {"model_type": "odd"})


def _advised(config: Config, shape: ModelShape, card_gib: float, num_ranks: int = 1) -> str:
    def replan(other: Config, number: int) -> Plan:
        return _plan(other, shape, num_ranks=number, card_gib=card_gib)

    settings = advice(config, shape, num_ranks, replan)
    return told(settings)


def test_what_would_make_it_fit_is_one_setting_or_two(large: Path) -> None:
    bf16 = ("policy.dtype=bfloat16", "rollout.num_prompts=64")
    shape = read_shape(_config(), large)
    assert _advised(_config(*bf16), shape, 110) == "policy.gradient_checkpointing=true"
    recomputed = _config(*bf16, "policy.gradient_checkpointing=true")
    assert _advised(recomputed, shape, 80) == "--ranks 2"
    assert _advised(_config("rollout.num_prompts=64"), shape, 110) == (
        "policy.gradient_checkpointing=true policy.dtype=bfloat16"
    )
    given = _config(*bf16, "policy.gradient_checkpointing=true", f"engine.vllm.kv_cache_memory_bytes={60 * GIB}")
    assert _advised(given, shape, 110).startswith("engine.vllm.kv_cache_memory_bytes=")
    wide = _config("policy.gradient_checkpointing=true", "rollout.num_prompts=64")
    assert _advised(wide, shape, 1) == ("no setting is known that makes it fit: take a smaller model or a larger card")


def test_what_is_advised_is_what_a_run_accepts() -> None:
    shape = dataclasses.replace(_shape(), num_parameters=4 * GIB, whole_parameters=0)
    for num_prompts, extra, num_ranks in ((3, 0, 3), (6, 0, 2), (6, 3, 3), (7, 0, 7), (8, 0, 2), (5, 0, 5)):
        options = [f"rollout.num_prompts={num_prompts}", "policy.dtype=bfloat16", "policy.gradient_checkpointing=true"]
        options += ["rollout.carry_over=true", f"rollout.carry_over_extra={extra}"] if extra else []

        def replan(other: Config, number: int) -> Plan:
            return _plan(other, shape, num_ranks=number, card_gib=40)

        settings = advice(_config(*options), shape, 1, replan)
        assert settings[0] == ("--ranks", num_ranks)
        check_config(_config(*options, *(f"{option}={value}" for option, value in settings[1:])), num_ranks)
    assert shape.splits_into(4)
    assert not shape.splits_into(3)
    assert not dataclasses.replace(shape, num_heads=6, num_kv_heads=3).splits_into(2)


def test_a_run_is_refused_where_its_update_is_far_too_large_alone(large: Path) -> None:
    config = _config("policy.dtype=bfloat16", "rollout.num_prompts=64")
    shape = read_shape(config, large)
    needed = _plan(config, shape).update_bytes("2")
    refuse_too_large(config, shape, 1, int(needed / 1.29))
    with pytest.raises(ValueError, match=r"^policy.gradient_checkpointing must be true \(an update .*, got False$"):
        refuse_too_large(config, shape, 1, int(needed / 1.31))
    recomputed = _config("policy.gradient_checkpointing=true", "policy.dtype=bfloat16")
    with pytest.raises(
        ValueError, match=r"^--ranks must be 2 \(an update is planned to take .*, see colo plan\), got 1$"
    ):
        refuse_too_large(recomputed, shape, 1, 60 * GIB)


def test_colo_plan_prints_both_phases_and_leaves_nothing_behind(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debug, file = ["--config-name", "debug", f"run_dir={tmp_path / 'run'}"], tmp_path / "plan.json"
    plan_command([*debug, "--ranks", "2", "--card", "80", "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks, each with a card of 80.00 GiB; GiB a rank"
    for label in (*LABELS.values(), "total"):
        assert any(line.startswith(label) for line in lines), label
    assert lines[-1] == "fits"
    written = json.loads(file.read_text())
    assert (written["fits"], written["auto_depth"], written["kv"]["bytes"]) == (True, "none", 64 << 20)
    assert not (tmp_path / "run").exists()
    big = [*debug, f"model={large}", "policy.compute_dtype=bfloat16", "rollout.num_prompts=64"]
    with pytest.raises(SystemExit) as ended:
        plan_command([*big, "--ranks", "1", "--card", "80"])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "does not fit: the engine beside the policy and the update, at any depth of sleep" in printed
    assert "what would make it fit: --ranks" in printed


def test_colo_plan_refuses_what_it_cannot_plan() -> None:
    debug = ["--config-name", "debug"]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"^--card must be the card's memory in GiB on a host without a GPU"):
            plan_command(debug)
    for option, text in (("--card", "none"), ("--card", "-1"), ("--ranks", "0")):
        with pytest.raises(ValueError, match=f"^{option} must be a .*got '{text}'"):
            plan_command([*debug, "--card", "80", f"{option}={text}"])
