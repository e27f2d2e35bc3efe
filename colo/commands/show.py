"""colo show: a recipe resolved."""

import sys

from colo.recipe import load_config, to_yaml


def show_command(arguments: list[str]) -> None:
    """Print every option with its value; hydra's `--cfg job` and `--resolve` are taken and change nothing.

    Raises:
        ValueError: the recipe or an override is wrong.
    """
    rest = []
    words = iter(arguments)
    for word in words:
        if word == "--cfg":
            kind = next(words, "nothing")
            if kind != "job":
                raise ValueError(f"--cfg must be job, got {kind}")
        elif word not in ("--cfg=job", "--resolve"):
            rest.append(word)
    sys.stdout.write(to_yaml(load_config(rest)))
