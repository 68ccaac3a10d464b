"""Situations of operation (``tests/bundle/situations``) as promtool cases, and what fired in each.

What the exporter derives from counters and the queue (rates, failures, the wait) is computed here by its own code from
the series of the situation.

Each situation is a cluster of its own, and those of like length are one promtool test: rules tell clusters apart
anyway, and an evaluation costs little more for many situations than for one.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil, isfinite, log2
from pathlib import Path
from typing import Any

import yaml

from kvpressure.advice.action import HARMS
from kvpressure.diagnosis.conditions import ALERTED
from kvpressure.diagnosis.finding import FROZEN_ROWS, Recent, View, slowest
from kvpressure.diagnosis.logic import GRADE_CONFIDENCE, Answer, Grade
from kvpressure.model import readings as r
from kvpressure.model.signals import BatchSignals, LatencySignals, LoadSignals, ProgressSignals, Signals
from kvpressure.settings.thresholds import Thresholds, builtin
from kvpressure.signals import requests
from kvpressure.signals.requests import FLOORS
from kvpressure.signals.window import EngineWindow

FILE = Path(__file__).parents[1] / "bundle" / "situations" / "situations.yaml"
MINUTES = 60.0
FINDING = "kvpressure_finding"
_LABELS_OF = {FINDING: ("finding",), "kvpressure_harm": ("harm", "level")}
USUALLY_ABANDONED = 0.02  # share of the requests of every situation
_TICK_SECONDS = 15.0  # of the exporter whose derived series are computed
_OF_SERIES = ("reason", "phase", "quantile", "verdict", "stage", "finding")  # labels beside those of the engine
_READ = frozenset(
    f"kvpressure_{name}"
    for name in (
        "engine_up",
        "requests_waiting",
        "requests_in_flight",
        "requests_finished_total",
        "requests_rejected_total",
        "latency_seconds",
        "latency_baseline_ratio",
        "no_progress_seconds",
        "verdict_confidence",
        "finding",
        "batch_collapse_ratio",
    )
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_REPEAT = re.compile(r"\(([^()]*)\) x(\d+)")
_SEGMENT = re.compile(r"([\d.]+)m (-?[\d.]+|-|_|NaN|\+[\d.]+/s)")
_FIRED = re.compile(r'\{alertname="(\w+)", severity="(\w+)", situation="([^"]+)"\}|\{situation="([^"]+)"\}')


@dataclass(frozen=True, slots=True)
class Fired:
    name: str
    severity: str

    @property
    def page(self) -> bool:
        """Whether it wakes somebody."""
        return self.severity == "critical"


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """One situation: its series as value runs, and what is expected. Minutes from its beginning."""

    name: str
    what: str
    expect: str
    given: Mapping[str, str]
    minutes: float = MINUTES
    by: tuple[str, ...] = ()
    ticket_by: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    within: float | None = None
    until: float | None = None
    still: float | None = None
    others_page: bool = False
    pages_only: bool = False
    excluded: str = ""
    scrape: float | None = None
    excluded_at: Mapping[float, str] = field(default_factory=dict)

    @property
    def series(self) -> Mapping[str, str]:
        """What is given, and what the exporter derives from it."""
        return _all_series(self)

    def why_excluded(self, scrape: float) -> str:
        """Why it is not expected to do what it should at this scrape interval; empty where it is."""
        return self.excluded or self.excluded_at.get(self.scrape or scrape, "")


@cache
def _all_series(situation: Situation) -> Mapping[str, str]:
    return with_derived(situation.given, situation.minutes)


def load() -> list[Situation]:
    document = yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [_situation(item, document["labels"], document["packs"]) for item in document["situations"]]


def _situation(item: Mapping[str, Any], labels: Mapping[str, str], packs: Mapping[str, Any]) -> Situation:
    series: dict[str, str] = {}
    for pack in ("exporters", *item.get("use", ())):
        series |= {named(name, labels): values for name, values in packs[pack].items()}
    for pack in item.get("also_from", ()):
        series |= {named(name, labels, "2"): values for name, values in packs[pack].items()}
    series |= {named(name, labels): values for name, values in item.get("series", {}).items()}
    minutes = float(item.get("minutes", _longest(series)))
    named_alerts = {name: tuple(item.get(name, ())) for name in ("by", "ticket_by", "silent")}
    as_written = ("within", "until", "still", "pages_only", "excluded", "scrape")
    return Situation(
        *(item["id"], item["what"], item["expect"], series, minutes),
        others_page=item.get("others") == "page",
        excluded_at={float(scrape): why for scrape, why in item.get("excluded_at", {}).items()},
        **named_alerts,
        **{name: item[name] for name in as_written if name in item},
    )


def _longest(series: Mapping[str, str]) -> float:
    lengths = [sum(length for length, _ in _segments(values)) for values in series.values()]
    return max((length for length in lengths if length < 900), default=MINUTES)


def named(name: str, labels: Mapping[str, str], node: str = "1") -> str:
    """The series with its short labels written out and the labels of its scrape added."""
    metric, _, body = name.partition("{")
    body = re.sub(r"\$(\w+)", lambda match: labels[match[1]], body.rstrip("}"))
    if found := re.search(r",?@(\d)", body):
        node, body = found[1], body.replace(found[0], "")
    ours = metric.startswith("kube_") is False
    scrape = (
        {"job": "kvpressure", "instance": f"node-{node}:9846", "node": f"node-{node}"}
        if ours
        else {"job": "kube-state-metrics", "instance": "ksm:8080"}
    )
    present = {match[1] for match in re.finditer(r'(\w+)="', body)}
    if "instance" in present and "node" not in present:
        scrape.pop("node", None)
    own = [f'{label}="{value}"' for label, value in scrape.items() if label not in present]
    return f"{metric}{{{','.join([*filter(None, [body]), *own])}}}"


def _segments(values: str) -> list[tuple[float, str]]:
    text = str(values)
    while found := _REPEAT.search(text):
        text = text.replace(found[0], "; ".join([found[1]] * int(found[2])), 1)
    parts = [_SEGMENT.fullmatch(part.strip()) for part in text.split(";")]
    assert all(parts), f"not understood: {values!r}"
    return [(float(part[1]), part[2]) for part in parts if part]


def with_derived(series: Mapping[str, str], minutes: float) -> dict[str, str]:
    """The series with those that the exporter derives from them for each engine."""
    engines: dict[tuple[tuple[str, str], ...], dict[tuple[str, ...], list[float | None]]] = {}
    for name, values in series.items():
        metric, _, body = name.partition("{")
        labels = dict(_LABEL.findall(body))
        if "engine" in labels and metric in _READ:
            kind = tuple(labels.pop(label, "") for label in _OF_SERIES if label in labels)
            key = tuple(sorted(labels.items()))
            engines.setdefault(key, {})[(metric, *kind)] = levels(values, minutes, _TICK_SECONDS)
    found = {**_pods(series, minutes), **series}
    found |= pools(found, minutes)
    for key, read in engines.items():
        for (metric, *kind), values in _derived(read).items():
            labels = _LABELS_OF.get(metric, ("phase",))
            extra = [f'{label}="{value}"' for label, value in zip(labels, kind, strict=False)]
            body = ",".join([*(f'{label}="{value}"' for label, value in key), *extra])
            name = f"{metric}{{{body}}}"
            for old in [one for one in found if kind and _same_series(one, name)]:
                del found[old]  # the exporter masks it
            found[name] = _as_runs(values)
    return found


def _pods(series: Mapping[str, str], minutes: float) -> dict[str, str]:
    """Which pods answer, from their engines: one that is read and not up refuses, unless its pod starts."""
    ups: dict[tuple[tuple[str, str], ...], list[list[float | None]]] = {}
    starting: dict[tuple[str, str], list[float | None]] = {}
    for name, values in series.items():
        metric, _, body = name.partition("{")
        labels = dict(_LABEL.findall(body))
        if metric == "kvpressure_engine_up":
            key = {one: text for one, text in labels.items() if one not in ("model_name", "engine", "role", "revision")}
            ups.setdefault(tuple(sorted(key.items())), []).append(levels(values, minutes, _TICK_SECONDS))
        elif metric == "kvpressure_pod_starting":
            starting[labels["namespace"], labels["pod"]] = levels(values, minutes, _TICK_SECONDS)
    found = {}
    for key, engines in ups.items():
        named = dict(key)
        own = starting.get((named.get("namespace", ""), named.get("pod", "")), [])
        answers: list[float | None] = []
        for tick, values in enumerate(zip(*engines, strict=True)):
            up = min((one for one in values if one is not None), default=None)
            starts = tick < len(own) and own[tick] == 1
            answers.append(None if starts and not up else up)
        body = ",".join(f'{label}="{value}"' for label, value in key)
        found[f"kvpressure_pod_answers{{{body}}}"] = _as_runs(answers)
    stated = {_pod_of(name) for name in series if name.startswith("kvpressure_pod_answers{")}
    return {name: values for name, values in found.items() if _pod_of(name) not in stated}


def pools(series: Mapping[str, str], minutes: float) -> dict[str, str]:
    """Which pools have an engine that answers, in a pod that does."""
    refusing = {
        _pod_of(name): [one == 0 for one in levels(values, minutes, _TICK_SECONDS)]
        for name, values in series.items()
        if name.startswith("kvpressure_pod_answers{")
    }
    found: dict[str, list[float | None]] = {}
    for name, values in series.items():
        metric, _, body = name.partition("{")
        labels = dict(_LABEL.findall(body))
        if metric == "kvpressure_engine_up" and labels.get("model_name"):
            own = ",".join(f'{key}="{text}"' for key, text in labels.items() if key not in ("pod", "engine"))
            ups = levels(values, minutes, _TICK_SECONDS)
            refuses = refusing.get(_pod_of(name), [False] * len(ups))
            before = found.get(f"kvpressure_pool_answers{{{own}}}", [None] * len(ups))
            found[f"kvpressure_pool_answers{{{own}}}"] = [
                1.0 if one or (up == 1 and not refused) else None
                for one, up, refused in zip(before, ups, refuses, strict=True)
            ]
    return {name: _as_runs(answers) for name, answers in found.items()}


def _pod_of(name: str) -> tuple[str | None, ...]:
    labels = dict(_LABEL.findall(name))
    return tuple(labels.get(one) for one in ("cluster", "namespace", "pod"))


def _same_series(one: str, other: str) -> bool:
    metric, _, body = one.partition("{")
    return metric == other.partition("{")[0] and set(_LABEL.findall(body)) == set(_LABEL.findall(other))


def _derived(read: Mapping[tuple[str, ...], list[float | None]]) -> dict[tuple[str, ...], list[float | None]]:
    """What the exporter publishes at each tick."""
    window, t = EngineWindow(), builtin()
    out: dict[tuple[str, ...], list[float | None]] = {}
    count = max(len(values) for values in read.values())
    for tick in range(count):
        now = {key: values[tick] for key, values in read.items() if values[tick] is not None}
        published: dict[tuple[str, ...], float | None] = {}
        if ("kvpressure_engine_up",) not in read or now.get(("kvpressure_engine_up",)):
            published = _tick(window, tick * _TICK_SECONDS, now, t)
        for key, value in published.items():
            out.setdefault(key, [None] * count)[tick] = value
    return {key: values for key, values in out.items() if any(value is not None for value in values)}


def _tick(
    window: EngineWindow, at: float, now: Mapping[tuple[str, ...], float | None], t: Thresholds
) -> dict[tuple[str, ...], float | None]:
    waiting = now.get(("kvpressure_requests_waiting",)) or 0.0
    present = now.get(("kvpressure_requests_in_flight",)) or waiting
    counters: dict[str, float] = {}
    page: dict[str, float] = {}
    for (metric, *kind), value in now.items():
        if metric == "kvpressure_requests_finished_total":
            counters[r.FINISHED_PREFIX + kind[0]] = value or 0.0
        elif metric == "kvpressure_requests_rejected_total" and kind[0].startswith("http_"):
            page[r.HTTP_PREFIX + kind[0].removeprefix("http_")] = value or 0.0
        elif metric == "kvpressure_requests_rejected_total":
            counters[r.REJECTED_PREFIX + kind[0]] = value or 0.0
    window.observe(at, {r.RUNNING: max(0.0, present - waiting), r.WAITING: waiting}, counters, {}, page)
    p95 = {phase: now.get(("kvpressure_latency_seconds", phase, "0.95")) for phase in FLOORS}
    known = {phase: seconds for phase, seconds in p95.items() if seconds is not None and isfinite(seconds)}
    ratios = {phase: ratio for phase in known if (ratio := now.get(("kvpressure_latency_baseline_ratio", phase)))}
    times = LatencySignals(
        baseline_ratios=ratios,
        usual={phase: known[phase] / ratio for phase, ratio in ratios.items()},
        **{phase: {"0.95": seconds} for phase, seconds in known.items()},
    )
    lost = requests.Lost()
    found = requests.request_signals(window, lost, requests.ended(window, lost), USUALLY_ABANDONED, t)
    (verdict, *stage), confidence = next(
        ((kind, value) for (metric, *kind), value in now.items() if metric == "kvpressure_verdict_confidence"),
        ([""], 0.0),
    )
    stuck = now.get(("kvpressure_no_progress_seconds",))
    signals = Signals(
        time=at,
        latency=times,
        requests=found,
        load=LoadSignals(
            running=None if stuck is None else max(0.0, present - waiting),
            waiting=now.get(("kvpressure_requests_waiting",)),
            in_flight=now.get(("kvpressure_requests_in_flight",)),
        ),
        progress=ProgressSignals(work_present=None if stuck is None else True, seconds_without_progress=stuck),
        batch=BatchSignals(batch_collapse_ratio=now.get(("kvpressure_batch_collapse_ratio",))),
    )
    view = View(signals, Recent(()), t, readings=9)
    row = FROZEN_ROWS[0] if now.get((FINDING, "metrics_frozen")) else ""
    view.answer = Answer(verdict, max(one for one in Grade if GRADE_CONFIDENCE[one] <= (confidence or 0.0)), row)
    view.stage = stage[0] if stage else None
    published: dict[tuple[str, ...], float | None] = {
        ("kvpressure_requests_lost_ratio",): found.requests_lost_ratio,
    }
    slow = slowest(view)
    felt = {"slow": slow and slow.seconds, "losing_requests": found.requests_lost_ratio, "stuck": stuck}
    felt["answers_suspect"] = None  # no situation has transfers
    for finding in ALERTED:
        holds = finding.find(view)
        if finding.name in HARMS:
            harm = HARMS[finding.name]
            published["kvpressure_harm", harm.name, harm.level] = felt.get(harm.name, 1.0) if holds else None
        else:
            published[FINDING, finding.name] = holds
    return published


def _as_runs(values: Sequence[float | None]) -> str:
    """Values at ticks as the runs of a situation."""
    runs: list[list[Any]] = []
    for value in values:
        word = "-" if value is None else f"{value:.6f}"
        if runs and runs[-1][1] == word:
            runs[-1][0] += 1
        else:
            runs.append([1, word])
    return "; ".join(f"{length * _TICK_SECONDS / 60:g}m {word}" for length, word in runs)


def levels(values: str, minutes: float, step: float) -> list[float | None]:
    """The value runs at every step; ``None`` where there is no sample."""
    out: list[float | None] = []
    for word in _words(values, minutes, step):
        out.append(None if word in ("_", "stale") else float(word))
    return out


def samples(values: str, minutes: float, scrape: float) -> str:
    """The value runs as promtool's notation at one scrape interval; a series that ends gets one staleness marker."""
    return " ".join(_runs(_words(values, minutes, scrape)))


