"""Score a model on held-out prompts: in training by the same engine, or on its own as `colo eval`."""

import json
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

from colo.engine.build import folder_tensors
from colo.engine.engine import Engine
from colo.ranks import stop_ranks
from colo.rl.sampler import GREEDY_SEED, Generator, Scorer, to_groups
from colo.start import Run, or_refused, start
from colo.types import Request, Sampling


class Evaluator:
    """Held-out prompts and how they are scored: one greedy completion each, by the recipe's reward."""

    def __init__(self, run: Run) -> None:
        self._config = run.config
        self._ranks = run.ranks
        self._prompts = run.eval_prompts
        self._names = run.rewards.names if len(run.rewards.names) > 1 else []
        self._scorer = Scorer(run.ranks, run.rewards, run.tokenizer)

    def is_due(self, step: int) -> bool:
        """True before the first step, each eval_every-th, and after the last."""
        every = self._config.eval_every
        return bool(every) and (step % every == 0 or step == self._config.num_steps)

    def at(self, engine: Generator, step: int) -> dict[str, float]:
        """The evaluation's metrics where one is due, else none. Collective."""
        return self.run(engine, f"step {step}: evaluation") if self.is_due(step) else {}

    def run(self, engine: Generator, what: str) -> dict[str, float]:
        """Complete and score every held-out prompt. Collective.

        Returns:
            `eval/reward`, `eval/completion_tokens` (mean) and `eval/truncated` (count), over all replicas; with several
            reward functions also `eval/PATH`, the mean of each; and `time_s/evaluate`.
        """
        started = time.perf_counter()
        slots = list(enumerate(self._prompts))[self._ranks.replica :: self._ranks.num_replicas]
        limit = self._config.rollout.max_new_tokens
        requests = [
            Request(slot=slot, sample=0, prompt_token_ids=prompt.token_ids, seed=GREEDY_SEED, max_new_tokens=limit)
            for slot, prompt in slots
        ]
        sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=tuple(self._config.rollout.stop))
        groups = to_groups(slots, engine.generate(requests, sampling, what))
        metrics = self._scorer.score(groups, f"{what}: scoring")
        return {
            "eval/reward": metrics["reward/mean"],
            "eval/completion_tokens": metrics["tokens/completion_mean"],
            "eval/truncated": metrics["rollout/truncated"],
            "time_s/evaluate": time.perf_counter() - started,
            **{f"eval/{name}": metrics[f"reward/{name}"] for name in self._names},
        }


@record  # torchrun reports the traceback of the rank that failed
def evaluate(arguments: list[str]) -> None:
    """Score `model` (a folder or a checkpoint) on `eval_prompts` and write one JSON line to stdout. Collective."""
    run = start(arguments, is_training=False)
    stand_ins = [(name, tensor.to("meta")) for name, tensor in folder_tensors(run.model_folder)]
    engine = Engine(run.config, run.ranks, run.model_folder, stand_ins, run.baseline, beside_policy=False)
    or_refused(engine.require_reloadable, run.ranks)
    with engine.awake(folder_tensors(run.model_folder), version=str(run.model_folder)):
        engine.drop_policy_views()  # the folder's tensors are not needed again
        scores = Evaluator(run).run(engine, "evaluation")
    if run.ranks.is_main:
        result = {
            "model": run.config.model,
            "eval_prompts": run.config.eval_prompts,
            "num_prompts": len(run.eval_prompts),
        }
        sys.stdout.write(json.dumps(result | scores) + "\n")
        sys.stdout.flush()
    run.rewards.close()
    engine.close()
    stop_ranks()


def main() -> None:
    """Entry point of `python -m colo.evaluate`."""
    evaluate(sys.argv[1:])


if __name__ == "__main__":
    main()
