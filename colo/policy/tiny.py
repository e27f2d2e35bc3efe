"""Tiny random models with a byte tokenizer: what `debug` trains, and the tests."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TIED = {"qwen3", "qwen2", "gemma3"}
MODEL_TYPES = {"gemma3": "gemma3_text"}


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Write a two-layer random model of a family, with its tokenizer, in the Hugging Face layout.

    Args:
        family: qwen3, qwen2 and gemma3 (tied head), llama (untied), qwen3_moe (8 experts, untied).
        folder: Made if it is missing; holds config.json, model.safetensors and the tokenizer's files.
        seed: Of the weights; torch's own generator is left as it was.
    """
    tokenizer = _byte_tokenizer()
    config = _config(family, len(tokenizer), dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()  # the model is smaller than the bar
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def _config(family: str, vocab_size: int, dtype: torch.dtype) -> PretrainedConfig:
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family in TIED,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "dtype": dtype,
    }
    if family == "qwen2":  # vLLM takes its heads to be hidden_size / num_attention_heads wide, whatever head_dim says
        shape["hidden_size"] = shape["num_attention_heads"] * shape["head_dim"]
    if family == "qwen3_moe":  # vLLM on CPU pads experts whose share of a rank is no multiple of 32 wide
        shape |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    return CONFIG_MAPPING[MODEL_TYPES.get(family, family)](**shape)