def _words(values: str, minutes: float, scrape: float) -> list[str]:
    out: list[str] = []
    present, level, began = False, 0.0, 0.0
    segments = _segments(values)
    ends = []
    for length, _ in segments:
        began += length * 60
        ends.append(began)
    index, last = 0, 0.0
    for number in range(int(minutes * 60 / scrape) + 1):
        now = number * scrape
        while index < len(ends) - 1 and now >= ends[index]:
            level, last = _advance(segments[index][1], level, ends[index] - last), ends[index]
            index += 1
        kind = segments[index][1]
        if kind == "_":
            out.append("_")
            continue
        if kind == "-" or now > ends[-1]:
            out.append("stale" if present else "_")
            present = False
            continue
        level, last = _advance(kind, level, now - last), now
        out.append("NaN" if kind == "NaN" else f"{level:g}" if abs(level) < 1e5 else f"{level:.0f}")
        present = True
    return out


def _advance(kind: str, level: float, seconds: float) -> float:
    if kind.startswith("+"):
        return level + float(kind[1:-2]) * seconds
    return level if kind in ("-", "_", "NaN") else float(kind)


def _runs(values: Sequence[str]) -> Iterator[str]:
    """Equal samples in a row in one word, where promtool has one for them."""
    start = 0
    for end in range(1, len(values) + 1):
        if end < len(values) and values[end] == values[start]:
            continue
        count, value = end - start, values[start]
        if value == "_":
            yield f"_x{count}" if count > 1 else "_"
        elif value in ("NaN", "stale"):
            yield from [value] * count
        else:
            yield f"{value}+0x{count - 1}" if count > 1 else value
        start = end


