"""The answer of ``diagnose`` as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvpressure import __version__
from kvpressure.publish.triage import Step
from kvpressure.thresholds import Thresholds
from kvpressure.toolbox.history import Case
from kvpressure.toolbox.inputs import Found
from kvpressure.toolbox.problems import Problem, common_problems, log_events
from kvpressure.toolbox.triage import PodFacts, triage
from kvpressure.toolbox.view import FINE, EngineView, items, mapping

CAUSES: Final = {
    "kv_pressure": "the KV cache is full and requests wait for it or are pushed out",
    "concurrency_limited": "max_num_seqs is reached while the cache has room",
    "compute_bound": "prompts or decoding saturate the GPU; the cache does not bind",
    "host_bound": "the GPU waits for the host: CPU, tokenization, API server or network",
    "stalled": "work is present and nothing comes out",
    "healthy": "tokens flow and nobody waits for long",
    "idle": "nothing runs and nothing waits",
    "unknown": "too little was seen to say",
}
_MARKS: Final = {"fine": "ok", "look": "look", "bad": "BAD", "unknown": "?"}
_SERIOUS: Final = (
    "memory_leak_idle",
    "kv_held_without_load",
    "host_oom_killed",
    "gpu_out_of_memory",
    "crash_loop",
    "gpu_fault",
)
_MAX_CHANGES_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything about one engine."""

    case: Case
    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]
    next: tuple[str, ...]

    @property
    def fine(self) -> bool:
        """Nothing is wrong, now or in the stretch that was judged."""
        view = self.case.view
        return view.verdict in FINE and not any(view.condition(name) for name in _SERIOUS)


def answers(found: Found, thresholds: Thresholds) -> list[Answer]:
    """One for each engine."""
    return [_answer(case, found, thresholds) for case in found.cases]


def _answer(case: Case, found: Found, thresholds: Thresholds) -> Answer:
    view = case.view
    pod = found.facts.get((view.text("namespace"), view.text("pod")))
    return Answer(
        case,
        tuple(triage(view, pod)),
        tuple(common_problems(view, _events(case, pod), thresholds)),
        tuple(next_steps(view, found.again)),
    )


def next_steps(engine: EngineView, again: str) -> Iterator[str]:
    """What to do now, one line a step; the document's own plan, and the commands that go further."""
    plan = mapping(engine.data.get("mitigation"))
    for action in (mapping(item) for item in items(plan.get("actions"))):
        flags = " ".join(str(item) for item in items(action.get("flags")))
        title = str(action.get("title"))
        if not title.startswith("Verify") and not title.endswith(": not now"):  # to verify is a command here
            yield f"{action.get('title')}" + (f": {flags}" if flags else "")
    if engine.verdict == "kv_pressure":
        yield f"kvpressure mitigate {again}: the whole plan with costs, as text, kubectl patch or Helm values"
        yield "kvpressure mitigate --verify URL afterwards: whether it recovers"
    elif engine.verdict in FINE:
        yield "if users complain nevertheless, look in front of the server: gateway, routing, network, clients"
    elif engine.verdict == "unknown":
        yield "watch longer (--seconds 90), or run the exporter on the node: it sees GPU, pod and log too"


def _events(case: Case, pod: PodFacts | None) -> dict[str, int] | None:
    if pod is None or (pod.running_log is None and pod.previous_log is None):
        return log_events(case.view)
    merged = dict(pod.running_log or {})
    for name, count in (pod.previous_log or {}).items():
        merged[name] = merged.get(name, 0) + count
    return merged


# --- JSON -------------------------------------------------------------------------------------------------


def as_json(found: Found, answered: list[Answer]) -> dict[str, Any]:
    """Plain values; the engine's whole entry is under ``engine``."""
    return {
        "version": __version__,
        "input": found.again,
        "fine": all(answer.fine for answer in answered),
        "warnings": list(found.warnings),
        "engines": [
            {
                **answer.case.view.identity,
                "verdict": answer.case.view.verdict,
                "stage": answer.case.view.stage,
                "confidence": answer.case.view.confidence,
                "cause": CAUSES[answer.case.view.verdict],
                "fine": answer.fine,
                "at": answer.case.at,
                "final_verdict": answer.case.final or answer.case.view.verdict,
                "verdict_seconds": dict(answer.case.seconds),
                "changes": [asdict(change) for change in answer.case.changes],
                "triage": [asdict(step) for step in answer.steps],
                "common_problems": [asdict(problem) for problem in answer.problems],
                "next_steps": list(answer.next),
                "engine": dict(answer.case.view.data),
            }
            for answer in answered
        ],
    }


# --- text -------------------------------------------------------------------------------------------------


def as_text(found: Found, answered: list[Answer]) -> str:
    """For a person at night: the verdict first."""
    blocks = ["\n".join(_engine(answer)) for answer in answered]
    return "\n\n".join(blocks + [f"note: {warning}" for warning in found.warnings])


def _engine(answer: Answer) -> Iterator[str]:
    view = answer.case.view
    target = view.text("target")
    yield view.name + (f"  {target}" if target else "")
    yield f"VERDICT  {verdict_words(view.verdict, view.stage)}, confidence {view.confidence:.2f}: {CAUSES[view.verdict]}"
    yield from _time(answer.case)
    for title, key in (("for", "supporting"), ("against", "opposing"), ("not seen", "missing")):
        for sentence in view.sentences(key):
            yield f"  {title + ':':9} {sentence}"
    true = [name for name, value in sorted((view.data.get("conditions") or {}).items()) if value is True]
    if true:
        yield f"  also:     {', '.join(name.replace('_', ' ') for name in true)}"
    yield ""
    yield "triage"
    for step in answer.steps:
        yield f"  {step.number} {_MARKS[step.finding]:4} {step.question}"
        yield from (f"           {line}" for line in step.answers)
        if step.finding == "unknown" and step.command:
            yield f"           by hand: {step.command}"
    _, _, note = view.signature()
    if note:
        yield f"  {note}"
    yield ""
    yield "common problems"
    for problem in answer.problems:
        mark = {True: "YES", False: "no", None: "?"}[problem.present]
        yield f"  {mark:4} {problem.title}: {problem.evidence}"
        if problem.present:
            yield f"       {problem.cause}: {problem.action}"
    yield ""
    yield "next"
    yield from (f"  {number}. {step}" for number, step in enumerate(answer.next, 1))


def _time(case: Case) -> Iterator[str]:
    """Where in the stretch this is, when it was a stretch."""
    if len(case.changes) < 2 or case.at is None:
        return
    shares = ", ".join(
        f"{name} {seconds:.0f} s" for name, seconds in sorted(case.seconds.items(), key=lambda item: -item[1])
    )
    yield f"  at        {clock(case.at)}; at the end: {case.final.replace('_', ' ')}; in all: {shares}"
    shown = case.changes[-_MAX_CHANGES_SHOWN:]
    if len(shown) < len(case.changes):
        yield f"            ({len(case.changes) - len(shown)} earlier changes)"
    for change in shown:
        yield f"            {clock(change.t)}  {verdict_words(change.verdict, change.stage)} ({change.confidence:.2f})"


def verdict_words(verdict: str, stage: str | None) -> str:
    """``KV PRESSURE (thrashing)``."""
    words = verdict.replace("_", " ").upper()
    return f"{words} ({stage})" if stage else words


def clock(t: float) -> str:
    """UTC, to the second."""
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"t={t:.0f}"
