"""The sides of `serving.py`, each a process of its own, their models, and their requests.

models              checkpoints that the script writes
workload            the prompts of a round
process             a side as a process: JSON, one line a round
transformers_side   `generate` and `generate_batch`
vllm_side           vLLM's engine; runs in its own environment, with nothing of Quire
quire_side          client, worker and allocator
ceiling             what a GPU's memory allows
"""