def doubled(series: Mapping[str, str]) -> dict[str, str]:
    """Each series once more, as a second exporter, another job, other node and GPU numbers would publish it."""
    copies = {}
    for name, values in series.items():
        copy = re.sub(r'\bnode="([^"]*)"', r'node="ip-\1"', name)
        copy = re.sub(r'\bjob="([^"]*)"', r'job="\1-copy"', copy)
        copy = re.sub(r'\binstance="([^"]*)"', r'instance="copy-\1"', copy)
        copies[re.sub(r'\bgpu="(\d+)"', r'gpu="1\1"', copy)] = values
    return {**series, **copies}


def in_cluster(name: str, situation: str) -> str:
    """The series as one of the situation's own cluster, or of one of its clusters."""
    if 'cluster="' in name:
        return re.sub(r'\bcluster="([^"]*)"', rf'cluster="{situation}/\1"', name)
    return name.replace("{", f'{{cluster="{situation}",', 1)


def questions(situation: Situation, scrape: float) -> Iterator[dict[str, Any]]:
    """Queries for what fired, with expectations that are empty, so that promtool prints what there is."""
    firing = f'ALERTS{{alertstate="firing",alertname!="KvpressureWatchdog",cluster=~"{situation.name}(/.*)?"}}'
    minutes = situation.minutes
    asked = {"all": (minutes, minutes)}
    if situation.within is not None:
        late = situation.within + 2 * scrape / 60
        asked["within"] = (late, late)
    if situation.until is not None:
        asked["until"] = (minutes, minutes - situation.until)
    if situation.still is not None:
        asked["still"] = (situation.still, 1)
    for kind, (at, window) in asked.items():
        fired = f"max by (alertname, severity) (max_over_time({firing}[{window * 60:.0f}s]))"
        yield {
            "expr": f'label_replace({fired}, "situation", "{situation.name} {kind}", "", "")',
            "eval_time": f"{int(at * 60)}s",
            "exp_samples": [],
        }


