"""The result of ``diagnose`` as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvpressure import __version__
from kvpressure.advice.action import Action
from kvpressure.advice.triage import TriageStep
from kvpressure.advice.wording import name_of, words
from kvpressure.diagnosis import findings
from kvpressure.model.state import CALM, EngineState, Found
from kvpressure.printable import command
from kvpressure.publish.collector import fine, worst_first
from kvpressure.publish.links import RUNBOOK_FOLDER, Links
from kvpressure.publish.page.view import headline as page_headline
from kvpressure.publish.page.view import said
from kvpressure.recording.timeline import clock
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.common_problems import PROBLEMS, common_problems, log_events
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.history import Case, FoundEngines
from kvpressure.toolbox.triage import triage

_MARKS: Final = {"fine": "ok", "look": "look", "bad": "BAD", "unknown": "?"}
_MAX_CHANGES_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One engine's report."""

    case: Case
    steps: tuple[TriageStep, ...]
    problems: tuple[Found, ...]
    next: tuple[Action, ...]

    @property
    def fine(self) -> bool:
        """Whether the verdict at the reported moment is fine and no serious condition holds."""
        return fine(self.case.view.engine)


def answers(found: FoundEngines, thresholds: Thresholds) -> list[EngineAnswer]:
    """One per engine, the worst first."""
    cases = sorted(found.cases, key=lambda case: worst_first(case.view.engine))
    return [_answer(case, found, thresholds) for case in cases]


def _answer(case: Case, found: FoundEngines, thresholds: Thresholds) -> EngineAnswer:
    view = case.view
    pod = found.facts.get((view.engine.key.namespace, view.engine.key.pod))
    events = log_events(view) if pod is None or pod.log_events is None else pod.log_events
    return EngineAnswer(
        case,
        tuple(triage(view, pod)),
        tuple(common_problems(view, events, thresholds)),
        tuple(next_steps(view, found.again)),
    )


def actions_now(engine: EngineView) -> list[Action]:
    """The plan's actions that apply now; to verify is a command here."""
    return [action for action in engine.plan.actions_now if not action.title.startswith("Verify")]


def next_steps(engine: EngineView, again: str) -> Iterator[Action]:
    """What to do now: the plan, and the commands that go further. ``again``: the input as typed."""
    yield from actions_now(engine)
    for link in Links(RUNBOOK_FOLDER).runbooks_for("", engine.true_conditions):
        of = [words(name) for name in engine.true_conditions if findings.of(name).runbook == link.title]
        yield Action(f"{' and '.join(of)}: {link.url}", "")
    if engine.diagnosis.verdict == "kv_pressure":
        yield Action("Print the full plan with costs", "", (), (f"kvpressure mitigate {again}",))
        url = engine.plan_input.address or "URL"
        yield Action("Check the recovery afterwards", "", (), (command("kvpressure", "mitigate", "--verify", url),))
    elif engine.diagnosis.verdict in CALM:
        yield Action("If users still complain, check what is in front: gateway, routing, network, clients", "")
    elif engine.diagnosis.verdict == "unknown":
        if again.startswith(("http://", "https://")):  # a recording has no more, and an exporter watches all the time
            yield Action("Watch longer", "", (), (f"kvpressure diagnose {again} --seconds 90",))
        yield Action("Run the exporter on the node, which also reads GPU, pod and log", "")


def action_lines(number: int, action: Action, text: bool = True) -> Iterator[str]:
    """An action as every command prints it; ``text`` False leaves the reason to the plan."""
    yield f"{number}. {action.title}"
    if text and action.text:
        yield f"     {action.text}"
    yield from (f"     set:  {flag}" for flag in action.flags)
    yield from (f"     $ {one}" for one in action.commands)


# --- JSON -------------------------------------------------------------------------------------------------


def as_json(found: FoundEngines, answered: list[EngineAnswer]) -> dict[str, Any]:
    """Plain JSON values; the engine's whole entry is under ``engine``."""
    return {
        "version": __version__,
        "input": found.again,
        "fine": all(answer.fine for answer in answered),
        "warnings": list(found.warnings),
        "engines": [
            {
                **answer.case.view.identity,
                "verdict": answer.case.view.diagnosis.verdict,
                "stage": answer.case.view.diagnosis.stage,
                "confidence": answer.case.view.diagnosis.confidence,
                "cause": answer.case.view.cause,
                "fine": answer.fine,
                "at": answer.case.at,
                "final_verdict": answer.case.final or answer.case.view.diagnosis.verdict,
                "verdict_seconds": dict(answer.case.seconds),
                "changes": [asdict(change) for change in answer.case.changes],
                "triage": [asdict(step) for step in answer.steps],
                "common_problems": [_problem(found) for found in answer.problems],
                "next_steps": [asdict(action) for action in answer.next],
                "engine": answer.case.view.as_json(),
            }
            for answer in answered
        ],
    }


