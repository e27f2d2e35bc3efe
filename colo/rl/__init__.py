"""The arithmetic of RL: prompts, rewards, advantages, losses, batches."""
