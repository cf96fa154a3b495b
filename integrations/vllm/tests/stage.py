"""A stage for vLLM's scheduler without a model: requests, turns, and in the place of a model a memory of pages.

Each turn writes its tokens where the block tables say, and everything that they read is read back first, as attention
would: of each group what its window still has.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any, Final, NamedTuple

from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK: Final = 4
TOKENS_MAX: Final = 256
FULL: Final = ("full", BLOCK, 0)  # a group: what its layers read, tokens of a block, and of a window
IMAGE_TOKENS: Final = 6
STATE_SLOT: Final = 0  # of a block that has a state; what else the block had is gone


class Cast(NamedTuple):
    """Who plays: a class of schedulers, and the folder of a model whose configuration it reads."""

    scheduler: Any
    model: str


class Stage:
    """A scheduler of few blocks, its requests, and the pages that they write.

    Attributes:
        turns: of each turn, the tokens scheduled by request and who was preempted.
        hits: of each request, the prompt's tokens that were cached when it ran first.
        statistics: vLLM's own count of queried and hit tokens.

    Where `is_patient`, a pass takes longer than an allocator's answer, as a model's does; else the next turn begins at
    once.
    """

    def __init__(
        self,
        cast: Cast,
        blocks: int,
        *,
        budget: int = 512,
        seqs: int = 16,
        policy: str = "fcfs",
        groups: tuple[tuple[str, int, int], ...] = (FULL,),
        caches: bool = True,
        watermark: float = 0.0,
        long_prompt: int = 0,
        drafts: int = 0,
        is_patient: bool = False,
    ) -> None:
        speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2} if drafts else None
        config = EngineArgs(
            cast.model,
            max_model_len=TOKENS_MAX,
            max_num_batched_tokens=max(budget, TOKENS_MAX),
            max_num_seqs=seqs,
            skip_tokenizer_init=True,
            scheduling_policy=policy,
            enforce_eager=True,
            async_scheduling=False,
            enable_prefix_caching=caches,
            speculative_config=speculation,
        ).create_engine_config()
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.scheduler_config.watermark = watermark
        config.scheduler_config.long_prefill_token_threshold = long_prompt
        sizes = [size for _, size, _ in groups]
        config.cache_config.block_size = max(sizes)
        config.cache_config.num_gpu_blocks = blocks
        if any(kind == "state" for kind, _, _ in groups):
            config.cache_config.mamba_cache_mode = "align"
        specs = [group_spec(*group, config.model_config.dtype) for group in groups]
        named = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
        self.scheduler = cast.scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=named),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(sizes),
            hash_block_size=min(sizes),
            log_stats=True,
        )
        self.turns: list[Any] = []
        self.hits: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.statistics = [0, 0]
        self._groups = groups
        self._drafts = drafts
        self._is_patient = is_patient
        self._tables: dict[str, list[list[int]]] = {}
        # Of each slot for which group it was written, and all tokens up to it.
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._hasher = get_request_block_hasher(min(sizes), sha256) if caches else None

    def add(self, name: str, tokens: list[int], new: int = 4, **options: Any) -> Request:
        """A request for so many new tokens."""
        stops = options.pop("stop_token_ids", None)
        sampling = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            prompt_logprobs=options.pop("prompt_logprobs", None),
            stop_token_ids=stops,
        )
        sampling.update_from_generation_config({}, 0)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, **options)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def allow_images(self, token_count: int) -> None:
        """Lets a scheduler whose model takes texts alone let images of so many tokens in."""
        self.scheduler.max_num_encoder_input_tokens = token_count
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=token_count)

    def turn(self) -> bool:
        """Schedules, computes and takes in one pass; returns whether anything was scheduled."""
        output = self.scheduler.schedule()
        preempted = sorted(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for table, added in zip(self._tables[name], blocks, strict=True):
                    table.extend(added)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        sampled = [
            self._compute(name, computed[name], count, tuple(drafts.get(name, ())))
            for name, count in output.num_scheduled_tokens.items()
        ]
        self.turns.append([sorted(output.num_scheduled_tokens.items()), preempted])
        names = list(output.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        told = self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))
        for each in told.values():
            stats = each.scheduler_stats and each.scheduler_stats.prefix_cache_stats
            if stats:
                self.statistics = [self.statistics[0] + stats.queries, self.statistics[1] + stats.hits]
        if self._drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [self._draft(name) for name in names]))
        if self._is_patient:
            pool = getattr(self.scheduler.kv_cache_manager, "pool", None)
            for sent in getattr(pool, "_under_way", ()):
                sent.answer.result(10.0)
        return bool(names)

    def _compute(self, name: str, before: int, count: int, drafts: tuple[int, ...]) -> list[int]:
        """Reads what is there, writes what is new; returns the next tokens where the pass ends with the last one."""
        known = tuple(self.requests[name].all_token_ids)
        tokens = known + drafts
        for group, (kind, size, window) in enumerate(self._groups):
            table = self._tables[name][group]
            if kind == "state":
                self._compute_state(name, tokens, group, before, count)
                continue
            for position in range(first_read(kind, window, before), before):
                seen = self._slots.get((table[position // size], position % size))
                assert seen == (group, self._content(name, tokens, position)), f"{name} reads another at {position}"
            for position in range(before, before + count):
                slot = table[position // size], position % size
                assert slot[0] > 0, "block 0 is vLLM's"
                self._slots[slot] = (group, self._content(name, tokens, position))
        if before + count < len(known):
            return []
        sampled = [next_token(known)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(next_token((*known, *sampled)))
        return sampled

    def _compute_state(self, name: str, tokens: tuple[int, ...], group: int, before: int, count: int) -> None:
        """Takes the state of the last token before from its block, as vLLM's worker does, and leaves the new one in
        that of the last token."""
        table, size, last = self._tables[name][group], self._groups[group][1], before + count - 1
        if before:
            seen = self._slots.get((table[(before - 1) // size], STATE_SLOT))
            assert seen == (group, self._content(name, tokens, before - 1)), f"{name} goes on from another state"
        assert table[last // size] > 0, "block 0 is vLLM's"
        self._slots[table[last // size], STATE_SLOT] = (group, self._content(name, tokens, last))

    def _content(self, name: str, tokens: tuple[int, ...], position: int) -> int:
        """What attention over a token and all before it has cached, images among them."""
        request = self.requests[name]
        images = [each.identifier for each in request.mm_features or () if each.mm_position.offset <= position]
        adapter = request.lora_request and request.lora_request.lora_name
        return hash((request.cache_salt, adapter, *images, tokens[: position + 1]))

    def _draft(self, name: str) -> list[int]:
        """As many drafts as there may be, of which the first few are right."""
        tokens, drafts = tuple(self.requests[name].all_token_ids), list[int]()
        right = len(tokens) % (self._drafts + 1)
        while len(drafts) < self._drafts:
            drafts.append(next_token((*tokens, *drafts)) + (len(drafts) >= right))
        return drafts

    def run(self, seconds_max: float = 60.0) -> None:
        """Goes on until nobody is left; where nothing can be scheduled, it pauses as vLLM's engine does."""
        deadline = time.monotonic() + seconds_max
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline, "requests are left that never end"
            if not self.turn():
                time.sleep(0.001)

    def abort(self, *names: str) -> None:
        """The callers are gone."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def told(self) -> dict[str, Any]:
        """What can be compared; nobody holds anything."""
        self.run()
        return {
            "turns": self.turns,
            "hits": self.hits,
            "statistics": self.statistics,
            "lengths": {name: request.num_output_tokens for name, request in self.requests.items()},
            "usage": self.scheduler.kv_cache_manager.usage,
            "held": held_at_allocator(),
        }

    def close(self) -> None:
        """Gives the blocks back."""
        self.scheduler.shutdown()


def group_spec(kind: str, size: int, window: int, dtype: Any) -> Any:
    """vLLM's specification of a group."""
    if kind == "state":
        return MambaSpec(size, shapes=((1,),), dtypes=(dtype,), mamba_cache_mode="align")
    common = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    if kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=window)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)
    return FullAttentionSpec(**common)


def first_read(kind: str, window: int, token_count: int) -> int:
    """The first token that the one after so many others reads."""
    if kind == "sliding":
        return max(0, token_count - window + 1)
    return token_count // window * window if kind == "chunked" else 0


def next_token(tokens: tuple[int, ...]) -> int:
    """What the model in our place says."""
    return hash(tokens) % 1000 + 1


def text(seed: int, length: int) -> list[int]:
    """Tokens that follow from the seed; a longer text begins like a shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(length)]


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    """An image in the place of some tokens of a prompt."""
    place = PlaceholderRange(offset=offset, length=IMAGE_TOKENS)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def held_at_allocator() -> int:
    """Returns how many blocks an allocator still counts as held, although there are no more turns."""
    if not os.environ.get("QUIRE_VLLM_ALLOCATOR"):
        return 0
    from quire import AllocatorClient

    deadline = time.monotonic() + 5
    with AllocatorClient(os.environ["QUIRE_VLLM_ALLOCATOR"]) as client:
        while True:
            held = sum(pool.held_block_count for pool in client.list_pools())
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.005)
