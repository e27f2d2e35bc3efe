"""colo: reinforcement learning of language models, policy and vLLM engine in turns on the same GPU."""

__version__ = "0.1.0"
