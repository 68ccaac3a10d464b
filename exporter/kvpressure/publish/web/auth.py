"""Basic auth against bcrypt hashes; guesses do not delay scrapes.

bcrypt takes tens of milliseconds by design. A correct password is remembered (as a keyed digest), so that a scrape
pays once; a bounded number of wrong ones too. An unknown user costs as much as a known one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections import OrderedDict
from typing import Final

from kvpressure.publish.web.webconfig import WebConfig

WRONG_REMEMBERED: Final = 512
# Hash of a random password; compared with when the user is unknown.
_NOBODY: Final = b"$2b$10$ZMJbRtesGS/7Sw98vrxAd.OOzVqgLQuaHKYAivkcNPw0vTlhs3fyO"


class Authenticator:
    """Remembers answers. ``remembered`` is instant; ``check`` runs bcrypt, so call it off the loop."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._right: dict[str, bytes] = {}
        self._wrong: OrderedDict[bytes, None] = OrderedDict()

    def remembered(self, config: WebConfig, header: str | None) -> bool | None:
        """Whether the ``Authorization`` header is valid; ``None`` = ``check`` has to compare the password."""
        if not config.users:
            return True
        login = _login(header)
        if login is None:
            return False
        digest = self._digest(config, *login)
        if self._right.get(login[0]) == digest:
            return True
        return False if digest in self._wrong else None

    def check(self, config: WebConfig, header: str | None) -> bool:
        """Whether the header is valid, by comparing the password; the answer is remembered."""
        import bcrypt

        login = _login(header)
        if login is None:
            return False
        user, password = login
        try:
            equal = bcrypt.checkpw(password, config.users.get(user, _NOBODY))
        except ValueError:  # longer than bcrypt takes, or with a NUL
            equal = False
        digest = self._digest(config, user, password)
        if equal and user in config.users:
            if len(self._right) > len(config.users):
                self._right = {name: kept for name, kept in self._right.items() if name in config.users}
            self._right[user] = digest
            return True
        self._wrong[digest] = None
        while len(self._wrong) > WRONG_REMEMBERED:
            self._wrong.popitem(last=False)
        return False

    def _digest(self, config: WebConfig, user: str, password: bytes) -> bytes:
        """Digest of user, password and the stored hash, so that a changed hash invalidates it."""
        parts = (user.encode(), config.users.get(user, b""), password)
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hashlib.blake2b(text, key=self._secret, digest_size=32).digest()


def _login(header: str | None) -> tuple[str, bytes] | None:
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, UnicodeDecodeError):
        return None
