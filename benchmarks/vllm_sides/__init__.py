"""The sides of `vllm_engine.py`: vLLM's engine with three managers, in vLLM's environment."""
