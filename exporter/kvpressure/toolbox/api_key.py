"""A secret from a file that an option names."""

from __future__ import annotations

from typing import Final

from kvpressure.errors import InputError, refused_file
from kvpressure.files import read_file

MAX_BYTES: Final = 64 * 1024


def read(path: str | None, option: str) -> str | None:
    """The stripped text; None when no file was named. Raises ``InputError``, which never contains the text."""
    if path is None:
        return None
    wanted = "a text file with the secret and nothing else"
    try:
        text = read_file(path, MAX_BYTES + 1, pipe=True).decode("ascii").strip()
    except OSError as error:
        raise InputError(refused_file(f"{option}: {path}", error, wanted)) from error
    except UnicodeDecodeError:
        text = ""
    if not text or len(text) > MAX_BYTES or any(char <= " " for char in text):
        raise InputError(f"{option}: {path}: no single line of printable characters; allowed: {wanted}")
    return text
