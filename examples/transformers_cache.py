"""transformers' `generate_batch` on Quire's blocks: this class replaces its cache allocator and asks Quire's allocator.

    quire allocator                        # in one shell
    python examples/transformers_cache.py  # in another one; it connects to $QUIRE_ALLOCATOR; its argument is a folder

The texts are the same as with transformers' own allocator. transformers' tables are lists that grow at their end, so
the pool is append-only. The first two sectors of transformers' pool are padding, so block ids begin above them. Forks
and offloading are missing.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from quire import Allocator, PoolSpec, QuireError
from quire.hashing import block_digests, root_digest
from quire.protocol.outcomes import StepOutcome
from quire.session import StepBuilder
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
POOL, ANSWER_S = "transformers", 30.0


class QuireCacheAllocator(FullAttentionCacheAllocator):
    """Gets its blocks from a pool at an allocator. transformers itself decides where it writes and reads them."""

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        """Opens the pool, which has all blocks after the padding sectors."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        blocks = non_trash_bytes // self.bytes_per_block
        spec = PoolSpec.full_attention(block_count=blocks, block_size=self.tokens_per_page)
        self.client = Allocator()
        self.session = self.client.session(
            POOL, replace(spec, append_only=True, first_block_id=2 * self.blocks_per_sector)
        )
        self.session.open(ANSWER_S)
        self.root = root_digest(fingerprint=b"an example", layout="transformers")
        self.ids, self.sequences, self.committed = itertools.count(1), dict[str, int](), dict[str, int]()
        self.matched = (0, 0, list[int]())  # a sequence without a request, its matched tokens and its table
        self.free, self.hit_token_count = blocks, 0
        # transformers divides memory into sectors of kinds of attention. With one kind, sectors never change.
        pool.free_sectors, pool.reset, pool.try_to_free_sectors = [], _nothing, _nothing
        pool.count_free_blocks = lambda _index: self.free

    def ask(self, step: StepBuilder) -> StepOutcome:
        """Sends a step and waits for its outcome."""
        outcome = self.session.submit(step).result(ANSWER_S)
        self.free = outcome.free_block_count
        return outcome

    def digests(self, tokens: list[int]) -> list[bytes]:
        """Returns the digests of a text's full blocks."""
        return block_digests(self.root, tokens, self.tokens_per_page)

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Admits the prompt if a prefix of it is cached; returns the cached blocks."""
        step, sequence_id = StepBuilder(), next(self.ids)
        step.allocate(sequence_id, 1, self.digests(prompt_ids), prompt_token_count=len(prompt_ids))
        (grown,) = self.ask(step).grows
        count = grown.matched_token_count // self.tokens_per_page
        if grown.result and count:
            self.hit_token_count += grown.matched_token_count
            self.matched = sequence_id, grown.matched_token_count, list(grown.blocks[0])
            return self.matched[2][:count]
        if grown.result:
            step = StepBuilder()
            step.free(sequence_id)
            self.ask(step)
        return []

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Assigns the sequence that `match_prefix_blocks` admitted to its request."""
        self.sequences[request_id], self.committed[request_id], self.block_table[request_id] = self.matched

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Gets blocks for new tokens. The caller has checked that there are enough blocks."""
        step, tokens = StepBuilder(), past_length + query_length
        if request_id in self.sequences:
            step.grow(self.sequences[request_id], tokens)
        else:
            self.sequences[request_id], self.committed[request_id] = next(self.ids), 0
            step.allocate(self.sequences[request_id], tokens)
        (grown,) = self.ask(step).grows
        assert grown.result, f"there were enough blocks, and the answer is {grown.result}"
        self.block_table.setdefault(request_id, []).extend(grown.blocks[0])

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Publishes the blocks that a pass has filled. A copy of a published block stays in the table."""
        first = self.committed[request_id] // self.tokens_per_page
        end = first + new_new_blocks
        step, tokens = StepBuilder(), end * self.tokens_per_page
        step.commit(self.sequences[request_id], tokens, self.digests(token_ids[:tokens])[first:])
        self.ask(step)
        self.committed[request_id] = tokens

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees a request. The request's published blocks stay cached, under the policy of the pool."""
        self.block_table.pop(request_id, None)
        if request_id in self.sequences:
            step = StepBuilder()
            step.free(self.sequences.pop(request_id))
            self.ask(step)

    def close(self) -> None:
        """Gives the pool back."""
        self.session.close()
        self.client.close()


def _nothing() -> None:
    """Does nothing, because sectors never change their type of attention."""


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], Any]:
    """Runs the parts of `generate_batch` on the prompts twice; returns the texts and the cache allocator."""
    config = ContinuousBatchingConfig(page_size=16, num_blocks=256, max_batch_tokens=1024, use_async_batching=False)
    wanted = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    texts: list[list[int]] = []
    with model.continuous_batching_context_manager(
        generation_config=wanted, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        for _ in range(2):
            names = [manager.add_request(prompt, max_new_tokens=new_tokens) for prompt in prompts]
            done: dict[str, list[int]] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
            texts += [done[name] for name in names]
        (allocator,) = manager.batch_processor.cache.cache_allocators.values()
    return texts, allocator


def main(folder: str = str(DEMO)) -> None:
    """Generates the same texts with both allocators, and prints how much the second round of prompts shared."""
    with Allocator() as client:
        client.list_pools()  # Raises at once if no allocator answers.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="paged|sdpa").eval()
    prompts = [[*range(1, 49), number, number + 1] for number in range(100, 106)]
    theirs, _ = generate(model, prompts, 24)
    own, ATTN_TYPE_TO_ALLOCATOR["full_attention"] = ATTN_TYPE_TO_ALLOCATOR["full_attention"], QuireCacheAllocator
    try:
        texts, allocator = generate(model, prompts, 24)
    finally:
        ATTN_TYPE_TO_ALLOCATOR["full_attention"] = own
    pool = allocator.client.get_pool(POOL)
    allocator.close()
    assert texts == theirs, "the texts differ"
    print(f"{len(texts)} texts are the same, and {allocator.hit_token_count} tokens of prompts were shared")
    print(f"{pool.cached_block_count} blocks are cached, {pool.held_block_count} are held")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except QuireError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
