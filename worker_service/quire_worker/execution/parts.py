"""Parts of a forward pass, one for each sample: their layout, their results, and how a failed pass is cut in two."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

from quire_worker.cache import KVCache
from quire_worker.execution.failures import Failure
from quire_worker.model.batch import Chunk, ForwardBatch, build_batch
from quire_worker.sampling.logprobs import Likeliest, TokenLogprobs, likeliest, rank
from quire_worker.scheduling.plan import Draw, Work
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.slots import Proposal

ItemT = TypeVar("ItemT")


class Restore(NamedTuple):
    """Slots of host memory, and the blocks that they are copied into."""

    sample: Sample
    slots: list[int]
    blocks: list[int]


class Before(NamedTuple):
    """Results of a batch that the next batch needs.

    Attributes:
        token_ids: the last token of each of its draws; any value if the draw failed.
        failures: see `Computed`.
        lost_blocks: see `Computed`.
    """

    token_ids: list[int]
    failures: dict[Request, Failure]
    lost_blocks: dict[int, Failure]


class Awaiting(NamedTuple):
    """A part of one token that a draw of the previous batch samples.

    Attributes:
        tokens: the part's tokens; the sampled token is written into this list.
        place: the token's place in the flat batch.
        draw_index: the draw's index in the previous batch.
    """

    tokens: list[int]
    place: int
    draw_index: int


class Part(NamedTuple):
    """Tokens of one sample from position `start` on, in one pass, and the sample's tables at the time of planning.

    The last `len(draft)` of `tokens` are the draft.
    """

    sample: Sample
    start: int
    tokens: list[int]
    tables: list[array[int]]
    draft: tuple[int, ...] = ()

    @property
    def needs_all_logits(self) -> bool:
        """Returns whether the logits after each token of the part are needed."""
        scored = self.sample.scored
        if scored is not None:
            return self.start + len(self.tokens) >= scored.start
        return self.sample.needs_all_logits and self.start + 1 < len(self.sample.request.prompt)

    @property
    def is_continued(self) -> bool:
        """Returns whether the part ends at the last token of a beam, so that the likeliest next tokens are wanted."""
        return self.sample.is_beam and self.start + len(self.tokens) == len(self.sample.tokens)

    @property
    def may_wait(self) -> bool:
        """Returns whether the sampled token is the only result that has to be read."""
        return self.sample.sampler.is_simple and not self.needs_all_logits and not self.is_continued

    @property
    def row_count(self) -> int:
        """Returns the number of the part's rows of logits."""
        return len(self.tokens) if self.needs_all_logits or self.draft else 1

    def without_draft(self) -> Part:
        """Returns the part without its drafted tokens."""
        return self._replace(tokens=self.tokens[: len(self.tokens) - len(self.draft)], draft=())


class Row(NamedTuple):
    """Location of the logits after a token.

    Attributes:
        logits: float32 `[rows, vocabulary]`.
        number: the row's index.
        likeliest: the greedy choice of each row; None if not known.
    """

    logits: torch.Tensor
    number: int
    likeliest: list[int] | None


class Token(NamedTuple):
    """A token that was drawn."""

    draw: Draw
    token_id: int
    logprobs: TokenLogprobs | None


class PromptLogprobs(NamedTuple):
    """Logprobs of a prompt's tokens, starting at a position."""

    request: Request
    position: int
    logprobs: list[TokenLogprobs]


class CandidateLogprobs(NamedTuple):
    """Logprobs of a candidate's tokens, starting at a position."""

    sample: Sample
    position: int
    logprobs: list[float]


class Continuations(NamedTuple):
    """The likeliest next tokens of a beam."""

    sample: Sample
    told: Likeliest


class Computed(NamedTuple):
    """Results of a batch.

    Attributes:
        work: the work that wrote its keys and values into pages, except failed requests.
        tokens: one for each draw of the requests that did not fail.
        prompt_logprobs: logprobs of prompt tokens, if requested.
        candidate_logprobs: logprobs of candidates' tokens.
        continuations: likeliest next tokens of beams that are computed to their last token.
        failures: the requests that failed, with the failure.
        lost_blocks: blocks whose copy failed; their content is undefined.
        retry_count: passes, copies and draws that were retried in parts.
        seconds: time on the model's thread.
        swapped_block_count: blocks that were moved to host memory or back.
        swap_s: the part of `seconds` that was spent on moving them.
        proposals: tokens that a draft model proposes for samples that continue.
        sampling_s: the part of `seconds` that was spent on choosing tokens, if the forward pass did not choose them.
    """

    work: list[Work]
    tokens: list[Token]
    prompt_logprobs: list[PromptLogprobs]
    candidate_logprobs: list[CandidateLogprobs]
    continuations: list[Continuations]
    failures: dict[Request, Failure]
    lost_blocks: dict[int, Failure]
    retry_count: int
    seconds: float
    swapped_block_count: int = 0
    swap_s: float = 0.0
    proposals: Mapping[Sample, Proposal] = MappingProxyType({})
    sampling_s: float = 0.0


