"""Every text of the project that a person reads, for the rules of style in ``tests.helpers.style``.

``python -m tests.helpers.texts 30 7`` prints thirty sentences picked with seed 7.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, Final

from kvpressure.advice.condition_text import standings
from kvpressure.advice.mitigation import plan
from kvpressure.advice.triage import steps
from kvpressure.bundle.rules import Options, load_groups, rule_file
from kvpressure.bundle.text import to_yaml
from kvpressure.cli import COMMANDS, main
from kvpressure.diagnosis.conditions import BUILT_IN, of
from kvpressure.diagnosis.facts import BY_NAME as FACTS
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.metrics import METRICS
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.recording.reader import Reader
from kvpressure.settings.groups import grouped
from kvpressure.settings.settings import options
from kvpressure.settings.thresholds import builtin
from tests.helpers.prose import WHOLE, annotations, documents, sentences
from tests.helpers.style import Text

ROOT: Final = Path(__file__).parents[2]
RECORDINGS: Final = ROOT / "tests/fixtures/recordings"
_SOURCES: Final = ("exporter/kvpressure", "plugin", "deploy")
# What a placeholder in an annotation or a sentence may hold, so that a text is read as a person would see it.
_LABELS: Final = {
    "namespace": "chat",
    "pod": "llama-0",
    "container": "vllm",
    "model_name": "llama-3.1-8b",
    "engine": "0",
    "instance": "node-1",
    "node": "node-1",
    "uuid": "GPU-1f",
    "gpu": "3",
    "vendor": "nvidia",
    "xid": "79",
    "limit": "max_num_seqs",
    "verdict": "host_bound",
    "phase": "ttft",
    "reason": "OOMKilled",
    "exit_code": "137",
    "event": "cuda_oom",
    "source": "podresources",
    "condition": "MemoryPressure",
    "objective": "ttft",
    "scope": "kv_pool",
    "target": "chat/llama-0",
    "workload": "deploy/llama",
    "stage": "signals",
    "kind": "engine",
    "name": "chat/llama-0",
}
_FILLED: Final = {  # placeholders of evidence and conditions
    "outside": "62 %",
    "used": "93 %",
    "running": "7",
    "queue": "41 requests waiting",
    "waiting": "41",
    "in_flight": "48",
    "level": "KV cache 98 % now, recent peak 99 %",
    "kv_full": "97 %",
    "kv_near": "80 %",
    "kv": "98 %",
    "kv_why": "not recorded by this engine",
    "gpu": "NVML utilization 9 %",
    "free_and_prompts": "1 200 tokens free; p95 prompt 3 000 tokens",
    "preemptions": "preemptions",
    "engine": "vLLM",
    "page_error": ": connection refused",
    "failing": "",
    "rates": "1 539 prompt tokens/s, 252 output tokens/s",
    "worst_phase": "time to first token",
    "oom": "out of GPU memory 1 time in the log of the last 10 minutes",
    "ended": "OOMKilled, exit code 137, 2 min ago",
    "restarts": "4 restarts in half an hour",
    "limit_source": "arguments",
}
_SHOWN: Final = frozenset({"title", "description", "text", "noValue", "content", "label", "displayName"})


def pages() -> Iterator[Text]:
    """All Markdown, written and generated."""
    for path in documents(ROOT):
        yield Text(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), "page")


def rules() -> Iterator[Text]:
    """Summaries and descriptions of the alerts of both sources and of the literal profile."""
    kinds = (("default", "kvpressure"), ("literal", "kvpressure"), ("default", "dcgm"), ("default", "vllm"))
    for profile, source in kinds:
        options = Options(builtin(), profile=profile, source=source)
        for alert, field, text in annotations(to_yaml(rule_file(load_groups(options), options.values), "")):
            yield Text(f"{source}/{profile}/{alert}.{field}", _notified(text))


def _notified(text: str) -> str:
    """An annotation as a receiver shows it: every branch taken, every label and value filled in."""
    return re.sub(r"\{\{(.*?)\}\}", _value, text, flags=re.S)


def _value(found: re.Match[str]) -> str:
    code = found[1]
    if re.match(r"\s*(?:with|if|else|end|range)\b", code):
        return ""
    label = re.search(r"\$labels\.(\w+)|label \"(\w+)\"", code)
    if label is not None:
        return _LABELS.get(label[1] or label[2], "7")
    forms = {"humanizePercentage": "93%", "humanizeDuration": "4m 10s", "%.0f": "42", "%.1f": "3.2", "%.2f": "0.92"}
    return next((shown for form, shown in forms.items() if form in code), "7")


def declarations() -> Iterator[Text]:
    """Metric HELP, helps of flags and thresholds, sentences of facts and conditions."""
    for metric in METRICS:
        yield Text(f"metric {metric.name}", f"{metric.help}\n\n{metric.absent}")
    for group, members in grouped(options().values()).items():
        yield Text(f"settings {group.title}", group.text)
        yield from (Text(f"setting {one.name}", one.help) for one in members)
    for entry in builtin().entries():
        yield Text(f"threshold {entry.name}", f"{entry.reason}\n\n{entry.change}\n\n{entry.source}")
    for one in (*FACTS.values(), *map(of, BUILT_IN)):
        for value in ("true", "false", "unknown"):
            yield Text(f"{one.name} {value}", re.sub(r"\{(\w+)\}", _filled, getattr(one, value)))


def _filled(found: re.Match[str]) -> str:
    return _FILLED.get(found[1], "7")


def helps() -> Iterator[Text]:
    """``--help`` of every command; examples and names of options count as code."""
    for command in ("", *COMMANDS):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*filter(None, [command]), "--help"])
        text = re.sub(r"\Ausage:.*?\n\n", "", out.getvalue(), flags=re.S)
        text = re.sub(r"^ +kvpressure .*?$", "", text, flags=re.M)
        text = re.sub(r"^ +(?:-\w, )?--[\w.-]+(?: [A-Z{\[]\S*)*(?=$|  )", "\n\n", text, flags=re.M)
        yield Text(f"{command} --help", re.sub(r"\n {2,4}(?=\S)|\n {5,}(?=\S+ {2,})", "\n\n", text), "help")


def dashboards() -> Iterator[Text]:
    """Titles, descriptions and texts on the dashboards."""
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        for key, text in _shown(json.loads(path.read_text(encoding="utf-8")), ""):
            yield Text(f"{path.name} {key}", text)


def _shown(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _shown(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _shown(value, key)
    elif isinstance(node, str) and key in _SHOWN:
        yield key, re.sub(r"\$\{?\w+(?::\w+)?\}?", "7", node)


def messages(named: bool = False) -> Iterator[Text]:
    """Strings in the code that are sentences: errors, logs, output. Docstrings and declarations are elsewhere.
    ``named``: what is filled in is shown by its name in braces, else as a 7.
    """
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        quoted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = _literal(node, named) if id(node) not in quoted | inside else None
            if text is not None and _is_sentence(text):
                yield Text(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text, "message")


# A pattern, PromQL, a template, a shell command or XML.
_CODE: Final = (
    r"[{(\[]\?|\\[bswd]|\n  |function |(?:by|on) \(|topk\(|\{\{|^<|\| grep"
    r"|^(?:kubectl|journalctl|systemctl|dmesg|curl|for p) "
)


def _is_sentence(text: str) -> bool:
    """Whether a string is prose: no pattern, no code of another language, no help (see ``helps``), no
    message of the C library.
    """
    code = re.search(_CODE, text) or text == "Name or service not known"
    return not code and len(re.findall(r"[a-z]{2,}", text)) > 3


def _literal(node: ast.AST, named: bool) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _hole(part, named) for part in node.values
        )
    return None


def _hole(part: ast.expr, named: bool) -> str:
    """What is filled into a string: ``{the last name of the expression}``, so that a reader can judge the sentence."""
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    return f"{{{names[0]}}}" if named and names else "7"


def rendered(files: int = 14) -> Iterator[Text]:
    """Evidence, conditions, triage and mitigation of recorded engines: each sentence with its numbers, and each
    engine's page once.

    ``files`` recordings are taken evenly from all folders, and of each the first states of every verdict.
    """
    small = [path for path in sorted(RECORDINGS.rglob("*.jsonl.gz")) if path.stat().st_size <= 60_000]
    for path in small[:: max(1, len(small) // files)]:
        yield from of_recording(path)


def of_recording(path: Path) -> Iterator[Text]:
    """What the engines of one recording are described with."""
    pipeline, t, seen = Pipeline(builtin()), builtin(), Counter[Any]()
    with Reader(path, on_problem=lambda _: None) as reader:
        for snapshot in itertools.islice(reader, 300):
            state = pipeline.observe(snapshot)
            for engine in state.engines:
                kind = (engine.diagnosis.verdict, engine.diagnosis.grade, engine.up)
                if seen[kind] < 1:
                    yield from _engine(path, engine, state, t)
                seen[kind] += 1


def _engine(path: Path, engine: Any, state: State, t: Any) -> Iterator[Text]:
    made, triage = plan(engine, t), steps(engine, state, t)
    parts = [
        *(f"{item.text}" for item in engine.diagnosis.evidence.values()),
        *(one.text for one in standings(engine, t)),
        *(answer for step in triage for answer in (step.question, *step.answers)),
        made.summary,
        *(part for action in made.actions for part in (action.title, action.text)),
    ]
    where = f"{path.parent.name}/{path.stem.partition('.')[0]} {engine.diagnosis.verdict}"
    yield from (Text(where, part, "rendered") for part in parts)
    html = render_page(replace(state, engines=(engine,)), "node-1", "/metrics", ViewContext(t))
    shown = re.sub(r"<(script|style|svg|head|code|pre).*?</\1>", "", html, flags=re.S)
    yield Text(where, unescape(re.sub(r"\s*<[^>]*>\s*", "\n\n", shown)), "shown")


def _quoted(text: str) -> str:
    """Names in a sentence stay as they are written."""
    return re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"\1", text)


def everything() -> Iterator[Text]:
    """All of it."""
    for gather in (pages, rules, declarations, helps, dashboards, partial(messages, named=True), rendered):
        yield from gather()


if __name__ == "__main__":
    count, seed = (int(word) for word in (*sys.argv[1:], "30", "7")[:2])
    found = {
        one: text.where for text in everything() for one in sentences(_quoted(text.text), WHOLE) if len(one.split()) > 5
    }
    for one in random.Random(seed).sample(sorted(found), count):
        print(f"- {one}  [{found[one]}]")
