"""Encoding of text as tokens, and decoding of tokens to text, also piece by piece."""

from __future__ import annotations

import codecs
import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer

from quire_worker.model.checkpoint import CheckpointError
from quire_worker.model.conversation import SIGN, Conversation, chat_template_of, sign
from quire_worker.model.spelling import REPLACEMENT, Spelling

_CHARACTER_BYTES_MAX = 4  # most bytes of a character in UTF-8
CONTEXT_TOKENS = 4  # number of a text's last tokens that may affect the next token's bytes
_REASON_CHARACTERS_MAX = 300  # longest part of transformers' message that an error quotes


class TokenizerError(Exception):
    """The tokenizer failed on a text or on tokens. The message names the kind of error, and no part of the text."""


@contextmanager
def named() -> Iterator[None]:
    """Turns the library's errors into TokenizerError, also Rust panics, which are not of class `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer raised {type(error).__name__}") from None


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        chat_template: the checkpoint's chat template.
        special: ids of the special tokens (they have no text), by name.
        special_ids: the same ids as a set.
        keeps_special: see `__init__`.
    """

    def __init__(self, folder: Path | str, *, keeps_special: bool = False) -> None:
        """Reads the tokenizer from the folder. Nothing is downloaded, and no code of the checkpoint runs.

        Args:
            folder: the checkpoint's folder.
            keeps_special: the default for conversations: True if a special token's name inside a text becomes the
                special token, False if it becomes ordinary text.

        Raises:
            CheckpointError: the folder has no tokenizer, or one that cannot be read.
        """
        if not Path(folder).is_dir():  # transformers would take the path for a model's id
            raise CheckpointError(f"there is no folder {folder}")
        try:
            wrapped = AutoTokenizer.from_pretrained(Path(folder), local_files_only=True, trust_remote_code=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # each format raises its own exceptions, and the Rust library may panic
            why = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX] or type(error).__name__
            raise CheckpointError(f"no usable tokenizer in {folder}: {why}") from error
        backend = getattr(wrapped, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise CheckpointError(f"the tokenizer in {folder} ({type(wrapped).__name__}) has no tokenizer.json")
        backend.no_truncation()  # a prompt that is too long is refused with its true length, never cut
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template_of(wrapped, Path(folder))
        self._spelling = Spelling(backend)
        self.special = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self.special_ids = frozenset(self.special.values())
        self.keeps_special = keeps_special
        self._signed = tuple(name for name in self.special if name and not name.isspace())

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens, added tokens included. The model's vocabulary may be larger, for padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of each token, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """Returns the tokenizer as JSON, in the library's format."""
        with named():
            return self._backend.to_str()

    def encode(self, text: str) -> list[int]:
        """Returns token ids, with the special tokens that the checkpoint puts around a text (often one at the start).

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with named():
            return _ids(self._backend, text, special=True)

    def encode_continuation(self, text: str) -> list[int]:
        """Returns token ids of a text that follows other text: without the checkpoint's special tokens around it.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with named():
            return _ids(self._backend, text, special=False)

    def sign(self, conversation: Conversation) -> Conversation:
        """Returns a conversation with `SIGN` inside the names of special tokens; see `encode_written`."""
        return sign(conversation, self._signed)

    def encode_written(self, text: str) -> list[int]:
        """Returns token ids of a signed conversation after the chat template has rendered it.

        Only special tokens that the template writes become special tokens. A special token's name in a caller's text is
        cut at its sign, and the parts are encoded separately.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        first, *rest = text.split(SIGN) if self._signed else [text]
        tokens = self.encode_continuation(first)
        with named():
            for part in filter(None, rest):  # encoded after "\n", because many tokenizers add a space to a text's start
                before, behind = (_ids(self._backend, f"\n{each}", special=False) for each in ("", part))
                is_behind = behind[: len(before)] == before
                tokens += behind[len(before) :] if is_behind else _ids(self._backend, part, special=False)
        return tokens

    def surrounded(self, tokens: list[int]) -> list[int]:
        """Returns tokens with the special tokens that the checkpoint puts around a text.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with named():
            inner, outer = (_ids(self._backend, "a", special=special) for special in (False, True))
        place = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), len(outer))
        return [*outer[:place], *tokens, *outer[place + len(inner) :]]

    def word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the tokens of each word, and the tokens of the word after a space if they differ.

        As in vLLM, the second form counts only if it has the same number of tokens and a different first token.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain, spaced = (tuple(self.encode_continuation(before + word.lstrip())) for before in ("", " "))
            found |= dict.fromkeys(each for each in (plain,) if each)
            if plain and len(plain) == len(spaced) and plain[0] != spaced[0]:
                found[spaced] = None
        return list(found)

    def decode(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        """Returns the text of tokens, with special tokens only if `keeps_special`. Unknown ids have no text.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        if not tokens:  # some decoders of the library panic at an empty text
            return ""
        with named():
            return self._backend.decode(list(tokens), skip_special_tokens=not keeps_special)

    def written(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with the names of special tokens, and without an incomplete last character.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with named():
            known = [token for token in tokens if self._backend.id_to_token(token) is not None]
            if not self._spelling.is_separate:
                return self.decode(known, keeps_special=True)
            data = b"".join(map(self._spelling.spell, known[1:]))
            if known:
                data = self._spelling.spell_behind((), known[0]) + data
            return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each single token.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        with named():
            return [self._spelling.spell(token) for token in tokens]

    def spell_in_text(
        self, tokens: Sequence[int], text: Sequence[int], places: Sequence[int], *, keeps_special: bool = False
    ) -> list[bytes]:
        """Returns the bytes that each token adds to a text.

        Args:
            tokens: the tokens, in any order.
            text: the tokens of the text.
            places: for each of `tokens`, how many tokens of the text are before it.
            keeps_special: whether the text has the names of special tokens. A special token's bytes are its name in any
                case.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        before: dict[int, tuple[int, ...]] = {}
        wanted, tail = set(places), deque[int](maxlen=CONTEXT_TOKENS)
        for place, token in enumerate([*text, 0]):
            if place in wanted:
                before[place] = tuple(tail)
            if self.is_visible(token, keeps_special=keeps_special):
                tail.append(token)
        hidden = frozenset[int]() if keeps_special else self.special_ids
        spell, behind = self._spelling.spell, self._spelling.spell_behind
        with named():
            return [
                spell(token) if token in hidden else behind(before[place], token)
                for token, place in zip(tokens, places, strict=True)
            ]

    def is_settled(self, text: Sequence[int], *, keeps_special: bool = False) -> bool:
        """Returns whether each token after this text has the same bytes as `spell` returns."""
        is_visible = functools.partial(self.is_visible, keeps_special=keeps_special)
        return self._spelling.is_separate and (self._spelling.is_same_at_start or any(map(is_visible, text)))

    def is_visible(self, token: int, *, keeps_special: bool = False) -> bool:
        """Returns whether a token is part of a text: it is known, and not special unless special tokens are kept."""
        return (keeps_special or token not in self.special_ids) and self._backend.id_to_token(token) is not None

    def new_stream(self, after: Sequence[int] = (), *, keeps_special: bool = False) -> StreamDecoder:
        """Returns a decoder for one sample's tokens.

        Args:
            after: tokens of the prompt; the text begins after them.
            keeps_special: whether the text has the names of special tokens.
        """
        kind = StreamDecoder if self._spelling.is_separate else WindowDecoder
        return kind(self, self._spelling, after, keeps_special=keeps_special)


def _ids(backend: tokenizers.Tokenizer, text: str, *, special: bool) -> list[int]:
    """Returns token ids. Only this call of the library releases the interpreter lock and skips offsets."""
    return backend.encode_batch_fast([text], add_special_tokens=special)[0].ids


class StreamDecoder:
    """Decodes tokens as they come. The pieces together are the text that the tokens have after the prompt's tokens.

    A piece ends with a whole character. Up to three bytes that another token may complete are pending. Bytes that can
    never become a character are U+FFFD at once. The cost of a push depends only on its own tokens.

    With byte fallback, the library decodes a whole run of bytes to U+FFFD if one byte belongs to no character. This
    decoder keeps the valid characters of such a run, because a stream cannot take them back.

    `push` and `flush` raise TokenizerError if the tokenizer fails. The stream must not be used afterwards.

    Attributes:
        tokenizer: the tokenizer of its tokens.
        keeps_special: whether the text has the names of special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, spelling: Spelling, after: Sequence[int], *, keeps_special: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.keeps_special = keeps_special
        self._hidden = frozenset[int]() if keeps_special else tokenizer.special_ids
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(after)
        self._is_first = not tail
        if tail:  # the prompt may end inside a character, and the first tokens complete it
            self._decoder.decode(b"".join(map(spelling.spell, tail)))

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that they complete, including pending bytes of earlier tokens."""
        hidden, spell = self._hidden, self._spelling.spell
        with named():
            if self._is_first:
                tokens = [each for each in tokens if self._is_visible(each)]
                if not tokens:
                    return ""
                self._is_first = False
                first, *rest = tokens
                data = self._spelling.spell_behind((), first) + b"".join(map(spell, rest))
            else:
                data = b"".join([spell(token) for token in tokens if token not in hidden])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the text. Returns U+FFFD for pending bytes, or "" if there are none."""
        return self._decoder.decode(b"", True)

    def _is_visible(self, token: int) -> bool:
        return self.tokenizer.is_visible(token, keeps_special=self.keeps_special)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """Returns the last tokens that are part of the text."""
        return list(itertools.islice(filter(self._is_visible, reversed(tokens)), CONTEXT_TOKENS))[::-1]


class WindowDecoder(StreamDecoder):
    """Decodes for tokenizers with decoders that look at more than one token, such as `BPEDecoder`.

    1. A token is *pending* while the text so far ends within a character, but at most for a few tokens.
    2. New text is handed out. Its tokens stay as the *context* for decoding the tokens that follow.
    3. `flush` hands out the pending text.
    """

    def __init__(
        self, tokenizer: Tokenizer, spelling: Spelling, after: Sequence[int], *, keeps_special: bool = False
    ) -> None:
        super().__init__(tokenizer, spelling, after, keeps_special=keeps_special)
        self._tokens = self._tail(after)  # the context, then pending tokens
        self._context_count = len(self._tokens)
        self._context_text = self._decoded()

    def push(self, tokens: Iterable[int]) -> str:
        # One token at a time: the library decodes a run of broken bytes to a text that depends on the whole run.
        return "".join([self._pushed(token) for token in tokens if self._is_visible(token)])

    def _pushed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decoded()
        is_pending = text.endswith(REPLACEMENT) and len(self._tokens) - self._context_count < _CHARACTER_BYTES_MAX
        return "" if is_pending else self._hand_out(text)

    def flush(self) -> str:
        return self._hand_out(self._decoded())

    def _hand_out(self, text: str) -> str:
        is_longer = text.startswith(self._context_text)  # otherwise `text` completes a character that the prompt began
        known = self._context_text if is_longer else self._context_text.rstrip(REPLACEMENT)
        piece = text[len(known) :]
        if piece:
            del self._tokens[: self._context_count]
            self._context_count = len(self._tokens)
            self._context_text = self._decoded()
        return piece

    def _decoded(self) -> str:
        return self.tokenizer.decode(self._tokens, keeps_special=self.keeps_special)