def halves(items: Sequence[ItemT]) -> tuple[Sequence[ItemT], Sequence[ItemT]] | None:
    """Returns the two halves of a sequence; None for fewer than two items."""
    middle = len(items) // 2
    return (items[:middle], items[middle:]) if middle else None


def layout_of(parts: Sequence[Part], cache: KVCache) -> ForwardBatch:
    """Lays parts out on the host."""
    chunks = [
        Chunk(
            part.tokens,
            part.start,
            part.tables,
            needs_logits=True,
            begun_with=part.sample.begun_with,
            needs_all_logits=part.row_count > 1,
            adapter=part.sample.request.adapter,
        )
        for part in parts
    ]
    return build_batch(chunks, groups=cache.spec.groups)


def prompt_logprobs(parts: Sequence[Part], logits: torch.Tensor, are_finite: Sequence[int]) -> list[PromptLogprobs]:
    """Returns, for each scored prompt part, the logprobs of the token after each of its tokens."""
    found, row = [], 0
    for part in parts:
        is_prompt = part.needs_all_logits and part.sample.scored is None
        if is_prompt and all(are_finite[row : row + part.row_count]):
            request, position = part.sample.request, part.start + 1
            targets = request.prompt[position : position + len(part.tokens)]
            counts = [request.sampling.prompt_logprobs or 0] * len(targets)
            found.append(PromptLogprobs(request, position, rank(logits[row : row + len(targets)], counts).of(targets)))
        row += part.row_count
    return found


def candidate_logprobs(parts: Sequence[Part], logits: torch.Tensor) -> list[CandidateLogprobs]:
    """Returns, for each part of a candidate, the logprobs of the candidate tokens after its tokens."""
    found, end = [], 0
    for part in parts:
        first, end = end, end + part.row_count
        scored = part.sample.scored
        if scored is not None and part.needs_all_logits:
            skipped = max(0, scored.start - 1 - part.start)  # rows before the row of the first candidate token
            position = part.start + skipped + 1
            wanted = scored.tokens[position - scored.start :][: end - first - skipped]
            rows = logits[first + skipped : end].log_softmax(dim=-1)
            index = torch.tensor(wanted, device=rows.device).unsqueeze(1)
            found.append(CandidateLogprobs(part.sample, position, rows.gather(1, index).flatten().tolist()))
    return found


def continuations(parts: Sequence[Part], logits: torch.Tensor) -> list[Continuations]:
    """Returns the likeliest next tokens of beams."""
    found, end = [], 0
    for part in parts:
        end += part.row_count
        beam = part.sample.beam
        if beam is not None and part.is_continued:
            told = likeliest(logits[end - 1], beam.continuation_count)
            found.append(Continuations(part.sample, told))
    return found


def rows_of(places: Sequence[Row]) -> torch.Tensor:
    """Returns these rows as one tensor, without a copy if they are all rows of one tensor in order."""
    first = places[0].logits
    if len(places) == len(first) and all(row.logits is first and row.number == i for i, row in enumerate(places)):
        return first
    return torch.stack([row.logits[row.number] for row in places])


def token_halves(parts: Sequence[Part]) -> tuple[list[Part], list[Part]] | None:
    """Divides the parts' tokens into two halves. The middle part is cut in two. None for fewer than two tokens."""
    middle = sum(len(part.tokens) for part in parts) // 2
    if not middle:
        return None
    left: list[Part] = []
    right: list[Part] = []
    for part in parts:
        cut = min(len(part.tokens), max(middle, 0))
        if cut:
            left.append(part._replace(tokens=part.tokens[:cut]))
        if cut < len(part.tokens):
            right.append(part._replace(start=part.start + cut, tokens=part.tokens[cut:]))
        middle -= cut
    return left, right
