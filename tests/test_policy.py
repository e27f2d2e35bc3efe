"""Loading by slices, names in folders, and what the sharded model computes."""

import json
import logging
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from colo.config import Distribution
from colo.policy.folder import TensorFiles, model_files, shard_rows
from colo.policy.model import Policy
from colo.policy.names import Piece, checkpoint_pieces, stored_tensors
from colo.policy.shard import build_on_meta, load_weights, local_rows, stand_ins
from colo.ranks import Ranks
from tests.ranks import run_ranks
from tests.rollouts import policy_config

TOKEN_IDS = [[5, 9, 40, 7, 11, 200, 3, 8], [17, 6, 2, 90, 90, 4, 0, 0]]


@pytest.fixture(scope="module")
def folders(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family with no tensor left at its initial value, in a few files; a MoE with 4 experts, one with a buffer.

    Norms at 1 and biases at 0 would look right after a load that skipped them.
    """
    made = {}
    for family, folder in tiny_models.items():
        made[family] = tmp_path_factory.mktemp("noisy") / family
        model = AutoModelForCausalLM.from_pretrained(folder)
        _save_noisy(model, made[family], max_shard_size="100KB" if family in ("qwen3", "qwen3_moe") else "50GB")
    config = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_moe"]).config
    config.num_experts = 4  # of 3 ranks the last keeps none
    made["few_experts"] = tmp_path_factory.mktemp("noisy") / "few_experts"
    _save_noisy(AutoModelForCausalLM.from_config(config), made["few_experts"])
    made["buffer"] = tmp_path_factory.mktemp("noisy") / "buffer"  # a router's bias, in float32 whatever the rest is in
    _save_noisy(AutoModelForCausalLM.from_config(CONFIG_MAPPING["glm4_moe"](**_glm4_moe())), made["buffer"])
    return made


def _glm4_moe() -> dict[str, Any]:
    return {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def _save_noisy(model: PreTrainedModel, folder: Path, max_shard_size: str = "50GB") -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in stored_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def _read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _most_whole_at_a_time(policy: Policy) -> int:
    full_tensor, made, counts = DTensor.full_tensor, [], []

    def counted(tensor: DTensor) -> Tensor:
        whole = full_tensor(tensor)
        made.append(weakref.ref(whole))
        counts.append(sum(ref() is not None for ref in made))
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", counted)
        deque(policy.full_weights(), maxlen=0)
    return max(counts)


def _shards(policy: Policy, stored: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """What is wrong with the shards that a policy hands out, and where in the whole tensors they lie."""
    shards = dict(policy.weights())
    tensors = stored_tensors(policy.scorer.hf)
    storages = {local_rows(tensor.detach(), policy.ranks)[0].untyped_storage()._cdata for tensor in tensors.values()}
    ranges = {name: (shard.start, shard.start + shard.local.numel()) for name, shard in shards.items()}
    parts = {name: tensor.flatten()[slice(*ranges[name])] for name, tensor in stored.items()}
    dtypes = {}
    for dtype in (torch.float32, torch.bfloat16):
        dtypes[dtype] = [(name, tuple(t.shape), t.dtype) for name, t in stand_ins(folder, dtype)]
    off = {
        "shape": [name for name, shard in shards.items() if shard.shape != tuple(stored[name].shape)],
        "values": [name for name, shard in shards.items() if not torch.equal(shard.local.flatten(), parts[name])],
        "copied": [name for name, shard in shards.items() if shard.local.untyped_storage()._cdata not in storages],
        "made anew": [name for name, shard in policy.weights() if shard is not shards[name]],
        "stand-ins": [(n, s.shape, s.local.dtype) for n, s in shards.items()] != dtypes[torch.float32],
        "stand-ins in bfloat16": [dtype for *_, dtype in dtypes[torch.bfloat16]]
        != [torch.float32 if name.endswith("_bias") else torch.bfloat16 for name in shards],
    }
    name, parameter = "model.embed_tokens.weight", policy.parameters["model.embed_tokens.weight"]
    parameter._local_tensor.set_(parameter._local_tensor.clone())  # pyright: ignore[reportAttributeAccessIssue]
    moved = dict(policy.weights())
    off["stale"] = [other for other in moved if (moved[other] is shards[other]) == (other == name)]
    off["where it moved"] = moved[name].local.data_ptr() != parameter._local_tensor.data_ptr()  # pyright: ignore[reportAttributeAccessIssue]
    return {"off": {what: found for what, found in off.items() if found}, "ranges": ranges}


def _load_all(ranks: Ranks, folders: dict[str, Path]) -> dict[str, Any]:
    results = {}
    for family, folder in folders.items():
        policy = Policy(policy_config(folder), ranks, folder)
        stored = _read(folder)
        weights, places = dict(policy.full_weights()), _addresses(policy)
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        buffers = dict(theirs.named_buffers())
        with torch.no_grad():
            logprobs_BT = policy.scorer(torch.tensor(TOKEN_IDS), Distribution()).logprobs_BT
            expected_BTV = theirs(torch.tensor(TOKEN_IDS)).logits.log_softmax(dim=-1)
        head = policy.scorer.hf.get_output_embeddings().weight
        assert not isinstance(head, DTensor), "the root must be whole after a forward, or the next line shows nothing"
        assert _addresses(policy) == places, "shards must be handed out from where they are trained"
        most_whole = _most_whole_at_a_time(policy)
        expected_BT = expected_BTV[:, :-1].gather(-1, torch.tensor(TOKEN_IDS)[:, 1:, None]).squeeze(-1)
        results[family] = {
            "names_off": set(weights) ^ set(stored),
            "order": list(weights),
            "tensors_off": [name for name in weights if not torch.equal(weights[name], stored[name])],
            "buffers_off": [n for n, b in policy.scorer.hf.named_buffers() if not torch.equal(b, buffers[n])],
            "num_buffers": len(buffers),
            "logprobs_off": (logprobs_BT[:, 1:] - expected_BT).abs().max().item(),
            "logprobs_vary": expected_BT.std().item(),
            "most_whole": most_whole,
            "local_rows": [local_rows(parameter, ranks)[0].shape[0] for parameter in policy.parameters.values()],
            "shards": _shards(policy, stored, folder),  # the last: it moves a storage
        }
    return results


def _addresses(policy: Policy) -> list[int]:
    return [shard.local.data_ptr() for _, shard in policy.weights()]


@pytest.fixture(scope="module", params=[1, 2, 3])
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """What each rank of some found in a policy of each folder."""
    return run_ranks(_load_all, folders, world_size=request.param)


def test_every_family_loads_by_slices_as_from_pretrained_does(
    folders: dict[str, Path], loaded: list[dict[str, Any]]
) -> None:
    for family in folders:
        for result in (rank[family] for rank in loaded):
            assert not result["names_off"], family
            assert not result["tensors_off"], family
            assert not result["buffers_off"], family
            assert result["num_buffers"] > 0
            assert result["logprobs_off"] < 1e-5, family
            assert result["logprobs_vary"] > 0.05, "logprobs that hardly vary would hide a wrong load"
            assert result["order"] == loaded[0][family]["order"]
            assert result["most_whole"] == 1, family
    if len(loaded) == 3:
        assert 0 in loaded[2]["few_experts"]["local_rows"], "the last of 3 ranks must keep none of 4 experts"


def test_each_rank_hands_out_its_part_of_each_tensor_as_a_view_and_together_they_are_whole(
    folders: dict[str, Path], loaded: list[dict[str, Any]]
) -> None:
    for family, folder in folders.items():
        shards = [rank[family]["shards"] for rank in loaded]
        assert not any(of_rank["off"] for of_rank in shards), (family, [of_rank["off"] for of_rank in shards])
        for name, tensor in _read(folder).items():
            ranges, numel = [of_rank["ranges"][name] for of_rank in shards], tensor.numel()
            if name.endswith("e_score_correction_bias"):
                assert ranges == [(0, numel)] * len(loaded), "a buffer is whole on every rank"
                continue
            filled = [(start, end) for start, end in ranges if start < end]
            assert [start for start, _ in filled] == [0, *(end for _, end in filled[:-1])], (family, name)
            assert filled[-1][1] == numel, (family, name)
    if len(loaded) == 3:
        ranges = loaded[2]["few_experts"]["shards"]["ranges"]
        assert {start == end for name, (start, end) in ranges.items() if ".experts." in name} == {True}


def test_rows_of_a_shard_are_those_of_torch_chunk() -> None:
    for num_rows in range(1, 12):
        for world_size in range(1, 6):
            chunks = list(torch.arange(num_rows).chunk(world_size))
            chunks += [torch.arange(0)] * (world_size - len(chunks))
            for rank, chunk in enumerate(chunks):
                assert list(range(*shard_rows(num_rows, rank, world_size))) == chunk.tolist()


def test_packed_experts_are_boxes_of_one_parameter(tiny_models: dict[str, Path]) -> None:
    pieces = {piece.name: piece for piece in checkpoint_pieces(build_on_meta(tiny_models["qwen3_moe"], torch.float32))}
    experts = "model.layers.1.mlp.experts"
    assert pieces[f"{experts}.3.up_proj.weight"] == Piece(
        name=f"{experts}.3.up_proj.weight",
        parameter=f"{experts}.gate_up_proj",
        box=((3, 1), (128, 128), (0, 64)),
        shape=(128, 64),
    )
    assert pieces[f"{experts}.7.down_proj.weight"].box == ((7, 1), (0, 64), (0, 128))


def test_tied_heads_appear_once_and_untied_ones_by_name(tiny_models: dict[str, Path]) -> None:
    for family, is_tied in (("qwen3", True), ("llama", False)):
        names = [piece.name for piece in checkpoint_pieces(build_on_meta(tiny_models[family], torch.float32))]
        assert names.count("model.embed_tokens.weight") == 1
        assert names.count("lm_head.weight") == (0 if is_tied else 1)


def test_a_folder_that_turns_its_tensors_is_refused_by_name(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.transpose(0, 1) if name == "lm_head.weight" else t for name, t in tensors.items()}

    monkeypatch.setattr("colo.policy.names.revert_weight_conversion", turned)
    with pytest.raises(ValueError, match=r"^model must have each tensor .* got llama with lm_head\.weight \[64, "):
        checkpoint_pieces(build_on_meta(tiny_models["llama"], torch.float32))


def _one_rank() -> Ranks:
    return Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device("cpu"),
        tensor_parallel_size=1,
        notice_s=30.0,
        store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
    )


def _load_changed(source: Path, folder: Path, changes: dict[str, Tensor | None]) -> PreTrainedModel:
    """Load a copy of a model folder in which some tensors are replaced, added, or (None) left out."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors: dict[str, Tensor | None] = {**load_file(source / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    model = build_on_meta(folder, torch.float32)
    pieces = checkpoint_pieces(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(model, pieces, folder, _one_rank())
    return model


def test_a_missing_tensor_is_refused_by_name(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    with pytest.raises(
        ValueError, match=rf"^model must have the tensor {name} \[128, 64\], got qwen3_moe in .* without"
    ):
        _load_changed(tiny_models["qwen3_moe"], tmp_path / "model", {name: None})


def test_a_missing_untied_head_is_refused(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model must have the tensor lm_head\.weight .* got llama"):
        _load_changed(tiny_models["llama"], tmp_path / "model", {"lm_head.weight": None})


def test_a_tensor_of_another_shape_is_refused_by_name(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model must have model\.norm\.weight of shape \[64\], got llama .* \[65\]"):
        _load_changed(tiny_models["llama"], tmp_path / "model", {"model.norm.weight": torch.ones(65)})


def test_an_extra_head_in_a_tied_folder_must_equal_the_embedding(
    tiny_models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = load_file(tiny_models["qwen3"] / "model.safetensors")["model.embed_tokens.weight"]
    with caplog.at_level(logging.WARNING):
        model = _load_changed(tiny_models["qwen3"], tmp_path / "same", {"lm_head.weight": embedding.clone()})
    assert torch.equal(model.get_parameter("lm_head.weight"), embedding)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"^model must have lm_head\.weight equal to model\.embed_tokens\.weight"):
        _load_changed(tiny_models["qwen3"], tmp_path / "other", {"lm_head.weight": embedding + 1})


def test_a_tensor_that_has_no_place_in_the_model_is_told(
    tiny_models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _load_changed(tiny_models["llama"], tmp_path / "model", {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})
    assert ["1 tensors of" in record.message and "q_proj.bias" in record.message for record in caplog.records] == [True]


def test_a_folder_that_lacks_a_file_of_its_index_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"without model-00002-of-00002\.safetensors$"):
        model_files(tmp_path)
    with pytest.raises(ValueError, match=r"^model must have model\.safetensors or model\.safetensors\.index\.json"):
        model_files(tmp_path / "none")


def test_rows_of_a_tensor_are_read_without_the_rest(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).view(6, 2)}, tmp_path / "model.safetensors")
    files: TensorFiles = model_files(tmp_path)
    assert files.read("a", (1, 3)).tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert files.shape("a") == (6, 2)


def _gemma2_and_granite(ranks: Ranks, folder: Path) -> tuple[float, str]:
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_dropout": 0.5,
    }
    capped: dict[str, Any] = {**shape, "final_logit_softcapping": 0.2}
    scaled: dict[str, Any] = {**shape, "logits_scaling": 8.0}
    torch.manual_seed(0)
    gemma = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma2"](**capped))
    _save_noisy(gemma, folder / "gemma2")
    policy = Policy(policy_config(folder / "gemma2"), ranks, folder / "gemma2")
    token_ids_BT = torch.tensor(TOKEN_IDS) % 64
    with torch.no_grad():
        logprobs_BT = policy.scorer(token_ids_BT, Distribution()).logprobs_BT
        whole_BTV = gemma.eval()(token_ids_BT).logits.log_softmax(dim=-1)[:, :-1]
    whole_BT = whole_BTV.gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    assert not any(module.training for module in policy.scorer.modules()), "dropout must be off"
    granite = AutoModelForCausalLM.from_config(CONFIG_MAPPING["granite"](**scaled))
    _save_noisy(granite, folder / "granite")
    with pytest.raises(ValueError, match="granite") as refusal:
        Policy(policy_config(folder / "granite"), ranks, folder / "granite")
    return (logprobs_BT[:, 1:] - whole_BT).abs().max().item(), str(refusal.value)


def test_capped_logits_are_right_and_scaled_ones_are_refused(tmp_path: Path) -> None:
    ((difference, refusal),) = run_ranks(_gemma2_and_granite, tmp_path, world_size=1)
    assert difference < 1e-5
    assert refusal.startswith("model must compute its logits as its head times the last hidden states, got granite")
