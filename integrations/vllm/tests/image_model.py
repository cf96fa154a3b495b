"""Makes a small model of random weights that takes images, with the processor that vLLM needs. Runs in vLLM's
environment.

    python image_model.py FOLDER

The model is a BLIP-2, because vLLM reads BLIP-2's images without torchvision, which does not exist for that
environment's torch.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AddedToken,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessor,
    OPTConfig,
    PreTrainedTokenizerFast,
)

VOCABULARY: Final = 2048
IMAGE_TOKENS: Final = 16  # tokens of the image at the beginning of a prompt
SIDE: Final = 32  # width and height of an image, in pixels
WIDTH: Final = 128


def main() -> None:
    """Saves the model, its tokenizer and its processor in a folder."""
    torch.manual_seed(0)
    folder = sys.argv[1]
    heads: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = OPTConfig(
        **heads,
        vocab_size=VOCABULARY,
        ffn_dim=WIDTH,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=512,
        init_std=0.3,
        dropout=0.0,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**heads, intermediate_size=WIDTH, image_size=SIDE, patch_size=8),
        qformer_config=Blip2QFormerConfig(**heads, encoder_hidden_size=WIDTH, intermediate_size=WIDTH, vocab_size=64),
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCABULARY - 1,
    )
    Blip2ForConditionalGeneration(config).float().eval().save_pretrained(folder)
    tokens = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY - 1)}, unk_token="w0"))
    tokens.pre_tokenizer = WhitespaceSplit()
    image = AddedToken("<image>", normalized=False, special=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="w0", bos_token="w1", eos_token="w2", additional_special_tokens=[image]
    )
    size = {"height": SIDE, "width": SIDE}
    Blip2Processor(BlipImageProcessor(size=size), tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)


if __name__ == "__main__":
    main()
