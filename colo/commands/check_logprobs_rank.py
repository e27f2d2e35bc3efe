"""The engine's side of colo check logprobs: one engine, in one mode, that samples and writes what it says."""

import json
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from colo.commands.check_logprobs import read_options
from colo.engine.build import folder_tensors
from colo.engine.engine import Engine
from colo.ranks import start_ranks, stop_ranks
from colo.rl.generator import request_seed
from colo.start import or_refused
from colo.types import Request, Sampling


@record  # torchrun reports the traceback of the rank that failed
def main(arguments: list[str]) -> None:
    """Entry point under torchrun: the mode, the folder that holds prompts.json, and the check's own arguments."""
    mode, folder, *rest = arguments
    options = read_options(rest)
    prompts = json.loads((Path(folder) / "prompts.json").read_text())
    config, rollout = options.config(mode), options.rollout
    ranks = start_ranks()
    stand_ins = [(name, tensor.to("meta")) for name, tensor in folder_tensors(options.model)]
    engine = Engine(config, ranks, options.model, stand_ins, beside_policy=False)
    or_refused(engine.require_reloadable, ranks)
    requests = [
        Request(
            slot=slot,
            sample=0,
            prompt_token_ids=token_ids,
            seed=request_seed(0, 0, slot, 0),
            max_new_tokens=rollout.max_new_tokens,
        )
        for slot, token_ids in enumerate(prompts)
    ]
    sampling = Sampling(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p, stop=()
    )
    with engine.awake(folder_tensors(options.model), version=str(options.model)):
        completions = engine.generate(requests, sampling, f"{mode} logprobs")
    rows = [
        {"prompt_token_ids": prompt, "token_ids": completion.token_ids, "logprobs": completion.logprobs}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    (Path(folder) / f"{mode}.json").write_text(json.dumps(rows))
    engine.close()
    stop_ranks()


if __name__ == "__main__":
    main(sys.argv[1:])
