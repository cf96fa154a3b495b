"""Splits an answer that comes in pieces of any size into content, reasoning and calls of functions. Pure.

    1. text        is handed on at once, except an end that may be the beginning of a run of calls or of a mark
    2. arguments   a call begins with its function's name as soon as its arguments begin, and is not taken back. The
                   arguments are handed on as they come
    3. behind      after the arguments: the tail of the call, then another call of the run, or the end of the run

Text that only looks like a call stays text: an incomplete head, a function that the caller does not offer, or arguments
that are not an object. The pieces together do not depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from quire_gateway.calls.deltas import CallDelta, Delta, merged
from quire_gateway.calls.formats import AnswerPart, Elements, Format, Mark, Maybe, Slot, TextRun
from quire_gateway.calls.matching import FoundCall, Status, after_space, find

_OUTSIDE: Final = re.compile(r'[{}\[\]"]')  # the structural characters of JSON, outside of strings
_SPACE: Final = " \t\r\n"
_INSIDE: Final = re.compile(r'["\\]')


class _Json:
    """Finds the end of an object in a JSON text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Returns the index after the object; None while the object is incomplete."""
        place = 0
        if self._is_escaped and text:
            self._is_escaped, place = False, 1
        while True:
            found = (_INSIDE if self._is_in_string else _OUTSIDE).search(text, place)
            if found is None:
                return None
            place = found.end()
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif found[0] == "\\":
                self._is_escaped = place == len(text)
                place += 1
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return place


class AnswerReader:
    """Reads one answer.

    Args:
        form: the notation of calls and reasoning.
        functions: names of the functions that the model may call.
        new_id: returns the given number of random characters.
        is_reasoning: whether the answer begins within its reasoning.

    Attributes:
        call_count: calls that have begun.
        has_reasoned: whether any of the text so far was reasoning.
    """

    def __init__(
        self,
        form: Format,
        functions: Collection[str],
        new_id: Callable[[int], str],
        *,
        is_reasoning: bool = False,
    ) -> None:
        self._form, self._functions, self._new_id = form, frozenset(functions), new_id
        self._text = ""  # text that was not handed on yet
        self._json: _Json | None = None  # set while arguments are being read
        self._run: TextRun | None = None  # set while a run is being read
        self._has_tail = False  # whether the tail of the last call was read
        self._space = ""  # whitespace that is handed on only if text follows it
        # whether whitespace is dropped that begins the reasoning, or the first content behind a mark or a call
        self._drops_space = is_reasoning
        self._has_content = False
        self._is_behind = is_reasoning  # whether no text came since the last mark or call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self.call_count = 0
        self.has_reasoned = False
        self._enter(AnswerPart.REASONING if is_reasoning else AnswerPart.START)

    @property
    def is_reasoning(self) -> bool:
        """Tells whether the text so far ends within reasoning."""
        return self._place is AnswerPart.REASONING

    def push(self, text: str) -> Delta:
        """Takes the next piece of the text, and returns the parts that are certain."""
        if self._is_plain(text):
            self._text = text
            self._say(len(text))
            return self._taken()
        self._text += text
        while self._text and self._step(is_last=False):
            pass
        return self._taken()

    def _is_plain(self, text: str) -> bool:
        """Tells whether no text is waiting, and no run or mark can begin in this piece. This holds for most pieces."""
        if self._text or self._run is not None or self._place is AnswerPart.START:
            return False
        return self._first is None or self._first.search(text) is None

    def flush(self) -> Delta:
        """Ends the text. A call that is incomplete now stays text."""
        while self._text and self._step(is_last=True):
            pass
        if self._space and not self._is_behind and self._place is not AnswerPart.REASONING:
            self._content.append(self._space)
        self._space = ""
        return self._taken()

    def _taken(self) -> Delta:
        # A delta has at most one piece of each call: clients join a call's pieces across deltas, but not within a
        # delta.
        delta = Delta("".join(self._content), "".join(self._reasoning), merged(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _step(self, *, is_last: bool) -> bool:
        """Takes one step through the text. Returns whether another step is possible."""
        if self._json is not None:
            self._read_arguments(self._json)
            return True
        if self._run is not None:
            return self._read_behind(self._run, is_last=is_last)
        return self._read_text(is_last=is_last)

    def _read_text(self, *, is_last: bool) -> bool:
        """Returns text up to the next run or mark, or up to text that may become one."""
        place = 0
        if self._place is AnswerPart.START:
            start = after_space(self._text, 0)
            if start == len(self._text) and not is_last:
                return False
            outcome = self._take_at(start, is_last=is_last)
            if outcome is not None:
                return outcome
            if start == len(self._text):
                self._space, self._text = self._space + self._text, ""
                return False
            self._enter(AnswerPart.CONTENT)
            place = start
        first = self._first
        while first is not None and (found := first.search(self._text, place)) is not None:
            outcome = self._take_at(found.start(), is_last=is_last)
            if outcome is not None:
                return outcome
            place = found.start() + 1
        self._say(len(self._text))
        return False

    def _take_at(self, place: int, *, is_last: bool) -> bool | None:
        """Takes in a run or a mark at a place.

        Returns True if one was taken in, False if more text is needed to tell, and None if there is neither.
        """
        has_begun = False
        for run in self._form.runs:
            if self._place in run.places:
                found = self._find_call(run, (*run.opening, *run.head), place)
                if found.status is Status.WHOLE:
                    self._say(place, is_end=True)
                    self._begin_call(run, found, found.end - place)
                    return True
                has_begun |= found.status is Status.BEGUN
        whole: tuple[int, Mark] | None = None
        for mark in self._form.marks:
            if self._place in mark.places:
                found = find(mark.elements, self._text, place, self._functions)
                if found.status is Status.WHOLE and whole is None:
                    whole = found.end, mark
                has_begun |= found.status is Status.BEGUN
        if has_begun and not is_last:
            self._say(place)
            return False
        if whole is None:
            return None
        end, mark = whole
        self._say(place, is_end=True)
        self._text = self._text[end - place :]
        if mark.then is not None:
            self._space = ""
            self._enter(mark.then)
            self._drops_space = mark.then is AnswerPart.REASONING or not self._has_content
            self._is_behind = True
        return True

    def _find_call(self, run: TextRun, elements: Elements, place: int) -> FoundCall:
        found = find(elements, self._text, place, self._functions, before="{")
        return found if found.function or not run.function else found._replace(function=run.function)

    def _begin_call(self, run: TextRun, found: FoundCall, end: int) -> None:
        form, number = self._form, self.call_count
        call_id = form.call_id.format(
            random=self._new_id(form.id_characters), name=found.function, index=found.number or number
        )
        self._calls.append(CallDelta(number, "", call_id, found.function))
        self.call_count += 1
        self._text = self._text[end:]
        self._run, self._json, self._has_tail = run, _Json(), False
        self._space, self._drops_space, self._is_behind = "", not self._has_content, True

    def _read_arguments(self, json: _Json) -> None:
        end = json.end(self._text)
        taken = self._text[:end]
        self._text = self._text[len(taken) :]
        self._calls.append(CallDelta(self.call_count - 1, taken))
        if end is not None:
            self._json = None

    def _read_behind(self, run: TextRun, *, is_last: bool) -> bool:
        """Takes in the tail of a call, then the next call or the closing of the run."""
        start = after_space(self._text, 0)
        if not self._has_tail:
            tail = find(run.tail, self._text, start, self._functions)
            if tail.status is Status.BEGUN:
                self._text = "" if is_last else self._text
                return False
            if tail.status is Status.ABSENT:
                self._end_run()
                return True
            self._has_tail, self._text = True, self._text[tail.end if run.tail else 0 :]
            return True
        closing = find(run.closing, self._text, start, self._functions)
        if run.separator is not None:
            following = self._find_call(run, (*run.separator, *run.head), start)
            if following.status is Status.WHOLE:
                self._begin_call(run, following, following.end)
                return True
            if Status.BEGUN in (following.status, closing.status if run.closing else None) and not is_last:
                return False
        if run.closing and closing.status is not Status.ABSENT:
            self._text = self._text[closing.end :] if closing.status is Status.WHOLE else ""
        self._end_run()
        return True

    def _end_run(self) -> None:
        self._run = None
        self._enter(AnswerPart.CONTENT)

    def _enter(self, place: AnswerPart) -> None:
        self._place = place
        self._first = _first_characters(self._form, place)
        self.has_reasoned |= place is AnswerPart.REASONING

    def _say(self, end: int, *, is_end: bool = False) -> None:
        """Hands on the text before a place. Whitespace at the text's end is held back until more text of the same kind
        follows.

        `is_end` says that a run or a mark follows, so that this whitespace is dropped.
        """
        text, self._text = self._space + self._text[:end], self._text[end:]
        if self._drops_space:
            text = text[after_space(text, 0) :]
        said = text.rstrip(_SPACE)
        self._space = "" if is_end else text[len(said) :]
        if not said:
            return
        self._drops_space = self._is_behind = False
        if self._place is AnswerPart.REASONING:
            self._reasoning.append(said)
        else:
            self._content.append(said)
            self._has_content = True


def _first_characters(form: Format, place: AnswerPart) -> re.Pattern[str] | None:
    """Returns a pattern of the first characters of runs and marks; None if nothing can begin here."""
    lists = [(*run.opening, *run.head) for run in form.runs if place in run.places and run.places != {AnswerPart.START}]
    lists += [mark.elements for mark in form.marks if place in mark.places and mark.places != {AnswerPart.START}]
    characters = {character for elements in lists for character in _begins_with(elements)}
    return re.compile("[" + re.escape("".join(sorted(characters))) + "]") if characters else None


def _begins_with(elements: Elements) -> set[str]:
    first, *rest = elements
    if isinstance(first, Maybe):
        return _begins_with(first.elements) | _begins_with(tuple(rest))
    assert not isinstance(first, Slot), "a run must begin with a text"
    return {first[0]}
