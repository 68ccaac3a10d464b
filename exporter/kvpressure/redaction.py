"""Which names and forms of text are secrets.

This is the second net, behind the list of what may be known (``engines.vllm.public``).

A value is hidden by the name in front of it (``--api-key X [Y ...]``, ``HF_TOKEN=X``, ``'api_key': ['X']``,
``Authorization: Bearer X``) or by its own form (tokens of well-known makers, private keys, credentials in URLs). Names
and everything else stay. Pure; linear in the length of the text.
"""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "[redacted]"

_SECRET: Final = re.compile(  # in the name, or at its end: long_prefill_token_threshold is a limit
    r"secret|passw|passphrase|credential|authorization|cookie|bearer|(?:api[_.-]?keys?|token|signature|"
    r"(?:^|[_.-])(?:keys?|sig|pass|pwd|auth|jwt))(?:_?\d{1,3})?$",
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
_WORD: Final = re.compile(r"[^\s\"']+")
_IN_URL: Final = re.compile(r"(?<=://)[^\s/@\"'<>]{1,400}@(?=[\w\[])")
_FORMS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|nvapi-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|"
    r"github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|"
    r"eyJ[\w-]{8,}+(?:\.[\w-]*+){0,2})"
)  # without its second part too: looking for that would be done at every start
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


def value(given: str) -> str:
    """``text`` of a value that was refused. It may be an address that is none, so credentials are looked for without a
    scheme, too, and up to the last ``@`` of a word.
    """
    return text(_WORD.sub(_without_user, given))


def _without_user(word: re.Match[str]) -> str:
    user, at, rest = word[0].rpartition("@")
    scheme, separator, _ = user.partition("://")
    return f"{scheme if separator else ''}{separator}{REDACTED}@{rest}" if at and ":" in user else word[0]


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
