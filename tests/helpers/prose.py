"""Sentences that people read, out of Markdown, annotations and help texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_INLINE = re.compile(r"``[^`]+``|`[^`\n]+`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# A sentence may begin with a name in lower case, such as vLLM or p95.
WHOLE = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\.\.\.)\s+")
_END = re.compile(rf"{WHOLE.pattern}|(?<=[:;])\s+(?=[A-Z«\"(*0-9])")
_BLOCK = re.compile(r"\n\s*\n|\n(?= *(?:[*+-]|\d+\.) )|\n(?=#)|\n(?=\|)|(?<=\|)\s*\n")


def sentences(markdown: str, end: re.Pattern[str] = _END) -> Iterator[str]:
    """Each sentence, heading, list item and table cell; code blocks are left out, a quoted name counts as one word.
    ``end``: where a sentence ends; ``WHOLE`` leaves the parts after a colon or semicolon together.
    """
    text = _LINK.sub(r"\1", _INLINE.sub("Code", _COMMENT.sub("", _CODE.sub("", markdown))))
    for block in _BLOCK.split(text):
        for cell in re.split(r"\||<br>", block) if block.lstrip().startswith("|") else [block]:
            for sentence in end.split(" ".join(cell.split())):
                found = re.sub(r"^[ *#>]*(?:- +)?|[ *#>]+$", "", sentence)
                if re.search(r"[a-z]", found):
                    yield found


def annotations(rules: str) -> Iterator[tuple[str, str, str]]:
    """(alert, field, text) of every annotation that a person reads."""
    for group in yaml.safe_load(rules)["groups"]:
        for rule in group["rules"]:
            for field, text in rule.get("annotations", {}).items():
                if not field.endswith("_url"):
                    yield rule["alert"], field, text


def documents(root: Path) -> list[Path]:
    """Every Markdown page of the project."""
    return sorted(
        [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("plugin/*.md"), *root.glob("deploy/**/*.md")]
    )
