"""A Llama of 32 million parameters with random weights: large enough that matrices weigh more than Python.

With 512 hidden dimensions and 8 layers a decode step of 32 requests spends most of its time in matrix products; in the
3.5 M demo model it spends most of it between them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def make_llama_32m(folder: Path) -> Path:
    """Writes the checkpoint, with the demo model's tokenizer, and returns its folder.

    The parameters are 8,192 x 512 for each of the two embeddings and 2,949,120 for each of the 8 layers: 32.0 M.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
