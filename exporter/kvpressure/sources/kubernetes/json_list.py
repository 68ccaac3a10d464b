"""Reads a Kubernetes list item by item as the body arrives: one item is in memory, never the list.

``json`` decodes from where the last value ended. An incomplete value is tried again when twice as much of it has
arrived, so all tries together read at most three times the body.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final

CHUNK: Final = 64 * 1024
_BLANK: Final = " \t\r\n"
_AFTER_VALUE: Final = frozenset(",:]}" + _BLANK)


class ListError(ValueError):
    """A body that is no list of objects, or has a value that is too large."""


def read_list(chunks: Iterator[bytes], most_bytes: int) -> Generator[dict[str, Any], None, Mapping[str, Any]]:
    """The objects in ``items``; returns the list's ``metadata``. Raises ``ListError``.

    ``most_bytes`` bounds one item, and each value beside the items. Exceptions of ``chunks`` pass through.
    """
    text = _Text(chunks, most_bytes)
    metadata: Any = None
    listed = False
    for _ in text.members("{", "}"):
        name = text.value()
        text.expect(":")
        if name == "items":
            listed = True
            yield from _items(text)
        elif name == "metadata":
            metadata = text.value()
        else:
            text.value()
    text.expect("")
    if not listed or not isinstance(metadata, dict):
        raise ListError("no list")
    return metadata


def _items(text: _Text) -> Iterator[dict[str, Any]]:
    for _ in text.members("[", "]"):
        yield _object(text.value())  # no name for it here: the consumer's is the only one


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ListError("an item that is no object")
    return value


class _Text:
    """Received text that is not parsed yet."""

    def __init__(self, chunks: Iterator[bytes], most: int) -> None:
        self._chunks = chunks
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._most = most
        self._text = ""
        self._at = 0
        self._ended = False

    def value(self) -> Any:
        """The next value."""
        self._next()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                if self._ended or self._text[end : end + 1] in _AFTER_VALUE:  # else a number may go on
                    self._at = end
                    return value
            except RecursionError as error:
                raise ListError("nested too deeply") from error
            except ValueError as error:
                if self._ended:
                    raise ListError("no JSON") from error
            left = len(self._text) - self._at
            if left > self._most:
                raise ListError("a value that is too large")
            self._fill(2 * left)

    def members(self, opening: str, closing: str) -> Iterator[None]:
        """Stops at each member of an object or list, which the caller takes."""
        self.expect(opening)
        more = not self.skip(closing)
        while more:
            yield
            more = self.skip(",")
            if not more:
                self.expect(closing)

    def expect(self, sign: str) -> None:
        """Skip ``sign``, "" = the end. Raises ``ListError`` for anything else."""
        if self._next() != sign:
            raise ListError("no JSON")
        self._at += len(sign)

    def skip(self, sign: str) -> bool:
        """Skip ``sign`` if it comes next, and whether it did."""
        found = self._next() == sign
        self._at += found
        return found

    def _next(self) -> str:
        """The next non-blank character; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill(1)

    def _fill(self, wanted: int) -> None:
        """Receive until ``wanted`` characters are available, or the end."""
        parts = [self._text[self._at :]]
        size = len(parts[0])
        while size < wanted and not self._ended:
            chunk = next(self._chunks, b"")
            self._ended = not chunk
            try:
                parts.append(self._decoder.decode(chunk, final=self._ended))
            except UnicodeDecodeError as error:
                raise ListError("no UTF-8") from error
            size += len(parts[-1])
        self._text, self._at = "".join(parts), 0
