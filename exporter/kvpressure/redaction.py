"""Secrets out of what is kept or shown: command lines, variables and log lines travel in recordings and tickets.

A value is hidden by the name in front of it (``--api-key X [Y ...]``, ``HF_TOKEN=X``, ``'api_key': ['X']``,
``Authorization: Bearer X``) or by its own form (tokens of well-known makers, private keys, credentials in URLs). Names
and everything else stay, so that arguments are still read right. Pure; linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

REDACTED: Final = "[redacted]"

_SECRET: Final = re.compile(  # in the name, or at its end: long_prefill_token_threshold is a limit
    r"secret|passw|passphrase|credential|authorization|(?:api[_.-]?key|token|signature|(?:^|[_.-])(?:key|sig))$",
    re.IGNORECASE,
)
# What a user sent: fields of vLLM's request objects. Only these exact names, or most of a log would be hidden.
_SENT: Final = frozenset({"prompt", "prompts", "prompt_token_ids", "prompt_embeds", "messages", "content", "input_ids"})

_QUOTED: Final = r"\\{1,4}[\"'][^\"'\\]*+|\"(?:[^\"\\]|\\.)*+\"?|'(?:[^'\\]|\\.)*+'?"
_NAME: Final = re.compile(  # with the ``=``, ``:`` or (after an option) space that leads to its value
    r"(?<![\w.-])(?P<dashes>--?)?(?P<name>\w[\w.-]{0,120})(?:\\{0,4}[\"']?\s{0,4}[=:]\s{0,4}|(?(dashes)\s{1,4}(?!-)|(?!)))"
)
_VALUE: Final = re.compile(  # a list, a quoted text or a word
    rf"\[(?:{_QUOTED}|[^\]\"'])*+\]?|{_QUOTED}|(?:(?:bearer|basic|token)\s{{1,4}})?[^\s\"',;&)}}\]]+", re.IGNORECASE
)
_NOTHING: Final = re.compile(r"None|null|True|False|\[\]|''|\"\"|\[redacted\]", re.IGNORECASE)
_SCHEME: Final = re.compile(
    r"\b(?P<name>bearer|basic)\s{1,4}(?=[\w.~+/-]{0,400}[\d=._-])[\w.~+/-]{8,}=*", re.IGNORECASE
)
_IN_URL: Final = re.compile(r"(?<=://)[^\s/@\"'<>]{1,400}@(?=[\w\[])")
_FORMS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|nvapi-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|"
    r"github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_WORD: Final = re.compile(
    r"[;|&\n()<>]|(?:\\.|\"(?:[^\"\\]|\\.)*+\"?|'[^']*+'?|[^\s;|&()<>\"'\\])++|\\", re.DOTALL
)  # of a script
_REFERENCE: Final = re.compile(r"\$(?:\w{1,120}|[@*]|\{\w{1,120}(?:\[[@*]\])?\}|\([A-Za-z_][\w.-]{0,120}\))")
# A name that programs use, not a word of a language nor a program that fetches secrets.
_FIELD: Final = re.compile(r"\w[\w.-]{0,60}[_.-](?:key|token|passw\w{0,8}|passphrase|secret)", re.IGNORECASE)
_LOGIN: Final = re.compile(r"(?P<option>-u|--user=)?[^\s:/-][^\s:/]{0,200}:(?!//).", re.DOTALL)
_USER: Final = frozenset({"-u", "--user"})
_QUOTE: Final = re.compile("[\"']")
_NESTED: Final = 2  # scripts in scripts that are looked into
_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)


def is_secret(name: str) -> bool:
    """Whether a variable, option or field of this name holds a secret."""
    return _SECRET.search(name) is not None


def text(line: str) -> str:
    """``line`` without secrets and without what a user sent."""
    line = _PRIVATE_KEY.sub(REDACTED, line)
    line = _IN_URL.sub(f"{REDACTED}@", line)
    line = _hide_pairs(line)
    line = _SCHEME.sub(rf"\g<name> {REDACTED}", line)
    return _FORMS.sub(REDACTED, line)


def _hide_pairs(line: str) -> str:
    """Hide the values of names that hold secrets; other values are looked into, for they may be pairs again."""
    parts, kept_from, position = [], 0, 0
    while (found := _NAME.search(line, position)) is not None:
        position = found.end()
        if not is_secret(found["name"]) and found["name"].lower() not in _SENT:
            continue
        value = _VALUE.match(line, position)
        if value is not None and not _NOTHING.fullmatch(value[0]):
            parts += [line[kept_from:position], REDACTED]
            kept_from = position = value.end()
    return "".join([*parts, line[kept_from:]])


def args(argv: Iterable[str]) -> list[str]:
    """A command line without secrets. A word that begins with a dash is no value of an option, as for vLLM, and an option
    may have several values (``--api-key X Y``).
    """
    shown: list[str] = []
    words = _Words()
    for word in argv:
        option, equals, _ = word.partition("=")
        if words.hides(word):
            shown.append(REDACTED)
        elif equals and _is_secret_option(option):
            shown.append(f"{option}={REDACTED}")
        else:
            shown.append(text(_script(word, _NESTED)))
    return shown


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and " " not in word and is_secret(word.lstrip("-"))


class _Words:
    """Which words of a command line are secrets by those before them. To be asked for every word, in their order."""

    def __init__(self) -> None:
        self._before = ""
        self._values = 0  # of a secret option that were seen, from 1 on; 0 = none is being given
        self._next = False  # the value of a field follows

    def hides(self, word: str) -> bool:
        """Whether ``word`` is to be hidden. Of an option's further values a mere reference to a variable is not: it is no
        secret itself, and it may bring in arguments.
        """
        before, self._before = self._before, word
        if word.startswith("-"):
            option, equals, _ = word.partition("=")
            self._values, self._next = int(_is_secret_option(option) and not equals), False
            login = _LOGIN.match(word)
            return login is not None and login["option"] is not None
        if self._values:
            self._values += 1
            return self._values == 2 or _REFERENCE.fullmatch(word) is None
        if self._next:
            self._next = False
            return True
        self._next = not before.startswith("-") and _FIELD.fullmatch(word) is not None
        return before in _USER and _LOGIN.match(word) is not None


def _script(line: str, depth: int) -> str:
    """A script without the values of secret options, logins (``-u user:password``) and fields (``set secret_key X``)."""
    if not depth or not any(sign in line for sign in " \t\n"):
        return line
    parts, kept_from, words = [], 0, _Words()
    for found in _WORD.finditer(line):
        word = found[0]
        if word in ";|&\n()<>":
            words = _Words()
            continue
        if not word.strip("\\\n"):  # the line goes on
            continue
        hidden = REDACTED if words.hides(word.strip("\"'")) else None
        if hidden is None and (quote := _QUOTE.search(word)) is not None:
            inner = word[quote.end() :]
            closing = quote[0] if inner.endswith(quote[0]) else ""
            hidden = f"{word[: quote.end()]}{_script(inner.removesuffix(closing), depth - 1)}{closing}"
        if hidden is not None:
            parts += [line[kept_from : found.start()], hidden]
            kept_from = found.end()
    return "".join([*parts, line[kept_from:]])
