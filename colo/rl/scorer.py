"""What completions are worth: decoded, scored once per tensor-parallel group, and reduced to numbers."""

from transformers import PreTrainedTokenizerBase

from colo.ranks import Ranks
from colo.rl.batch import longest_completion, rollout_metrics, rollout_sums
from colo.rl.rewards import Rewards
from colo.types import Group


class Scorer:
    """Decodes completions, has them scored once per tensor-parallel group, and reduces the numbers."""

    def __init__(self, ranks: Ranks, rewards: Rewards, tokenizer: PreTrainedTokenizerBase) -> None:
        self._ranks = ranks
        self._rewards = rewards
        self._tokenizer = tokenizer

    def score(self, groups: list[Group], what: str) -> dict[str, float]:
        """Fill in `texts` and `rewards`, and return the metrics over all replicas. Collective.

        The ranks of a tensor-parallel group hold the same completions: each scores its share, and they exchange the
        results, so that a reward function sees each completion once.
        """
        ranks = self._ranks
        for group in groups:
            group.texts = self._tokenizer.batch_decode(
                [c.token_ids for c in group.completions], skip_special_tokens=True
            )
        items = [(group.prompt, text) for group in groups for text in group.texts]
        mine = items[ranks.group_rank :: ranks.tensor_parallel_size]

        def progress(done: int, total: int) -> None:
            ranks.report(what, f"{done} of {total} done")

        share = ranks.agreed(lambda: self._rewards.score(mine, progress), what)
        scores = [share[rank][place] for place, rank in self._dealt(len(items))]
        for index, group in enumerate(groups):
            size = len(group.completions)
            group.rewards = [score.total for score in scores[index * size : (index + 1) * size]]
        counted = groups if ranks.group_rank == 0 else []  # its other ranks hold the same
        sums = rollout_sums(counted)
        sums["timeouts"] = sum(float(len(score.timed_out)) for score in scores) if counted else 0.0
        sums["cached_tokens"] = sum((float(c.num_cached_tokens) for group in counted for c in group.completions), 0.0)
        for name in self._rewards.names:
            sums[f"by/{name}"] = sum((score.by_function[name] for score in scores), 0.0) if counted else 0.0
        totals = ranks.sum(sums, what)
        metrics = rollout_metrics(totals, ranks.max(longest_completion(groups), what))
        metrics |= {"reward/num_timeouts": totals["timeouts"], "engine/cached_tokens": totals["cached_tokens"]}
        if len(self._rewards.names) > 1:
            metrics |= {
                f"reward/{name}": totals[f"by/{name}"] / totals["num_completions"] for name in self._rewards.names
            }
        return metrics

    def _dealt(self, num_items: int) -> list[tuple[int, int]]:
        """(place in the scoring rank's share, that global rank) for each item of this replica."""
        size, members = self._ranks.tensor_parallel_size, self._ranks.group_ranks
        return [(index // size, members[index % size]) for index in range(num_items)]
