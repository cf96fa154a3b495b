"""The sides of `serving.py`, each in its own process, with their models and requests.

models              the checkpoints
workload            the prompts of a round
process             a side as a process that exchanges a line of JSON per round
transformers_side   `generate` and `generate_batch`
vllm_side           vLLM's engine; runs in its own environment, without Quire
quire_side          client, worker and allocator
ceiling             the least times that a GPU's speed allows
"""
