"""Text to tokens, and tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer

from quire_worker.model.checkpoint import CheckpointError, has_tokenizer
from quire_worker.model.conversation import ChatTemplate, Conversation
from quire_worker.model.spelling import Spelling

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character (yet) are decoded to
_REASON_CHARACTERS_MAX = 300  # of what transformers says of a folder, in many lines


class TokenizerError(Exception):
    """The tokenizer failed on one text or some tokens. The message names the kind of error and nothing of the text."""


class NoTokenizerError(TokenizerError):
    """The checkpoint has no tokenizer. The message is for callers."""

    def __init__(self) -> None:
        super().__init__("this model comes without a tokenizer: give token ids")


@contextmanager
def _named() -> Iterator[None]:
    """Returns what the library raises as TokenizerError. A panic of its compiled part is no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer raised {type(error).__name__}") from None


class Tokenizer:
    """The tokenizer that a checkpoint comes with."""

    def __init__(self, folder: Path | str) -> None:
        """Reads it from the folder alone; nothing is downloaded and no code of the checkpoint runs.

        Raises:
            CheckpointError: the folder has no tokenizer, or one that cannot be read.
        """
        if not Path(folder).is_dir():  # else transformers takes it for a model's id, and asks for it
            raise CheckpointError(f"there is no folder {folder}")
        try:
            wrapped = AutoTokenizer.from_pretrained(Path(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises what its many formats happen to
            why = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX] or type(error).__name__
            raise CheckpointError(f"no usable tokenizer in {folder}: {why}") from error
        backend = getattr(wrapped, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise CheckpointError(f"the tokenizer in {folder} ({type(wrapped).__name__}) has no tokenizer.json")
        backend.no_truncation()  # a prompt that is too long is refused with its true length, never cut
        backend.no_padding()
        self._backend = backend
        self._chat_template = ChatTemplate(wrapped)
        self._spelling = Spelling(backend)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens, added ones included; the model's may be larger, for padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """Returns the whole tokenizer as its library writes it."""
        with _named():
            return self._backend.to_str()

    def encode(self, text: str) -> list[int]:
        """Returns token ids, with the special tokens that the checkpoint puts around a text (often one at the start).

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with _named():
            return self._backend.encode(text).ids

    def encode_continuation(self, text: str) -> list[int]:
        """Returns token ids of text that comes after other text: without those special tokens.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with _named():
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        """Returns token ids of a conversation, whose special tokens are those that the chat template writes.

        Raises:
            ConversationError: there is no template, or it refuses.
            TokenizerError: the tokenizer cannot do it.
        """
        text = self._chat_template.text(conversation)
        with _named():
            return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns text without special tokens. Ids outside the vocabulary have no text.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with _named():
            return self._backend.decode(list(tokens), skip_special_tokens=True)

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each token by itself.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with _named():
            return [self._spelling.spell(token) for token in tokens]

    def new_stream(self) -> StreamDecoder:
        """Returns a decoder for one sample's tokens."""
        return StreamDecoder(self, self._special_ids)


class NoTokenizer(Tokenizer):
    """What is there of a checkpoint that comes without one: prompts are token ids, and tokens have no text.

    Whatever needs more raises NoTokenizerError.
    """

    def __init__(self) -> None:
        """Reads nothing."""
        self._special_ids = frozenset()

    @property
    def vocab_size(self) -> int:
        return 0

    def to_json(self) -> str:
        raise NoTokenizerError

    def encode(self, text: str) -> list[int]:
        raise NoTokenizerError

    def encode_continuation(self, text: str) -> list[int]:
        raise NoTokenizerError

    def encode_conversation(self, conversation: Conversation) -> list[int]:
        raise NoTokenizerError

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        raise NoTokenizerError


def read_tokenizer(folder: Path | str) -> Tokenizer:
    """Reads a checkpoint's tokenizer, or finds that it comes without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    return Tokenizer(folder) if has_tokenizer(Path(folder)) else NoTokenizer()


class StreamDecoder:
    """Decodes tokens as they come. The pieces, `flush` included, concatenate to `decode` of all tokens.

    1. A token is *pending* while the text so far ends within a character: its bytes may be spread over several tokens.
    2. When the text ends with a whole character, what is new is handed out, and the tokens it came from stay as the
       *context* of those that follow: some tokenizers decode a token differently (a space less) at the start.
    3. `flush` hands out what is pending, an incomplete character as U+FFFD.

    So a push decodes a handful of tokens more than it is given, not the whole text. One exception to the equality, with
    byte-fallback tokenizers only: they decode a run of bytes that holds an invalid one to U+FFFD as a whole, which a
    stream that has handed out the run's first characters cannot take back.

    `push` and `flush` raise TokenizerError where `decode` does; the stream is over then.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._tokens: list[int] = []  # the context, then what is pending
        self._context_count = 0
        self._context_text = ""

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, which may be less or more than their own."""
        new = [token for token in tokens if token not in self._special_ids]
        if not new:
            return ""
        self._tokens += new
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._context_text):
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        """Ends the text and returns what was pending; "" if nothing was."""
        return self._hand_out(self._tokenizer.decode(self._tokens))

    def _hand_out(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        del self._tokens[: self._context_count]
        self._context_count = len(self._tokens)
        self._context_text = self._tokenizer.decode(self._tokens)
        return piece
