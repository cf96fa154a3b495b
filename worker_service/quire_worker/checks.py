"""What every call of the worker is checked for before the engine hears of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import structlog
from quire.errors import QuireError, Reason
from quire.protocol.limits import NAMESPACE_BYTES_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb

from quire_worker.engine import Engine
from quire_worker.execution.failures import TOKENIZER
from quire_worker.model.conversation import ConversationError, read_conversation
from quire_worker.model.tokenizer import NoTokenizer, NoTokenizerError, TokenizerError
from quire_worker.sampling.grammar import Grammars, Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.structures import StructureCompiler

log = structlog.get_logger()

InputT = TypeVar("InputT")

TEXT_BYTES_MAX = 1 << 20
INTERVAL_MS_MAX = 60_000  # between messages of an answer, in which more tokens are to be expected than in one
SPELLED_MAX = 1 << 16  # tokens of one call of Detokenize


class Given(Protocol):
    """A message that carries a text or its tokens, in a group whose name the reader knows."""

    @property
    def text(self) -> str:
        """Returns the text, empty where there is none."""

    @property
    def tokens(self) -> Any:
        """Returns the message of the tokens."""

    def WhichOneof(self, name: Any, /) -> Any:
        """Returns which of them it carries."""


class Checks:
    """Checks calls of one engine.

    Attributes:
        draining: whether calls are refused because the worker shuts down.
    """

    def __init__(self, engine: Engine) -> None:
        self.draining = False
        self._engine = engine
        model, spell = engine.model, engine.tokenizer.to_json
        self._structures = StructureCompiler(Grammars(spell, model.vocab_size, model.eos_token_ids))

    def begin(self, request_id: str) -> str:
        """Returns the id of a call, a new one where its caller gave none.

        Raises:
            QuireError: DRAINING; MALFORMED, the id is too long.
        """
        self.check_serving()
        require(len(request_id) <= REQUEST_ID_CHARACTERS_MAX, "request_id must be at most 64 characters")
        return request_id or uuid.uuid4().hex

    def check_serving(self) -> None:
        """Refuses calls while the worker shuts down.

        Raises:
            QuireError: DRAINING.
        """
        if self.draining:
            raise QuireError.of(Reason.DRAINING, "the worker is shutting down")

    async def prompt(self, given: Given, request_id: str) -> list[int]:
        """Returns the tokens of a prompt, with those that the checkpoint puts around a text.

        Raises:
            QuireError: it is missing, empty, too long, or of tokens that the model does not know.
        """
        tokens = await self._tokens(given, "prompt", request_id, self._engine.tokenizer.encode)
        longest = self._engine.scheduler.sequence_tokens_max - 1  # one token has to follow
        if len(tokens) > longest:
            raise QuireError.of(
                Reason.PROMPT_TOO_LONG, f"the prompt has {len(tokens)} tokens; model and pool hold {longest}"
            )
        self._check_vocabulary(tokens)
        return tokens

    async def echo(self, given: Given, request_id: str, prompt: list[int]) -> str:
        """Returns the prompt's text: what came where text came, else its tokens, special ones written out."""
        if given.WhichOneof("prompt") == "text":
            return given.text
        try:
            text = await asyncio.to_thread(self._engine.tokenizer.written, prompt)
        except TokenizerError as error:
            log.warning("decoding failed", error=str(error))
            raise self._engine.failed(request_id, TOKENIZER) from None
        self.check_serving()  # also after the tokenizer's time
        return text

    async def continuation(self, given: Given, request_id: str) -> list[int]:
        """Returns the tokens of what comes after others.

        Raises:
            QuireError: it is missing, empty, or of tokens that the model does not know.
        """
        encode = self._engine.tokenizer.encode_continuation
        tokens = await self._tokens(given, "continuation", request_id, encode)
        self._check_vocabulary(tokens)
        return tokens

    async def _tokens(self, given: Given, name: str, request_id: str, encode: Callable[[str], list[int]]) -> list[int]:
        kind = given.WhichOneof(name)
        require(kind is not None, f"{name} is missing: give text or tokens")
        if kind == "tokens":
            tokens = list(given.tokens.ids)
        else:
            tokens = await self._encode(request_id, len(given.text.encode()), encode, given.text)
            self.check_serving()  # also after the tokenizer's time
        if not tokens:
            raise QuireError.of(Reason.PROMPT_EMPTY, f"the {name} has no token")
        return tokens

    async def tokenized(self, request: pb.TokenizeRequest) -> list[int]:
        """Returns the tokens of a text or a conversation.

        Raises:
            QuireError: it is missing, too large, or refused by the chat template.
        """
        kind = request.WhichOneof("input")
        require(kind is not None, "input is missing: give text or a conversation")
        tokenizer, size = self._engine.tokenizer, request.ByteSize()
        if kind == "text":
            return await self._encode("", size, tokenizer.encode, request.text)
        given = request.conversation
        try:
            conversation = read_conversation(
                given.messages_json,
                given.tools_json,
                given.variables_json,
                with_generation_prompt=not given.without_generation_prompt,
            )
            return await self._encode("", size, tokenizer.encode_conversation, conversation)
        except ConversationError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=error.field) from None

    def spelled(self, request: pb.DetokenizeRequest) -> list[bytes]:
        """Returns the bytes of each token.

        Raises:
            QuireError: there are too many, or the tokenizer failed.
        """
        if len(request.token_ids) > SPELLED_MAX:
            raise QuireError.of(Reason.LIMIT, f"at most {SPELLED_MAX} tokens at a time")
        try:
            return self._engine.tokenizer.spell(request.token_ids)
        except NoTokenizerError as error:
            raise QuireError.of(Reason.NOT_SUPPORTED, str(error)) from None
        except TokenizerError as error:
            log.warning("decoding failed", error=str(error))
            raise self._engine.failed("", TOKENIZER) from None

    async def matcher(self, sampling: SamplingParams) -> Matcher | None:
        """Returns what a text has to be, compiled; None if it may be anything.

        Raises:
            QuireError: it cannot be compiled; there are texts to stop at, and no tokenizer to find them with.
        """
        if sampling.stop and isinstance(self._engine.tokenizer, NoTokenizer):
            raise QuireError.of(Reason.NOT_SUPPORTED, str(NoTokenizerError()), field="stop")
        return None if sampling.structure is None else await self._structures.compile(sampling.structure)

    async def _encode(
        self, request_id: str, byte_count: int, encode: Callable[[InputT], list[int]], given: InputT
    ) -> list[int]:
        """Encodes on another thread: a long text takes a while, and others are streaming."""
        if byte_count > TEXT_BYTES_MAX:
            raise QuireError.of(Reason.TOO_LARGE, f"text must be at most {TEXT_BYTES_MAX} bytes", field="text")
        try:
            return await asyncio.to_thread(encode, given)
        except NoTokenizerError as error:
            raise QuireError.of(Reason.NOT_SUPPORTED, str(error)) from None
        except TokenizerError as error:
            log.warning("encoding failed", error=str(error))
            raise self._engine.failed(request_id, TOKENIZER) from None

    def _check_vocabulary(self, tokens: Sequence[int]) -> None:
        vocabulary = self._engine.model.vocab_size
        unknown = next((token for token in tokens if token >= vocabulary), None)
        if unknown is not None:
            raise QuireError.of(Reason.UNKNOWN_TOKEN, f"token id {unknown} is not below the vocabulary's {vocabulary}")


def check_namespace(namespace: str, permissions: Permissions) -> None:
    """Refuses a namespace that is none, or not the caller's.

    Raises:
        QuireError: MALFORMED; NAMESPACE_FORBIDDEN.
    """
    require(len(namespace.encode()) <= NAMESPACE_BYTES_MAX, "namespace must be at most 128 bytes")
    if not permissions.may_use(namespace):
        raise QuireError.of(Reason.NAMESPACE_FORBIDDEN, "the certificate does not permit this namespace")


def require(condition: bool, message: str) -> None:
    """Refuses a call where a condition does not hold.

    Raises:
        QuireError: MALFORMED, with the message.
    """
    if not condition:
        raise QuireError.of(Reason.MALFORMED, message)
