"""Runs cases, counts them and keeps those that fail."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.fuzz.draws import Subject
from tests.fuzz.node import NODE
from tests.fuzz.parsers import SUBJECTS as PARSERS

SUBJECTS: Final = {**PARSERS, NODE.name: NODE}
CORPUS: Final = Path(__file__).parents[1] / "fixtures" / "fuzz"
MOST_KEPT: Final = 5  # cases of one subject and one place


@dataclass
class Count:
    """How far the fuzzing of one subject has come. ``failed``: cases by where and how they failed."""

    cases: int = 0
    failed: dict[str, int] = field(default_factory=dict)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the package logs about the failures that it isolates."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run(
    subject: Subject,
    seed: int,
    count: Count,
    cases: float = inf,
    seconds: float = inf,
    keep: Callable[[Any], object] | None = None,
) -> None:
    """Count on with the next cases of a seed, as many as asked for or as fit into ``seconds`` of CPU. Each can be made
    again alone.
    """
    began, last = time.thread_time(), count.cases + cases
    with quiet():
        while count.cases < last and time.thread_time() - began < seconds:
            case = subject.make(Random(f"{seed}:{count.cases}"))
            place = failure(subject, case)
            count.cases += 1
            if place is not None:
                count.failed[place] = count.failed.get(place, 0) + 1
                if keep is not None and count.failed[place] <= MOST_KEPT:
                    keep(case)


def failure(subject: Subject, case: Any) -> str | None:
    """Where and how a case fails; ``None`` when it holds."""
    try:
        subject.check(case)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "?" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).stem}:{trace.tb_lineno}"
        return f"{type(error).__name__} at {where}"
    return None


def keep(subject: Subject, case: Any) -> Path:
    """Put a case into the corpus."""
    text = json.dumps({"subject": subject.name, "case": encoded(case)}, indent=1)
    path = CORPUS / f"{subject.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path


def kept() -> list[Path]:
    """The corpus: cases that failed once."""
    return sorted(CORPUS.glob("*.json"))


def load(path: Path) -> tuple[Subject, Any]:
    document: Mapping[str, Any] = json.loads(path.read_text())
    return SUBJECTS[document["subject"]], decoded(document["case"])


def encoded(case: Any) -> Any:
    """A case as JSON: bytes as text under a key of their own."""
    return {"bytes": case.decode("latin-1")} if isinstance(case, bytes) else case


def decoded(case: Any) -> Any:
    return case["bytes"].encode("latin-1") if isinstance(case, dict) and set(case) == {"bytes"} else case
