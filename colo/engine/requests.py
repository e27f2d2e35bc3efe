"""Requests that vLLM has taken and not finished, and what comes of them."""

from typing import Any

from colo.engine.build import VllmParts
from colo.types import Completion, Request, Sampling, WeightVersionSpan


class Requests:
    """What is in flight in one engine, and what finished and was not fetched."""

    def __init__(self, parts: VllmParts) -> None:
        self._parts = parts
        self._in_flight: dict[str, Request] = {}
        self._finished: dict[str, Completion] = {}
        self._num_submitted = 0
        self.reads_cache = True
        """Whether those to come may be served from cached prefixes."""

    def __len__(self) -> int:
        """How many are in flight."""
        return len(self._in_flight)

    def submit(self, request: Request, sampling: Sampling) -> str:
        """Hand one to vLLM; return the id that `abort` takes."""
        self._num_submitted += 1
        request_id = self._parts.add_request(str(self._num_submitted), request, sampling, reads_cache=self.reads_cache)
        self._in_flight[request_id] = request
        return request_id

    def step(self) -> int:
        """One scheduler step; return how many it finished."""
        return self._add(self._parts.llm.llm_engine.step())

    def freeze(self, *, clear_cache: bool) -> None:
        """Stop all where they are; with `clear_cache` their KV is computed again later."""
        self._add(self._parts.pause(clear_cache=clear_cache))

    def finished(self) -> list[Completion]:
        """Those that finished since the last call, without what `take` took."""
        completions, self._finished = list(self._finished.values()), {}
        return completions

    def take(self, request_ids: list[str]) -> list[Completion]:
        """The finished completions of these requests, in their order."""
        return [self._finished.pop(request_id) for request_id in request_ids]

    def _add(self, outputs: list[Any]) -> int:
        finished = [output for output in outputs if output.finished]
        for output in finished:
            self._finished[output.request_id] = _to_completion(self._in_flight.pop(output.request_id), output)
        return len(finished)

    def abort(self, request_ids: list[str] | None = None) -> dict[str, Completion]:
        """Drop some in flight, or all, and return by id what they have so far, with the finish reason "abort".

        Raises:
            ValueError: an id that is not in flight.
        """
        ids = list(self._in_flight if request_ids is None else dict.fromkeys(request_ids))
        unknown = [request_id for request_id in ids if request_id not in self._in_flight]
        if unknown:
            raise ValueError(f"request_ids must be in flight, got {unknown[0]!r}, one of {len(unknown)} that are not")
        # vLLM drops its own record without a word when it runs in this process.
        partial = {one: _to_completion(self._in_flight[one], self._parts.output_so_far(one)) for one in ids}
        self._parts.abort(ids)
        for request_id in ids:
            del self._in_flight[request_id]
        return partial

    def abort_all(self) -> None:
        """Drop all in flight, and count what they have so far among those that finished."""
        self._finished |= self.abort()


def _to_completion(request: Request, output: Any) -> Completion:
    """vLLM's output as our record.

    Raises:
        RuntimeError: a logprob or a version label is missing; neither is ever made up.
    """
    sampled = output.outputs[0]
    token_ids, where = list(sampled.token_ids), f"completion {request.sample} of prompt {request.slot}"
    flat = sampled.logprobs
    if flat is None or len(flat.start_indices) != len(token_ids):
        raise RuntimeError(
            f"{where}: {0 if flat is None else len(flat.start_indices)} logprobs for {len(token_ids)} tokens"
        )
    logprobs = []
    for position, (start, token) in enumerate(zip(flat.start_indices, token_ids, strict=True)):
        if flat.token_ids[start] != token:
            raise RuntimeError(
                f"{where}: the logprob at position {position} is of token {flat.token_ids[start]}, not {token}"
            )
        logprobs.append(flat.logprobs[start])
    if sampled.weight_versions is None:
        raise RuntimeError(f"{where}: no weight version was reported")
    return Completion(
        slot=request.slot,
        sample=request.sample,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sampled.finish_reason,
        spans=[WeightVersionSpan(version=s.version, start=s.start, end=s.end) for s in sampled.weight_versions],
        num_cached_tokens=output.num_cached_tokens or 0,
    )