def case(situations: Sequence[Situation], scrape: float, double: bool) -> dict[str, Any]:
    """Situations with the same scrape interval as one promtool test."""
    return {
        "interval": f"{scrape:g}s",
        "input_series": [
            {"series": in_cluster(name, one.name), "values": samples(values, one.minutes, scrape)}
            for one in situations
            for name, values in (doubled(one.series) if double else one.series).items()
        ],
        "promql_expr_test": [question for one in situations for question in questions(one, scrape)],
    }


def judge(
    rules: Path, situations: Iterable[Situation], folder: Path, scrape: float = 15, double: bool = False
) -> tuple[dict[tuple[str, str], set[Fired]], str]:
    """What fired, by situation and question, and promtool's own output (errors of rules are in it)."""
    alike: dict[tuple[float, int], list[Situation]] = {}
    for situation in situations:  # by doublings of an hour, because series that ended cost in every evaluation still
        length = ceil(log2(max(situation.minutes, MINUTES) / MINUTES))
        alike.setdefault((situation.scrape or scrape, length), []).append(situation)
    document = {
        "rule_files": [str(rules)],
        "group_eval_order": [group["name"] for group in yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]],
        "evaluation_interval": "60s",  # of what pages; shares of time are counted in evaluations
        "tests": [case(ones, every, double) for (every, _), ones in alike.items()],
    }
    file = folder / f"situations-{scrape:g}-{double}.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    command = ["promtool", "test", "rules", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    output = result.stdout + result.stderr
    found: dict[tuple[str, str], set[Fired]] = {}
    for match in _FIRED.finditer(output):
        if match[1]:
            name, _, kind = match[3].partition(" ")
            found.setdefault((name, kind), set()).add(Fired(match[1], match[2]))
    return found, output


