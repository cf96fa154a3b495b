"""A stage for vLLM's scheduler: requests and turns. A memory of pages (`pages.py`) replaces the model.

With passes ahead, a turn schedules the next pass before the current one is taken in. vLLM's engine does this with its
asynchronous scheduler, and with several pipeline stages.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from typing import Any, Final, NamedTuple

from pages import Pages
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
FULL: Final = ("full", BLOCK, 0)  # a group: kind of layers, tokens of a block, tokens of a window
IMAGE_TOKENS: Final = 6
CACHE_MODES: Final = {"state": "align", "states": "all"}  # kind of group -> vLLM's mode of caching states
SAMPLING: Final = ("prompt_logprobs", "stop_token_ids", "skip_reading_prefix_cache")
STATISTICS: Final = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")


class Cast(NamedTuple):
    """Two scheduler classes, and the folder with the model's configuration for them. The second class schedules
    ahead."""

    scheduler: Any
    async_scheduler: Any
    model: str


class Stage:
    """A scheduler with few blocks, its requests, and the pages that they write.

    Attributes:
        turns: for each turn, the scheduled tokens by request, and the preempted requests.
        hits: for each request, the prompt tokens that were cached when it first ran.
        statistics: vLLM's own counts of the prefix cache, by `STATISTICS`.
        events: vLLM's KV cache events of each block that could be hit.

    If `is_patient`, a pass takes longer than an allocator's answer, like a model's pass. Otherwise the next turn begins
    at once.
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
        ahead: int = 0,
        is_async: bool = False,
        keeps: int | None = None,
        **arguments: Any,
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
            prefix_cache_retention_interval=keeps,
            **arguments,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = is_async  # vLLM turns asynchronous scheduling off on CPUs.
        config.parallel_config.pipeline_parallel_size = 1 if is_async else ahead + 1
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.scheduler_config.watermark = watermark
        config.scheduler_config.long_prefill_token_threshold = long_prompt
        sizes = [size for _, size, _ in groups]
        config.cache_config.block_size = max(sizes)
        config.cache_config.num_gpu_blocks = blocks
        for kind, _, _ in groups:
            config.cache_config.mamba_cache_mode = CACHE_MODES.get(kind, config.cache_config.mamba_cache_mode)
        specs = [group_spec(*group, config.model_config.dtype) for group in groups]
        named = [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]
        shape = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=named, prefix_cache_retention_interval=keeps)
        self.scheduler = (cast.async_scheduler if is_async else cast.scheduler)(
            vllm_config=config,
            kv_cache_config=shape,
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(sizes),
            hash_block_size=min(sizes),
            log_stats=True,
        )
        self.turns: list[Any] = []
        self.hits: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.statistics = dict.fromkeys(STATISTICS, 0)
        self.events: set[Any] = set()
        self._pages = Pages(groups)
        self._drafts = drafts
        self._is_patient = is_patient
        self._ahead = ahead
        self._under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._hasher = get_request_block_hasher(min(sizes), sha256) if caches else None
        take = self.scheduler.kv_cache_manager.take_events
        self.scheduler.kv_cache_manager.take_events = lambda: self._hear(take())

    def add(self, name: str, tokens: list[int] | None, new: int = 4, **options: Any) -> Request:
        """Adds a request for `new` tokens. A second request with a session's name is the session's next input."""
        sampling = SamplingParams(
            max_tokens=new,
            ignore_eos=True,
            **{key: options.pop(key) for key in SAMPLING if key in options},
        )
        sampling.update_from_generation_config({}, 0)
        prompt = None if tokens is None else list(tokens)
        request = Request(name, prompt, sampling, None, block_hasher=self._hasher, **options)
        self.requests.setdefault(name, request)
        self.scheduler.add_request(request)
        return request

    def allow_images(self, token_count: int) -> None:
        """Makes the scheduler of a text model admit images of this many tokens."""
        self.scheduler.max_num_encoder_input_tokens = token_count
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=token_count)

    def turn(self, **options: Any) -> bool:
        """Schedules and computes a pass, and takes in finished passes; returns whether anything was scheduled."""
        output = self.scheduler.schedule(**options)
        preempted = sorted(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self._pages.start(self.requests[new.req_id], new.block_ids)
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._pages.start(self.requests[name], blocks)
            elif blocks is not None:
                self._pages.add(name, blocks)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        sampled = [
            self._pages.compute(self.requests[name], computed[name], count, tuple(drafts.get(name, ())))
            for name, count in output.num_scheduled_tokens.items()
        ]
        names = list(output.num_scheduled_tokens)
        self.turns.append([sorted(output.num_scheduled_tokens.items()), preempted])
        index = {name: number for number, name in enumerate(names)}
        self._under_way.append((output, ModelRunnerOutput(names, index, sampled)))
        while self._under_way and (len(self._under_way) > self._ahead or not names):
            self._take_in()
        if self._is_patient:
            pool = getattr(self.scheduler.kv_cache_manager, "pool", None)
            for sent in getattr(pool, "_under_way", ()):
                sent.answer.result(10.0)
        return bool(names)

    def _take_in(self) -> None:
        """Takes in the oldest unfinished pass."""
        output, result = self._under_way.popleft()
        told = self.scheduler.update_from_output(output, result)
        for each in told.values():
            stats = each.scheduler_stats and each.scheduler_stats.prefix_cache_stats
            for name in STATISTICS if stats else ():
                self.statistics[name] += getattr(stats, name)
        if self._drafts:
            names = [name for name in result.req_ids if not self.requests[name].is_finished()]
            drafts = [self._pages.drafts(name, self._drafts) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _hear(self, events: list[Any]) -> list[Any]:
        """Notes the events of hittable blocks, and returns all events."""
        for event in events:
            if type(event).__name__ != "BlockStored":
                continue
            size, kind = event.block_size, (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            for number, name in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[number * size : (number + 1) * size])
                keys = event.extra_keys and event.extra_keys[number]
                told = (event.group_idx, *kind, size, event.lora_id, event.lora_name, event.medium)
                self.events.add(str((name, tokens, keys, told)))
        return events

    def run(self, seconds_max: float = 60.0) -> None:
        """Runs until no request is left. If nothing can be scheduled, the loop pauses as vLLM's engine does."""
        deadline = time.monotonic() + seconds_max
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline, "requests are left that never end"
            if not self.turn():
                time.sleep(0.001)

    def abort(self, *names: str) -> None:
        """Aborts requests, as if their callers had left."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def told(self) -> dict[str, Any]:
        """Returns the comparable results, after every request has given its blocks back."""
        self.run()
        held, manager = held_at_allocator(), self.scheduler.kv_cache_manager
        deadline = time.monotonic() + 5
        while getattr(getattr(manager, "pool", None), "_under_way", ()) and time.monotonic() < deadline:
            manager.new_step_starts()  # Takes the allocator's last answers, which carry events, too.
        manager.take_events()
        return {
            "turns": self.turns,
            "hits": self.hits,
            "statistics": self.statistics,
            "events": sorted(self.events),
            "lengths": {name: request.num_output_tokens for name, request in self.requests.items()},
            "usage": manager.usage,
            "held": held,
        }

    def close(self) -> None:
        """Gives the blocks back."""
        self.scheduler.shutdown()


def group_spec(kind: str, size: int, window: int, dtype: Any) -> Any:
    """Returns vLLM's specification of a group."""
    if kind in CACHE_MODES:
        return MambaSpec(size, shapes=((1,),), dtypes=(dtype,), mamba_cache_mode=CACHE_MODES[kind])
    common = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    if kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=window)
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)
    return FullAttentionSpec(**common)


def text(seed: int, length: int) -> list[int]:
    """Returns tokens that depend only on the seed. A longer text begins with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(length)]


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    """Returns an image that takes the place of some tokens of a prompt."""
    place = PlaceholderRange(offset=offset, length=IMAGE_TOKENS)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


def held_at_allocator() -> int:
    """Returns the number of blocks that the allocator still counts as held after the last turn."""
    if not os.environ.get("QUIRE_VLLM_ALLOCATOR"):
        return 0
    from quire import Allocator

    deadline = time.monotonic() + 5
    with Allocator(os.environ["QUIRE_VLLM_ALLOCATOR"]) as client:
        while True:
            held = sum(pool.held_block_count for pool in client.list_pools())
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.005)
