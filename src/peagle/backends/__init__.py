"""Other engines behind the same interface: `vllm`, for several GPUs and nodes."""
