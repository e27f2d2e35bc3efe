"""The live check of colo doctor: under torchrun, the recipe's own engine through the moves of a step, each timed."""

import json
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from colo.commands.doctor_checks import Finding, ok, wrong
from colo.engine.engine import Engine
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import stop_ranks
from colo.rl.sampler import GREEDY_SEED
from colo.start import Run, or_refused, start
from colo.types import Request, Sampling

FOUND, DOING = "colo-doctor-found ", "colo-doctor-doing "
"""What rank 0's lines for the command begin with: a finding as JSON, or the move that begins."""
NUM_PROBES = 4
"""Prompts that are completed, greedily."""
MAX_TOKENS = 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=())
T = TypeVar("T")


class Moves:
    """Makes the moves one by one, on all ranks together; rank 0 tells of each."""

    def __init__(self, run: Run) -> None:
        self._run, self._ranks = run, run.ranks

    def tell(self, finding: Finding) -> None:
        """On rank 0."""
        if self._ranks.is_main:
            _write(FOUND, json.dumps(vars(finding)))

    def make(self, name: str, move: Callable[[], T], said: str = "") -> T:
        """One move, with the seconds of the slowest rank. Collective."""
        if self._ranks.is_main:
            _write(DOING, name)
        started = time.perf_counter()
        made = move()
        seconds = self._ranks.max(time.perf_counter() - started, f"timing {name}")
        self.tell(ok(name, f"{seconds:.2f} s{f', {said}' if said else ''}"))
        return made

    def round(self, engine: Engine, policy: Policy) -> list[list[int]]:
        """From a sleeping engine to completions. Collective.

        Returns:
            Their tokens.
        """
        self.make("wake", lambda: engine.wake_up(["weights"]), "the weights")
        self.make("reload", lambda: engine.reload(policy.weights(), version="0"), "with its proof")
        self.make("prove", engine.prove, "once more")
        if self._run.config.policy.offload == "all":
            self.make("step_aside", lambda: _set_aside(engine, policy), "the policy's weights to the host")
        self.make("wake", lambda: engine.wake_up(["kv_cache"]), "the KV cache")
        engine.reset_prefix_cache()
        most = min(MAX_TOKENS, self._run.config.rollout.max_new_tokens)
        probes = [
            Request(slot=slot, sample=0, prompt_token_ids=prompt.token_ids, seed=GREEDY_SEED, max_new_tokens=most)
            for slot, prompt in enumerate(self._run.prompts[:NUM_PROBES])
        ]
        said = f"{len(probes)} completions of at most {most} tokens"
        completions = self.make("generate", lambda: engine.generate(probes, GREEDY, "probing"), said)
        return [completion.token_ids for completion in completions]


def _set_aside(engine: Engine, policy: Policy) -> None:
    engine.drop_policy_views()
    policy.step_aside()


def same_tokens(pairs: list[tuple[list[list[int]], list[list[int]]]]) -> Finding:
    """Of each rank, its greedy tokens before and after a sleep."""
    differ = [str(rank) for rank, (before, after) in enumerate(pairs) if before != after]
    if differ:
        said = f"greedy tokens after the sleep are others than before on rank {', '.join(differ)}"
        return wrong("tokens", said, "colo check run with this recipe shows which part differs")
    return ok("tokens", f"{sum(map(len, pairs[0][0]))} greedy tokens of each rank are the same before and after")


def examine(run: Run) -> None:
    """Build, generate, sleep, wake, reload, prove, generate. Collective."""
    config, ranks, moves = run.config, run.ranks, Moves(run)
    sources = stand_ins(run.model_folder, getattr(torch, config.policy.dtype))
    engine = moves.make("build", lambda: Engine(config, ranks, run.model_folder, sources), "eager")
    or_refused(engine.require_reloadable, ranks)
    policy = moves.make("policy", lambda: or_refused(lambda: Policy(config, ranks, run.model_folder), ranks), "loaded")
    before = moves.round(engine, policy)
    moves.make("sleep", engine.sleep, f"engine.sleep={config.engine.sleep}")
    after = moves.round(engine, policy)
    moves.tell(same_tokens(ranks.gather((before, after), "comparing tokens")))
    engine.close()


def _write(kind: str, text: str) -> None:
    sys.stdout.write(f"{kind}{text}\n")
    sys.stdout.flush()


@record  # torchrun reports the traceback of the rank that failed
def main(arguments: list[str]) -> None:
    """Entry point of each rank; takes what `load_config` takes. Collective."""
    run = start(arguments)
    examine(run)
    run.rewards.close()
    stop_ranks()


if __name__ == "__main__":
    main(sys.argv[1:])
