"""Computations on callers' texts, outside of the event loop and within limits.

Long texts and long lists of tokens have a separate thread, so that they hardly delay short texts. Chat templates are
programs, so they run in a process (`aside/job_processes.py`): short conversations at once, long conversations one after
another. The thread that computes the tokens also builds the answer from them. As Python numbers, the tokens would take
ten times as much memory, and building the answer later would need the thread again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
from quire.errors import QuireError, Reason
from quire.v1 import worker_pb2 as pb

from quire_worker.aside.job_processes import JobLimits, JobProcesses, OverLimitError
from quire_worker.aside.threads import Threads
from quire_worker.model.conversation import Conversation, ConversationError, read_conversation
from quire_worker.model.no_tokenizer import NoTokenizer, NoTokenizerError
from quire_worker.model.tokenizer import Tokenizer, TokenizerError

log = structlog.get_logger()

TEXT_BYTES_MAX = 1 << 20
SHORT_MAX = 16 << 10  # texts and lists of tokens up to this length take at most a few milliseconds
# Limit of a short conversation: a template that loops over all messages for each message takes 0.1 s for this size.
SHORT_CONVERSATION_BYTES_MAX = 64 << 10
WAITING_MAX = 64  # most long texts that wait
ANSWER_TOKENS_MAX = 16 << 10  # shorter answers are built on the event loop, in at most a few milliseconds
ResultT = TypeVar("ResultT")
TEMPLATE_S_MAX = 10  # limit for one conversation, including its wait for other conversations
LIMITS = JobLimits(memory_bytes=128 << 20, cpu_s=1, wall_s=TEMPLATE_S_MAX)


class Texts:
    """Encodes texts and decodes tokens with one tokenizer, and renders conversations. Only the event loop uses this.

    All methods raise NoTokenizerError if there is no tokenizer, TokenizerError if it fails, and QuireError QUEUE_FULL
    if too many texts wait.
    """

    def __init__(self, tokenizer: Tokenizer, *, trusts_templates: bool = False) -> None:
        """Starts no process yet. `trusts_templates` says whether conversations may have their own chat templates."""
        self._trusts_templates = trusts_templates
        self._tokenizer = tokenizer
        self._short = Threads("tokenized", 2, 1 << 14)
        self._long = Threads("tokenized", 1, WAITING_MAX)
        template = tokenizer.chat_template
        about = {"templates": template.sources, "variables": template.variables}
        self._processes = JobProcesses("templates", lambda: about, LIMITS)
        self._numbers = itertools.count()

    async def warm(self) -> None:
        """Starts the process that renders conversations, if there can be chat templates."""
        if self._tokenizer.chat_template.sources or self._trusts_templates:
            try:
                await self._processes.warm()
            except OSError as error:  # A failure here is not final: the first conversation tries again.
                log.error("the process for chat templates failed", error=str(error))

    def close(self) -> None:
        """Ends the process that renders conversations."""
        self._processes.close()

    async def encoded(self, text: str, encode: Callable[[str], ResultT]) -> ResultT:
        """Returns the tokens of a text, in the form that `encode` returns.

        Raises:
            QuireError: TOO_LARGE, the text is too long.
        """
        size = len(text.encode())
        if size > TEXT_BYTES_MAX:
            raise QuireError.of(
                Reason.TOO_LARGE, f"text must have at most {TEXT_BYTES_MAX:,} bytes, not {size:,}", field="text"
            )
        return await self._threads(size).run(encode, text)

    async def written(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens. Special tokens are written out."""
        return await self._threads(len(tokens)).run(self._tokenizer.written, tokens)

    async def spelled(self, asked: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Returns the bytes of each token, by itself or in a text."""
        return await self._threads(len(asked.token_ids) + len(asked.text_ids)).run(self._spelled, asked)

    def _spelled(self, asked: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        tokens, text, keeps_special = list(asked.token_ids), list(asked.text_ids), asked.keeps_special
        is_settled = self._tokenizer.is_settled(text, keeps_special=keeps_special)
        if not asked.places:
            return pb.DetokenizeResponse(texts=self._tokenizer.spell(tokens), is_settled=is_settled)
        texts = self._tokenizer.spell_in_text(tokens, text, list(asked.places), keeps_special=keeps_special)
        return pb.DetokenizeResponse(texts=texts, is_settled=is_settled)

    async def bad_word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of each word, at the beginning of a text and after a space."""
        size = sum(map(len, words))
        return await self._threads(size).run(self._tokenizer.word_ids, words)

    async def tokenized(self, text: str, *, is_bare: bool = False) -> pb.TokenizeResponse:
        """Returns the tokens of a text. `is_bare` leaves out the checkpoint's special tokens around it.

        Raises:
            QuireError: TOO_LARGE, the text is too long.
        """
        encode = self._tokenizer.encode_continuation if is_bare else self._tokenizer.encode
        return await self.encoded(text, lambda text: pb.TokenizeResponse(token_ids=encode(text)))

    async def conversation(self, given: pb.Conversation, *, surround: bool = False) -> pb.TokenizeResponse:
        """Returns the tokens of a conversation. `surround` adds the checkpoint's special tokens around its text.

        Raises:
            QuireError: TOO_LARGE; BAD_PARAMETER, it is malformed, or the chat template refuses it.
        """
        if isinstance(self._tokenizer, NoTokenizer):
            raise NoTokenizerError
        size = given.ByteSize()
        is_split = not self._tokenizer.keeps_special
        if given.HasField("split_special_tokens"):
            is_split = given.split_special_tokens
        if size > TEXT_BYTES_MAX:
            message = f"a conversation must have at most {TEXT_BYTES_MAX:,} bytes, not {size:,}"
            raise QuireError.of(Reason.TOO_LARGE, message, field="messages")
        threads = self._threads(size)
        try:
            conversation = await threads.run(self._read, given)
            if is_split:
                conversation = await threads.run(self._tokenizer.sign, conversation)
            text = await self._text_of(conversation, size)
        except ConversationError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=error.field) from None

        def encoded() -> pb.TokenizeResponse:
            tokens = (self._tokenizer.encode_written if is_split else self._tokenizer.encode_continuation)(text)
            return pb.TokenizeResponse(token_ids=self._tokenizer.surrounded(tokens) if surround else tokens)

        return await self._threads(len(text)).run(encoded)

    async def message(self, make: Callable[[], ResultT], size: int) -> ResultT:
        """Returns an answer to a caller. `size` is its number of tokens: a long answer is built on a thread."""
        return make() if size <= ANSWER_TOKENS_MAX else await self._long.run(make)

    def _read(self, given: pb.Conversation) -> Conversation:
        conversation = read_conversation(
            given.messages_json,
            given.tools_json,
            given.variables_json,
            with_generation_prompt=not given.without_generation_prompt,
        )
        if given.chat_template and not self._trusts_templates:
            what = "is not allowed: this server's operator does not permit templates of callers"
            raise ConversationError(f"chat_template {what}", "chat_template")
        if given.continue_final_message and conversation.with_generation_prompt:
            what = "cannot be combined with a generation prompt, because the answer continues the last message"
            raise ConversationError(f"continue_final_message {what}", "continue_final_message")
        return conversation._replace(continues_final=given.continue_final_message, template=given.chat_template)

    async def _text_of(self, conversation: Conversation, size: int) -> str:
        key = f"short {next(self._numbers)}" if size <= SHORT_CONVERSATION_BYTES_MAX else "long"
        try:
            found = await self._processes.run(conversation._asdict(), key=key, timeout_s=TEMPLATE_S_MAX)
        except (TimeoutError, OverLimitError):
            limits = f"{LIMITS.cpu_s} s of CPU time or {LIMITS.memory_bytes >> 20} MiB"
            message = f"the chat template needs more than {limits} for this conversation: send a shorter one"
            raise QuireError.of(Reason.TOO_LARGE, message, field="messages") from None
        except OSError as error:
            raise TokenizerError(f"the process for chat templates failed: {type(error).__name__}") from None
        if "refused" in found:
            raise ConversationError(found["refused"], found["field"])
        if "broken" in found:
            raise TokenizerError(found["broken"])
        text: str = found["text"]
        return text

    def _threads(self, size: int) -> Threads:
        return self._short if size <= SHORT_MAX else self._long
