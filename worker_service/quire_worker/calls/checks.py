"""Checks of every call before the engine gets it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import structlog
from quire.errors import QuireError, Reason
from quire.protocol.limits import BREAKPOINTS_MAX, KEEP_MS_MAX, NAMESPACE_BYTES_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb

from quire_worker.calls.structures import StructureCompiler
from quire_worker.calls.texts import Texts
from quire_worker.engine import Engine
from quire_worker.execution.failures import TOKENIZER
from quire_worker.model.no_tokenizer import NoTokenizer, NoTokenizerError
from quire_worker.model.tokenizer import TokenizerError
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.slots import CacheWish

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

# The longest interval between messages of an answer. In a longer interval, more tokens could arrive than fit into a
# message.
INTERVAL_MS_MAX = 60_000
SALT_BYTES_MAX = 128
SECRET_BYTES = 16  # bytes of the random salt of a request that is not stored
# most logprob values in one message, of a prompt's tokens and their likeliest alternatives; at most 7 bytes each
PROMPT_LOGPROB_VALUES_MAX = 1 << 18
HELD_LOGPROB_VALUES_MAX = 1 << 21  # most logprob values of a request that are held until the request's end; 16 MiB
HELD_CHARACTERS_MAX = 16 << 20  # characters of all texts of a request together; each text begins with the prompt
SPELLED_MAX = 1 << 16  # most tokens in one call of Detokenize


def check_logprobs(sampling: SamplingParams, prompt_token_count: int, longest: int) -> None:
    """Refuses a request with too many logprobs.

    The prompt may have as many logprobs as fit a message. The samples may have as many as the worker keeps until all
    samples have ended.

    Args:
        sampling: the parameters of the request.
        prompt_token_count: the number of tokens in its prompt.
        longest: the most tokens of a sequence.

    Raises:
        QuireError: BAD_PARAMETER, there would be too many logprobs.
    """
    top_count = sampling.prompt_logprobs
    count = 0 if top_count is None else prompt_token_count * (1 + top_count)
    if count > PROMPT_LOGPROB_VALUES_MAX:
        what = (
            f"prompt_logprobs would have {count:,} values, but an answer may have at most {PROMPT_LOGPROB_VALUES_MAX:,}"
        )
        message = f"{what}: ask for fewer, or send a shorter prompt"
        raise QuireError.of(Reason.BAD_PARAMETER, message, field="prompt_logprobs")
    if sampling.logprobs is None or not sampling.is_best_of:
        return
    samples, each = sampling.sample_count, 1 + sampling.logprobs
    length = min(sampling.max_tokens, longest - prompt_token_count)
    count = samples * length * each
    if count > HELD_LOGPROB_VALUES_MAX:
        what = f"best_of: {samples} samples of {length:,} tokens with {each} logprobs each have {count:,} values"
        how = f"a request may have at most {HELD_LOGPROB_VALUES_MAX:,}: ask for fewer samples, tokens or logprobs"
        raise QuireError.of(Reason.BAD_PARAMETER, f"{what}, but {how}", field="best_of")


def check_echo(sampling: SamplingParams, echo: str) -> None:
    """Refuses a request that needs too much memory, because each of its samples keeps a copy of the prompt.

    Raises:
        QuireError: BAD_PARAMETER, the texts would be too long.
    """
    samples = sampling.sample_count
    count = samples * len(echo)
    if count > HELD_CHARACTERS_MAX:
        what = f"echo of {len(echo):,} characters in {samples} samples makes {count:,}, but a request may have at most"
        message = f"{what} {HELD_CHARACTERS_MAX:,}: ask for fewer samples, or leave echo out"
        raise QuireError.of(Reason.BAD_PARAMETER, message, field="echo")


class Given(Protocol):
    """A message that has a text or its tokens, in a oneof group with a name that the caller knows."""

    @property
    def text(self) -> str:
        """Returns the text; empty if there is none."""

    @property
    def tokens(self) -> Any:
        """Returns the message that has the tokens."""

    def WhichOneof(self, name: Any, /) -> Any:
        """Returns the name of the field that is set."""


class Checks:
    """Checks the calls of one engine. `trusts_templates` says whether callers may send chat templates.

    Attributes:
        draining: whether calls are refused because the worker shuts down.
    """

    def __init__(self, engine: Engine, *, trusts_templates: bool = False) -> None:
        self.draining = False
        self._engine = engine
        model = engine.model
        self._structures = StructureCompiler(engine.tokenizer, model.vocab_size, list(model.eos_token_ids))
        self._texts = Texts(engine.tokenizer, trusts_templates=trusts_templates)

    async def warm(self) -> None:
        """Starts the process for conversations before the first conversation comes."""
        await self._texts.warm()

    def close(self) -> None:
        """Ends running computations on callers' texts and structures."""
        self._texts.close()
        self._structures.close()

    def begin(self, request_id: str) -> str:
        """Returns the id of a call; a new id if the caller gave none.

        Raises:
            QuireError: DRAINING; MALFORMED, the id is too long.
        """
        self.check_serving()
        require(
            len(request_id) <= REQUEST_ID_CHARACTERS_MAX,
            f"request_id must have at most {REQUEST_ID_CHARACTERS_MAX} characters, not {len(request_id):,}",
        )
        return request_id or uuid.uuid4().hex

    def check_serving(self) -> None:
        """Refuses calls while the worker shuts down.

        Raises:
            QuireError: DRAINING.
        """
        if self.draining:
            raise QuireError.of(Reason.DRAINING, "the worker is shutting down")

    async def prompt(self, given: Given, request_id: str) -> list[int]:
        """Returns the tokens of a prompt. A text gets the checkpoint's special tokens.

        Raises:
            QuireError: the prompt is missing, empty or too long, or has tokens that the model does not know.
        """
        return await self._tokens(given, "prompt", request_id, self._engine.tokenizer.encode)

    async def echo(self, given: Given, request_id: str, prompt: list[int]) -> str:
        """Returns the text of a prompt. If it came as tokens, special tokens are written out."""
        if given.WhichOneof("prompt") == "text":
            return given.text
        text = await self._computed(request_id, self._texts.written(prompt))
        self.check_serving()  # The worker may have begun to drain during the computation.
        return text

    async def continuation(self, given: Given, request_id: str) -> list[int]:
        """Returns the tokens of a text that continues other tokens.

        Raises:
            QuireError: the continuation is missing, empty or too long, or has tokens that the model does not know.
        """
        encode = self._engine.tokenizer.encode_continuation
        return await self._tokens(given, "continuation", request_id, encode)

    async def _tokens(self, given: Given, name: str, request_id: str, encode: Callable[[str], list[int]]) -> list[int]:
        kind = given.WhichOneof(name)
        require(kind is not None, f"{name} is missing: give text or tokens")
        if kind == "tokens":
            self._check_length(name, len(given.tokens.ids))  # checked before the ids are copied to a list
            tokens = list(given.tokens.ids)
        else:
            tokens = await self._computed(request_id, self._texts.encoded(given.text, encode))
            self.check_serving()  # The worker may have begun to drain during the computation.
        if not tokens:
            raise QuireError.of(Reason.PROMPT_EMPTY, f"the {name} has no token: give at least one")
        self._check_length(name, len(tokens))
        self._check_vocabulary(tokens)
        return tokens

    def _check_length(self, name: str, token_count: int) -> None:
        longest = self._engine.scheduler.sequence_tokens_max - 1  # leaves capacity for one more token
        if token_count > longest:
            message = f"the {name} has {token_count} tokens, but model and pool allow at most {longest}"
            raise QuireError.of(Reason.PROMPT_TOO_LONG, message, field=name)

    async def tokenized(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Returns the tokens of a text or a conversation.

        Raises:
            QuireError: the input is missing, too large, or refused by the chat template.
        """
        kind = request.WhichOneof("input")
        require(kind is not None, "input is missing: give text or a conversation")
        if kind == "text":
            is_bare = request.HasField("add_special_tokens") and not request.add_special_tokens
            return await self._computed("", self._texts.tokenized(request.text, is_bare=is_bare))
        asked = request.conversation
        return await self._computed("", self._texts.conversation(asked, surround=request.add_special_tokens))

    async def spelled(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Returns the bytes of each token.

        Raises:
            QuireError: there are too many tokens, their places are wrong, or the tokenizer failed.
        """
        count, text_count = len(request.token_ids), len(request.text_ids)
        if count + text_count > SPELLED_MAX:
            what = "token_ids and text_ids together" if text_count else "token_ids"
            message = f"{what} must have at most {SPELLED_MAX:,} entries, not {count + text_count:,}"
            raise QuireError.of(Reason.LIMIT, message)
        if not request.places:
            require(not text_count, "text_ids without places: give a place for each of token_ids")
        else:
            require(len(request.places) == count, f"places must be as many as token_ids, {count:,}")
            require(max(request.places) <= text_count, f"a place must be at most the count of text_ids, {text_count:,}")
        return await self._computed("", self._texts.spelled(request))

    async def message(self, make: Callable[[], ResultT], size: int) -> ResultT:
        """Returns an answer of `size` tokens. A long answer is built on a thread, so that other calls do not wait."""
        return await self._texts.message(make, size)

    async def matcher(self, sampling: SamplingParams, namespace: str) -> Matcher | None:
        """Returns the compiled structure of a text; None if the text is free.

        Raises:
            QuireError: it cannot be compiled, or there are stop texts and no tokenizer to find them.
        """
        if sampling.stop and isinstance(self._engine.tokenizer, NoTokenizer):
            raise QuireError.of(Reason.NOT_SUPPORTED, str(NoTokenizerError()), field="stop")
        return None if sampling.structure is None else await self._structures.compile(sampling.structure, namespace)

    async def with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """Returns sampling parameters with tokenized bad words.

        Raises:
            QuireError: there is no tokenizer, or it failed.
        """
        if not sampling.bad_words:
            return sampling
        found = await self._computed("", self._texts.bad_word_ids(sampling.bad_words))
        return replace(sampling, bad_word_ids=tuple(found))

    async def _computed(self, request_id: str, computing: Awaitable[ResultT]) -> ResultT:
        """Returns the result of a computation on a text. Turns errors of the tokenizer into the call's error."""
        try:
            return await computing
        except NoTokenizerError as error:
            raise QuireError.of(Reason.NOT_SUPPORTED, str(error)) from None
        except TokenizerError as error:
            log.warning("tokenizer failed", error=str(error))
            raise self._engine.failed(request_id, TOKENIZER) from None

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        vocabulary = self._engine.model.vocab_size
        if max(tokens) >= vocabulary:
            unknown = next(token for token in tokens if token >= vocabulary)
            raise QuireError.of(
                Reason.UNKNOWN_TOKEN, f"token id {unknown} must be below the vocabulary size, {vocabulary}"
            )


def check_namespace(namespace: str, permissions: Permissions) -> None:
    """Refuses a namespace that is too long, or that the caller may not use.

    Raises:
        QuireError: MALFORMED; NAMESPACE_FORBIDDEN.
    """
    byte_count = len(namespace.encode())
    what = f"namespace must have at most {NAMESPACE_BYTES_MAX} bytes, not {byte_count:,}"
    require(byte_count <= NAMESPACE_BYTES_MAX, what)
    if not permissions.may_use(namespace):
        raise QuireError.of(Reason.NAMESPACE_FORBIDDEN, "the certificate does not permit this namespace")


def wish_of(cache: pb.CachePolicy) -> CacheWish:
    """Returns what the cache should do with the blocks of a request.

    Raises:
        QuireError: BAD_PARAMETER.
    """
    count, rising = len(cache.breakpoints), [0, *cache.breakpoints]
    if cache.keep_ms > KEEP_MS_MAX:
        text = f"keep_ms must be at most {KEEP_MS_MAX:,}, a day, not {cache.keep_ms:,}"
        raise QuireError.of(Reason.BAD_PARAMETER, text, field="cache.keep_ms")
    if count > BREAKPOINTS_MAX or any(later <= earlier for earlier, later in pairwise(rising)):
        text = f"breakpoints must be at most {BREAKPOINTS_MAX} rising token counts, not {list(rising[1:6])}"
        raise QuireError.of(Reason.BAD_PARAMETER, text, field="cache.breakpoints")
    if cache.no_store and cache.keep_ms:
        text = "no_store cannot be combined with keep_ms: leave one of them out"
        raise QuireError.of(Reason.BAD_PARAMETER, text, field="cache.no_store")
    return CacheWish(cache.keep_ms, tuple(cache.breakpoints), secrets.token_hex(SECRET_BYTES) if cache.no_store else "")


def require(condition: bool, message: str) -> None:
    """Refuses a call unless a condition holds.

    Raises:
        QuireError: MALFORMED, with the message.
    """
    if not condition:
        raise QuireError.of(Reason.MALFORMED, message)