def _problem(found: Found) -> dict[str, str | bool | None]:
    row = PROBLEMS[found.name]
    return {
        "name": found.name,
        "title": row.title,
        "present": found.value,
        "evidence": found.text,
        "cause": row.cause,
        "action": row.action,
    }


# --- text -------------------------------------------------------------------------------------------------


def as_text(found: FoundEngines, answered: list[EngineAnswer]) -> str:
    """For a person: a headline for several engines, those in trouble in full, the others in one line each."""
    several = len(answered) > 1
    blocks = [headline([answer.case.view.engine for answer in answered])] if several else []
    blocks += ["\n".join(_brief(answer) if several and answer.fine else _engine(answer)) for answer in answered]
    return "\n\n".join(blocks + [f"note: {warning}" for warning in found.warnings])


def headline(engines: Sequence[EngineState]) -> str:
    """``3 engines: 1 KV pressure, 2 healthy. First: prod/chat-0.`` for engines in order, the worst first."""
    first = "" if not engines or fine(engines[0]) else f" First: {name_of(engines[0].key)}."
    return page_headline(map(said, engines), len(engines)) + first


def _headline(view: EngineView, stage: str | None) -> str:
    confidence = view.diagnosis.confidence
    return f"VERDICT  {verdict_words(view.diagnosis.verdict, stage)}, confidence {confidence:.2f}: {view.cause}"


def _brief(answer: EngineAnswer) -> Iterator[str]:
    view = answer.case.view
    yield view.name + (f"  {view.engine.target}" if view.engine.target else "")
    yield _headline(view, None)


def _rule(view: EngineView) -> Iterator[str]:
    found = view.diagnosis
    if found.row:
        also = f"; also possible: {verdict_words(found.runner_up, None)}" if found.runner_up else ""
        yield f"  rule:     {found.row} ({found.grade}){also}"


def _engine(answer: EngineAnswer) -> Iterator[str]:
    yield from evidence_lines(answer)
    yield from ("", "triage") if answer.steps else ()
    for step in answer.steps:
        yield f"  {step.number} {_MARKS[step.finding]:4} {step.question}"
        unknown = step.finding == "unknown"
        yield from (f"           {line}" for line in step.answers[: 1 if unknown else None])
        if unknown and step.command:
            yield f"           by hand: {step.command}"
    if note := answer.case.view.diagnosis.signature_note:
        yield f"  {note}"
    yield ""
    yield "common problems"
    for problem in answer.problems:
        row = PROBLEMS[problem.name]
        if problem.value is not None:
            yield f"  {'YES ' if problem.value else 'no  '} {row.title}: {problem.text}"
        if problem.value:
            yield f"       {row.cause}: {row.action}"
    if unknown_ones := [PROBLEMS[problem.name].title for problem in answer.problems if problem.value is None]:
        yield f"  ?    {'; '.join(unknown_ones)}"
    yield ""
    yield from next_lines(answer)


def evidence_lines(answer: EngineAnswer) -> Iterator[str]:
    """The engine, its verdict, and what speaks for and against it."""
    view = answer.case.view
    found, target = view.diagnosis, view.engine.target
    yield view.name + (f"  {target}" if target else "")
    yield _headline(view, found.stage)
    yield from _rule(view)
    yield from _time(answer.case)
    for title, sentences in (("for", found.supporting), ("against", found.opposing), ("unknown", found.missing)):
        for sentence in sentences:
            yield f"  {title + ':':9} {sentence}"
    if true := view.true_conditions:
        yield f"  also:     {', '.join(words(name) for name in true)}"


def next_lines(answer: EngineAnswer) -> Iterator[str]:
    """What to do now, with commands."""
    yield "next"
    for number, action in enumerate(answer.next, 1):
        yield from (f"  {line}" for line in action_lines(number, action, text=False))


def _time(case: Case) -> Iterator[str]:
    """The reported moment within the judged period; nothing of a period with one verdict, or of now."""
    if case.at is not None and not case.changes:
        yield f"  at        {clock(case.at)}; since {clock(case.view.diagnosis.since)}"
    if len(case.changes) < 2 or case.at is None:
        return
    shares = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.0f} s"
        for name, seconds in sorted(case.seconds.items(), key=lambda item: -item[1])
    )
    yield f"  at        {clock(case.at)}; at the end: {case.final.replace('_', ' ')}; in all: {shares}"
    shown = case.changes[-_MAX_CHANGES_SHOWN:]
    if len(shown) < len(case.changes):
        yield f"            ({len(case.changes) - len(shown)} earlier changes)"
    for change in shown:
        yield f"            {clock(change.t)}  {verdict_words(change.verdict, change.stage)} ({change.confidence:.2f})"


def verdict_words(verdict: str, stage: str | None) -> str:
    """``KV PRESSURE (thrashing)``."""
    name = verdict.replace("_", " ").upper()
    return f"{name} ({stage})" if stage else name
