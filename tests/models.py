"""Models made for a test out of tiny ones."""

import json
import shutil
from pathlib import Path


def stops_often(model: Path, folder: Path) -> Path:
    """A copy of a tiny model that ends a completion at one token of its vocabulary in sixteen, made in `folder`.

    Lengths are then long-tailed: about 16 tokens in the mean, and no longest. A random tiny model as it is runs nearly
    every completion into its length limit.
    """
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text())
    generation["eos_token_id"] = [generation["eos_token_id"], *range(200, 215)]
    path.write_text(json.dumps(generation))
    return folder