def complaints(situation: Situation, found: Mapping[tuple[str, str], set[Fired]]) -> list[str]:
    """What is not as expected; nothing when all is."""
    fired = found.get((situation.name, "all"), set())
    pages = {item.name for item in fired if item.page}
    tickets = {item.name for item in fired if item.severity == "warning"}
    wrong: list[str] = []
    if situation.expect == "page":
        wrong += [f"{name} does not page" for name in situation.by if name not in pages | set(situation.ticket_by)]
        wrong += [] if pages else ["nothing pages"]
        if situation.by and not situation.others_page:
            wrong += [f"{name} pages too" for name in sorted(pages - set(situation.by) - {"InferenceKVCachePressure"})]
        if situation.within is not None:
            early = {item.name for item in found.get((situation.name, "within"), set()) if item.page}
            wrong += [] if early else [f"no page by minute {situation.within:g}"]
    else:
        wrong += [f"{name} pages" for name in sorted(pages)]
    if situation.expect == "ticket":
        wrong += [] if tickets else ["nothing raises a ticket"]
        wrong += [f"{name} raises no ticket" for name in situation.by if name not in tickets]
    if situation.expect == "nothing" and not situation.pages_only:
        wrong += [f"{name} raises a ticket" for name in sorted(tickets)]
    wrong += [f"{name} raises no ticket" for name in situation.ticket_by if name not in tickets]
    wrong += [f"{item.name} fires" for item in fired if item.name in situation.silent]
    for item in found.get((situation.name, "until"), set()):
        wrong += [f"{item.name} still pages after minute {situation.until:g}"] if item.page else []
    if situation.still is not None and not any(i.page for i in found.get((situation.name, "still"), set())):
        wrong.append(f"nothing pages any more at minute {situation.still:g}")
    return wrong
