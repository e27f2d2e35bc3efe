"""The policy steps aside and comes back: the same numbers to the last bit, and its memory freed in between."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from colo.config import PolicyConfig
from colo.engine.peers import PolicyShards
from colo.policy import offload
from colo.policy.model import Policy
from colo.policy.offload import GIB, Movable
from colo.policy.optimizer import MOMENTS, local_shard
from colo.ranks import Ranks
from tests.launch import WHOLE, Launch, numbers, read_rows, train
from tests.ranks import run_ranks
from tests.rollouts import as_batch, made_up_rows, policy_config

NUM_UPDATES = 3
MODES = ("none", "optimizer", "all")


def _made(ranks: Ranks, folder: Path, mode: str) -> Policy:
    offload.CHUNK_BYTES = 10_000  # smaller than most tensors, which lie in several chunks then
    sections: dict[str, Any] = {"policy": {"offload": mode, "compute_dtype": "bfloat16"}, "loss": {"kl_coef": 0.5}}
    return Policy(policy_config(folder, update={"weight_decay": 0.1, "num_minibatches": 2}, **sections), ranks, folder)


def _turn(policy: Policy, ranks: Ranks, transport: str) -> dict[str, Any]:
    """The engine's turn: its reload takes the policy's shards, and the policy steps aside as it is told to."""
    weights = dict(policy.weights())
    peers = PolicyShards(ranks, transport)
    peers.refresh(weights)
    peers.drop()
    if policy.config.policy.offload == "all":
        policy.step_aside()
    locals_ = [shard.local for name, shard in weights.items() if "norm" not in name]
    return {
        "held": policy.held_bytes(),
        "are_shared": {local.untyped_storage().is_shared() for local in locals_},
        "are_nan": {local.isnan().all().item() for local in locals_ if local.untyped_storage().nbytes()},
    }


def _batch(ranks: Ranks, seed: int) -> Any:
    rows = [[row] for row in made_up_rows(6, seed)[ranks.rank :: ranks.world_size]]
    return as_batch(rows[:1], rows[1:])


def _state(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (*policy.optimizer_tensors(), *policy.full_weights())}


def _life(ranks: Ranks, folder: Path, mode: str, transport: str) -> dict[str, Any]:
    policy = _made(ranks, folder, mode)
    shards = {local_shard(parameter).untyped_storage()._cdata for parameter in policy.parameters.values()}
    for module in policy.scorer.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                assert parameter._sharded_param_data.untyped_storage()._cdata in shards, "what a gather reads is freed"
    saw: dict[str, Any] = {"turns": [], "metrics": [], "states": [], "held": [], "read_aside": [], "buffers": []}
    for update in range(NUM_UPDATES):
        saw["turns"].append(_turn(policy, ranks, transport))
        saw["metrics"].append(policy.update(_batch(ranks, update)))
        saw["held"].append(policy.held_bytes())
        saw["states"].append(_state(policy))
        _turn(policy, ranks, transport)
        saw["read_aside"].append({name: tensor.clone() for name, tensor in policy.optimizer_tensors()})
        groups = [*policy.offload._moments, *policy.offload._weights]
        hosts = [host for group in groups for pieces in group._pieces.values() for _, host in pieces]
        saw["buffers"].append([host.data_ptr() for host in hosts])
    moments = [state[name] for state in policy.optimizer.state.values() for name in MOMENTS]
    saw["sizes"] = {
        "gradients": policy.gradient_bytes,
        "optimizer": sum(local_shard(moment).nbytes for moment in moments),
        "parameters": sum(local_shard(parameter).nbytes for parameter in policy.parameters.values()),
        "reference": sum(local_shard(parameter).nbytes for parameter in policy.reference.hf.parameters()),
    }
    return saw


def _lives(ranks: Ranks, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    transports = ("peer", "gather") if ranks.world_size > 1 else ("auto",)
    return {(mode, transport): _life(ranks, folder, mode, transport) for mode in MODES for transport in transports}


@pytest.fixture(scope="module", params=[1, 2])
def lives(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """By rank, of one and of two: by (policy.offload, reload.transport) what a policy went through."""
    return run_ranks(_lives, tiny_models["llama"], world_size=request.param)


def test_losses_weights_and_moments_are_the_same_to_the_last_bit_wherever_they_lie_between(lives: Any) -> None:
    for rank in lives:
        plain = rank["none", next(transport for _, transport in rank)]
        for case, saw in rank.items():
            for update in range(NUM_UPDATES):
                timeless = [
                    {name: value for name, value in metrics.items() if not name.startswith(("time_s/", "offload/"))}
                    for metrics in (saw["metrics"][update], plain["metrics"][update])
                ]
                assert timeless[0] == timeless[1], case
                ours, theirs = saw["states"][update], plain["states"][update]
                assert ours.keys() == theirs.keys()
                assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], case
                aside = saw["read_aside"][update]
                assert [name for name in aside if not torch.equal(aside[name], theirs[name])] == [], case


def test_only_what_is_to_step_aside_is_freed_while_the_engine_has_its_turn(lives: Any) -> None:
    for rank in lives:
        for (mode, transport), saw in rank.items():
            first, second, third = saw["turns"]
            sizes = saw["sizes"]
            assert first["held"]["optimizer"] == 0, "AdamW makes its state in the first step"
            for turn in (second, third):
                case = (mode, transport)
                assert turn["held"]["optimizer"] == (sizes["optimizer"] if mode == "none" else 0), case
                assert turn["held"]["gradients"] == 0
                assert turn["are_shared"] == {transport == "peer"}, "stepping aside must leave shared what was"
                held = turn["held"]["policy_parameters"]
                if mode != "all":
                    assert held >= sizes["parameters"] + sizes["reference"], case
                elif transport != "peer":
                    assert held == 0
                else:  # overwritten in place; the reference is in no other rank's sight
                    assert sizes["parameters"] <= held < sizes["parameters"] + sizes["reference"]
                    assert turn["are_nan"] == {True}
            for held in saw["held"]:
                assert held["optimizer"] == sizes["optimizer"], "an update leaves everything on the device at first"
                assert held["policy_parameters"] >= sizes["parameters"] + sizes["reference"]


def test_what_is_moved_is_told_and_takes_the_same_host_memory_each_time(lives: Any) -> None:
    for rank in lives:
        for (mode, transport), saw in rank.items():
            sizes = saw["sizes"]
            assert sizes["gradients"] == pytest.approx(sizes["parameters"], rel=0.01), "but for padding"
            told = [metrics.get("offload/gib") for metrics in saw["metrics"]]
            assert saw["buffers"][0] == saw["buffers"][-1], (mode, transport)
            if mode == "none":
                assert told == [None] * NUM_UPDATES
                assert saw["buffers"][0] == []
                continue
            both_ways = 2 * sizes["optimizer"]
            if mode == "all":
                # The reference does not change, so that it leaves once. The second turn hands out the weights again.
                both_ways += 3 * sizes["parameters"] + sizes["reference"]
            assert told[-1] * GIB == pytest.approx(both_ways, rel=0.01)
            for metrics in saw["metrics"]:
                assert metrics["offload/out_s"] >= 0
                assert metrics["offload/in_s"] >= 0


def _save(policy: Policy, source: Path, folder: Path) -> None:
    moments = {name: tensor.clone() for name, tensor in policy.optimizer_tensors()}
    weights = {name: tensor.clone() for name, tensor in policy.full_weights()}
    if policy.ranks.is_main:
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        save_file(weights, folder / "model.safetensors")
        save_file(moments, folder / "optimizer.safetensors")
    policy.ranks.gather(None, "the checkpoint")


def _stop_and_resume(ranks: Ranks, source: Path, folder: Path) -> list[str]:
    policy, resumed = _made(ranks, source, "all"), _made(ranks, source, "all")
    for update in range(2):
        _turn(policy, ranks, "auto")
        policy.update(_batch(ranks, update))
    _turn(policy, ranks, "auto")
    _save(policy, source, folder)
    resumed.update(_batch(ranks, 7))  # moments and weights of another life, on the host when the checkpoint comes
    _turn(resumed, ranks, "auto")
    resumed.load(folder)
    resumed.load_optimizer(folder)
    resumed.load_state(policy.state())
    differing = []
    for update in range(2, 4):
        for each in (policy, resumed):
            _turn(each, ranks, "auto")
            each.update(_batch(ranks, update))
        ours, theirs = _state(resumed), _state(policy)
        differing += [name for name in ours if not torch.equal(ours[name], theirs[name])]
    return differing


def test_a_policy_that_stepped_aside_is_saved_and_filled_from_a_checkpoint(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    assert run_ranks(_stop_and_resume, tiny_models["qwen3"], tmp_path / "step-2") == [[], []]


def test_a_copy_out_under_way_is_of_no_use_once_the_tensors_may_change() -> None:
    tensors = [torch.arange(10.0), torch.empty(0), torch.ones(3, dtype=torch.bfloat16)]
    part = tensors[0][2:]
    group = Movable([*tensors, part], None)
    assert group.num_bytes == 46, "one storage counts once"
    assert (group.start_out(), group.start_out()) == (46, 0)
    assert group.bring_back(to_change=False) == 0
    assert group.start_out() == 0, "reading leaves the copy good"
    group.bring_back(to_change=True)
    tensors[0].add_(1)
    assert group.set_aside() == 46
    assert tensors[0].untyped_storage().nbytes() == 0
    assert torch.equal(group.read(part), torch.arange(3.0, 11.0))
    assert group.read(tensors[1]).shape == (0,)
    assert (group.start_back(), group.start_back(), group.bring_back(to_change=True)) == (46, 0, 0)
    assert torch.equal(tensors[0], torch.arange(1.0, 11.0))
    assert torch.equal(tensors[2], torch.ones(3, dtype=torch.bfloat16))


def test_what_never_changes_leaves_once() -> None:
    tensor = torch.arange(10.0)
    group = Movable([tensor], None, is_frozen=True)
    assert [group.set_aside() + group.bring_back(to_change=True) for _ in range(3)] == [80, 40, 40]
    assert torch.equal(tensor, torch.arange(10.0))


def test_a_kind_of_offload_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy\.offload must be one of none, optimizer, all, got 'parameters'"):
        PolicyConfig(offload="parameters")


def _untimed(run_dir: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in row if not name.startswith("offload/")} for row in numbers(run_dir)]


def _assert_same_run(run_dir: Path, whole: Path) -> None:
    assert _untimed(run_dir) == _untimed(whole)
    for name in ("model.safetensors", "optimizer/optimizer.safetensors", "trainer.json"):
        checkpoint = f"checkpoints/step-8/{name}"
        assert (run_dir / checkpoint).read_bytes() == (whole / checkpoint).read_bytes()
    assert all(row["offload/gib"] > 0 for row in read_rows(run_dir))


def test_a_run_with_all_aside_that_sigterm_ended_goes_on_to_the_numbers_of_one_that_stayed(
    tmp_path: Path, whole_run: Path
) -> None:
    stopped = Launch(tmp_path / "run", *WHOLE, "policy.offload=all")
    stopped.wait_for_step(1)
    stopped.ranks()[1].send_signal(signal.SIGTERM)
    assert stopped.wait() == 0, stopped.output
    assert 2 <= len(read_rows(tmp_path / "run")) < 8, "it was to be stopped half way"
    train(tmp_path / "run", *WHOLE, "policy.offload=all")
    _assert_same_run(tmp_path / "run", whole_run)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["engine.sleep=kv"], ["engine.sleep=none"], []])
def test_a_run_with_the_optimizer_aside_has_the_numbers_of_one_that_stayed(
    tmp_path: Path, whole_run: Path, more: list[str]
) -> None:
    train(tmp_path / "run", *WHOLE, "policy.offload=optimizer", *more)
    _assert_same_run(tmp_path / "run", whole_run)
