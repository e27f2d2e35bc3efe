"""What generates: the only room that imports vllm."""
