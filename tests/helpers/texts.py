"""Every text of the project that a person reads, for the rules of style in ``tests.helpers.style``.

``python -m tests.helpers.texts 30 7`` prints thirty sentences picked with seed 7.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from kvpressure.printable import Asked
from kvpressure.publish.metrics import METRICS
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.recording.reader import Reader
from kvpressure.settings.groups import grouped
from kvpressure.settings.settings import options
from kvpressure.settings.thresholds import builtin
from tests.helpers.prose import WHOLE, annotations, documents, sentences
from tests.helpers.style import Text

# Pages for people who judge or change the project: what was measured, and how the code is made.
_NOT_FOR_USERS: Final = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/accuracy.md",
    "docs/alert-proof.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/fuzz-and-soak.md",
    "docs/gpu-hardware.md",
    "docs/mitigations.md",
    "docs/real-vllm.md",
    "docs/vllm-testbed.md",
)
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
    "instance": "10.0.0.7:9846",
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
    "cluster": "eu-1",
    "role": "decode",
}
_FIRING: Final = {  # values with which an alert fires, where the usual ones would not fit its threshold
    "GpuCountLow": "2",
    "GpuXidError": "79",
    "InferenceBatchCollapse": "2",
    "InferenceCapacityLost": "41%",
    "InferenceGpuMemoryUtilizationHigh": "0.92",
    "InferenceKVCachePressure": "98%",
    "InferenceMemoryFragmentation": "2.9G",
    "InferenceTokenLatencyHigh": "820ms",
    "KvpressureExportersMissing": "41%",
    "KvpressureNodesUnwatched": "2",
    "KvpressureScrapeIntervalTooLong": "9",
}
_FILLED: Final = {  # placeholders of evidence and conditions
    "outside": "62 %",
    "used": "93 %",
    "running": "7",
    "queue": "41 waiting, 7 running",
    "in_flight": "48",
    "level": "98 % now, recent peak 99 %",
    "held": "45 % of the KV cache",
    "long_blocked": "1 200 tokens free; p95 prompt 3 000 tokens",
    "mean_blocked": "1 200 tokens free; mean prompt 1 300 tokens",
    "prefill_rates": "1 539 prompt tokens/s, 25 output tokens/s",
    "oom_seen": "1 time in the last 10 minutes, without numbers",
    "scrape_error": "connection refused",
    "preempted": "preempted",
    "kv_full": "97 %",
    "kv_near": "80 %",
    "kv": "98 %",
    "gpu": "NVML utilization 9 %",
    "free_and_prompts": "1 200 tokens free; p95 prompt 3 000 tokens",
    "preemptions": "preemptions",
    "page_error": ": connection refused",
    "failing": "",
    "rates": "1 539 prompt tokens/s, 252 output tokens/s",
    "worst_phase": "time to first token",
    "log_window": "10 minutes",
    "ended": "OOMKilled, exit code 137, 2 min ago",
    "restarts": "4 restarts in half an hour",
    "kv_why": "this engine does not report it",
    "silent": "3",
    "recent_preemptions": "12",
    "preemptions_counted": "44",
    "per_running": "1.4",
    "preemption_counts": "44 (counted by vLLM), 0 (inferred from queue movement)",
    "hits": "12 %",
    "usual_hits": "71 %",
    "max_num_seqs": "max_num_seqs",
    "limit_of_source": "256 (the default)",
    "limit_unless_default": "the limit is 256",
    "running_of_limit": "limit 256 (set in the arguments), 7 running now",
    "mean_queue": "mean 40 waiting, 7 running, queue time p95 4.2 s",
    "waiting_mean": "5.8 requests on average",
    "deferred_where": "only vLLM 0.20 and later reports deferred requests",
    "age": "12",
    "readings": "30",
    "stuck": "24",
    "still": "24 s",
    "still_from": "8 s",
    "usual_prefill": "6",
    "per_request": "0.2",
    "step_ratio": "2.6",
    "cached": "",
    "starved": "15 %",
    "gpu_known": "NVML utilization 9 % does not show it",
    "throttled": "62 %",
    "contended": "31 %",
    "cpu_used": "96 %",
    "api_cores": "1.02",
    "worst_ratio": "3.1",
    "trend": "41 %",
    "allocations": "2",
    "leak": "2.1 GiB",
    "leak_from": "1 GiB",
    "held_from": "10 %",
    "held_stretches": "2",
    "held_seconds": "60 s",
    "held_now": ": 2 % used, 0 requests in flight",
    "movement": "gauges or counters are moving",
    "to_full": "42",
    "to_full_from": "60",
    "fragmented": "3.1 GiB",
    "fragmented_from": "2 GB",
    "split": "0.9 GiB",
    "split_from": "25 %",
    "device": "97 %",
    "device_now": ": 91 % used",
    "utilization": "90 %",
    "baseline_from": "98 %",
    "host_memory": "93 %",
    "host_memory_from": "90 %",
    "loop_from": "3",
    "faults": "1",
}
# Files whose strings are read elsewhere: on generated pages, dashboards, dashboards of facts, or not by people at all.
_SHOWN_ELSEWHERE: Final = (
    # details, which follow a reason and a name
    "exporter/kvpressure/publish/web/tls.py",
    "exporter/kvpressure/recording/fields.py",
    "exporter/kvpressure/recording/recorder.py",
    "exporter/kvpressure/sources/gpu/",
    "exporter/kvpressure/sources/host/",
    "exporter/kvpressure/sources/kubernetes/",
    "exporter/kvpressure/sources/plugin_metrics.py",
    "exporter/kvpressure/sources/scrape/lines.py",
    # read elsewhere
    "deploy/",
    "exporter/kvpressure/advice/condition_text.py",
    "exporter/kvpressure/advice/mitigation.py",
    "exporter/kvpressure/advice/plan.py",
    "exporter/kvpressure/advice/triage.py",
    "exporter/kvpressure/bundle/",
    "exporter/kvpressure/demo/page.py",
    "exporter/kvpressure/demo/counters.py",
    "exporter/kvpressure/demo/enginelog.py",
    "exporter/kvpressure/diagnosis/",
    "exporter/kvpressure/engines/vllm/log_lines.py",
    "exporter/kvpressure/engines/sglang/log_lines.py",
    "exporter/kvpressure/model/",
    "exporter/kvpressure/publish/metrics.py",
    "exporter/kvpressure/publish/reference.py",
    "exporter/kvpressure/settings/",
    "exporter/kvpressure/capacity/models.py",
    "exporter/kvpressure/capacity/shapes.py",
)
_VALUES: Final = {  # by the name of what is filled into a message
    "titles": "vLLM or SGLang",
    **_LABELS,
    **_FILLED,
    "limit": "256",
    "where": "values.yaml",
    "path": "incident.jsonl.gz",
    "file": "config.json",
    "error": "connection refused",
    "strerror": "Permission denied",
    "flag": "--max-num-seqs",
    "address": "http://10.0.0.7:8000",
    "url": "http://10.0.0.7:9090",
    "title": "vLLM 0.11.0",
    "text": "12x",
    "value": "12x",
    "key": "alerts",
    "name": "chat/llama-0",
    "named": "requests running: 24",
    "called": "max_num_seqs",
    "_called": "max_num_seqs",
    "percent_text": "30 %",
    "number_text": "4",
    "percent": "30 %",
    "seconds": "30",
    "seconds_text": "0.8 s",
    "join": "a, b or c",
    "describe": "text",
    "count": "3",
    "_count": "3",
    "len": "3",
    "tokens": "4 096",
    "longest": "5 120",
    "requests": "12",
    "needed": "40",
    "length": "1 024",
    "least": "1",
    "now": "current max_num_seqs: 128 (from the arguments)",
    "recommended": "64",
    "input_tokens": "2 048",
    "output_tokens": "512",
    "capacity": "32 768",
    "capacity_tokens": "32 768",
    "blocks": "2 048",
    "block_size": "16",
    "cache_dtype": "fp8",
    "tensor": "3",
    "heads": "32",
    "kv_heads": "8",
    "wanted": "llama",
    "version": "0.11.0",
    "vllm_version": "11",
    "max_model_len": "131 072",
    "max_num_seqs": "256",
    "max_num_batched_tokens": "8 192",
    "gpu_memory_utilization": "0.9",
    "bytes_text": "1.2 GiB",
    "verdict_words": "KV pressure",
    "confidence": "0.95",
    "cause": "the KV cache is full",
    "_times": "2.1",
    "origin": "documented",
    "share": "12 %",
    "port": "8000",
    "_root": "/sys",
    "root": "/sys",
    "run": "7",
    "fatal": "library_mismatch: driver replaced",
    "out": "out.jsonl",
    "message": "unrecognized arguments: --vlm.target",
    "prog": "kvpressure audit",
    "kinds": "Service",
    "served": "meta-llama/Llama-3.1-8B",
    "busy": "3 running, 2 waiting",
    "missing": "1.8",
    "bytes": "1.8",
    "own": "8 192",
    "bytes_per_token": "131 072",
    "_one_line": "no such file",
    "_words": "no such file",
    "end": "30",
    "start": "60",
    "ticks": "150",
    "scrapes": "450",
    "gap": "15",
    "MAX_SECONDS": "600",
    "MAX_TARGETS": "16",
    "MAX_SERVERS": "16",
    "MAX_PODS": "32",
    "MAX_BYTES": "8 388 608",
    "exporter": "127.0.0.1:9846",
    "target_": "",
    "first": "41 waiting",
    "last": "0 waiting",
    "found": "--max-num-seqs",
    "silent": "30",
    "hanging": "12",
    "known": "chat/llama-0, chat/llama-1",
    "baseline": "0.2 s",
    "timeout_seconds": "60",
    "option": "--api-key-file",
    "usual": "8 192",
    "lower": "2 048",
    "seqs": "256",
    "selector": "vllm:num_requests_running",
    "since_seconds": "3 600",
    "directory": "out",
    "HERE": "deploy",
    "dialect": "vLLM",
    "command": "serve",
    "concurrent": "11",
    "prompt": "2 048",
    "longest_": "",
    "min": "2",
    "layers": "32",
    "pipeline": "64",
    "context": "8 192",
    "model": "meta-llama/Llama-3.1-8B",
    "more": "",
    "hint": "",
    "note": "",
    "near": "diagnose",
    "owner": "Helm",
    "before": "$SEQS",
    "gone": "the certificate",
    "weaker": "basic authentication",
    "policy": "RequireAnyClientCert",
    "refused": "evil.test",
    "problem": "address already in use",
    "HEAD_LIMIT": "16 384",
    "line_num": "7",
    "number": "7",
    "row": "12x",
    "recordings": "a.jsonl.gz, b.jsonl.gz",
    "server": "http://10.0.0.7:8000",
    "sum": "1 200",
    "at": "30",
    "by": "5",
    "speed": "5",
    "say": "requests are waiting",
    "reason_text": "connection refused",
    "words": "time to first token",
    "worst": "2.4",
    "measured": "5 preemptions instead of 40",
    "measured_where": " on a vLLM test server",
    "said": "reject prompts above 2 048 tokens (HTTP 413)",
    "_headline": "not recovered",
    "low": "5",
    "high": "600",
    "filename": "out",
}
# Names that mean something else in every file: filled in from ``_VALUES_IN`` alone.
_OF_ITS_FILE: Final = frozenset(
    {
        "where",
        "text",
        "name",
        "error",
        "join",
        "title",
        "value",
        "problem",
        "path",
        "count",
        "len",
        "key",
        "found",
        "kinds",
        "_one_line",
        "_words",
        "flag",
        "label",
        "field",
        "describe",
        "number",
        "size",
        "wanted",
        "missing",
        "at",
        "message",
        "_called",
        "called",
        "named",
        "out",
        "url",
        "address",
        "what",
    }
)
_IN_USE: Final = "127.0.0.1:9846: address already in use"
_VALUES_IN: Final[Mapping[str, Mapping[str, str]]] = {  # file -> name or expression -> what it holds there
    "capacity/kvbytes.py": {
        "', '.join(CACHE_DTYPES)": "auto, bfloat16, fp8",
        "', '.join((*_MLA_PLAIN, *_MLA_ONLY))": "auto, bfloat16, fp8_ds_mla",
        "', '.join(_HEAD_BYTES)": "auto, bfloat16, fp8",
        "cache_dtype": "int4",
        "heads // kv_heads": "4",
        "context": "3",
        "name": "llama-3.1-8b",
        "size": "3",
        "block_size": "0",
    },
    "capacity/load.py": {"where": "--prompt", "part": "p95=12x", "text": "p95=4000,p50=1000"},
    "capacity/plan.py": {"name": "my-model"},
    "cli/bundle.py": {"error": "division by zero"},
    "cli/capacity.py": {"flag": "--max-num-seqs", "options.max_num_seqs": "8 192"},
    "cli/demo.py": {"error": _IN_USE, "flag": "--for", "text": "12x", "low": "60", "high": "86400"},
    "cli/discover.py": {"flag": "context"},
    "cli/mitigate.py": {"flag": "--container", "name": "chat/llama-0", "join": "chat/llama-1"},
    "cli/probe.py": {
        "name": "chat/llama-0",
        "'; '.join((stage.note for stage in plan))": "step 2 needs more than 64 tokens",
        "join": "meta-llama/Llama-3.1-8B",
        "wanted": "llama",
        "error": "config.json: no such file",
        "said": "12 requests with 40 000 tokens in all will be sent to chat/llama-0",
    },
    "cli/record.py": {"out": "incident.txt", "error": "the file is full", "text": "12x"},
    "cli/replay.py": {"path": "incident.om", "error": "Permission denied", "value": "30", "join": "incident.jsonl.gz"},
    "cli/serve.py": {"name": "web.listen-address", "directory": "/srv/recordings"},
    "cli/__init__.py": {
        "message": "unrecognized arguments: --vllm.target",
        "flag": "--vllm.target",
        "now": "--engine.target",
        "near": "--engine.target",
        "prog": "kvpressure diagnose",
    },
    "demo/requests.py": {"self.max_num_seqs": "16 384"},
    "demo/prometheus_stack.py": {"error": "connection refused"},
    "extension_points.py": {"what": "the engine triton", "error": "No module named 'triton'"},
    "engines/registry.py": {"name": "vllm"},
    "publish/web/webconfig.py": {
        "where": "web.yaml:3",
        "name": "alice",
        "path": "web.yaml",
        "problem": "line 3: not YAML",
    },
    "recording/recorder.py": {"path": "incident.jsonl.gz", "out": "incident.jsonl.gz"},
    "recording/fields.py": {"describe": "text"},
    "recording/format.py": {"describe": "text", "name": "alerts", "key": "alerts"},
    "signals/registry.py": {"name": "queue_age", "error": "no metric is declared", "join": "kvpressure_engine_up"},
    "sources/kubernetes/grpc_call.py": {"path": "/var/lib/kubelet/pod-resources/kubelet.sock"},
    "sources/scrape/targets.py": {
        "url": "'10.0.0.5: port'",
        "cause": "Port could not be cast to integer value as ' port'",
        "text": "'10.0.0.5:8000;tls=skip-verify;args=--model llama'",
        "policy": "skip-verify",
        "error": "no closing quotation",
        "name": "10.0.0.5:port/",
    },
    "toolbox/audit_running_server.py": {"address": "http://10.0.0.7:9846"},
    "toolbox/cluster.py": {"where": "-n chat", "count": "45", "len": "45", "error": "kubectl: forbidden"},
    "toolbox/discovering.py": {"address": "http://10.0.0.7:9846", "error": "kubectl: forbidden"},
    "toolbox/fetch.py": {"where": "--exporter: http://10.0.0.7:9846/api/v1/diagnosis", "why": "connection refused"},
    "toolbox/changed_flags.py": {
        "', '.join(wrong)": "--max-num-seqs",
        "join": "sh -c 'vllm serve $MODEL $ARGS'",
    },
    "toolbox/inputs.py": {
        "error": "./chat: Permission denied",
        "address": "http://10.0.0.7:9846",
        "server.flag(name)": "--max-nun-seqs",
        "server.flag(meant)": "--max-num-seqs",
        "title": "vLLM",
        "path": "incident.jsonl.gz",
        "'; '.join(reasons or silent)": "chat/llama-0: connection refused",
    },
    "toolbox/kubectl.py": {"error": "forbidden"},
    "toolbox/kv_block_meter.py": {
        "where": "http://10.0.0.7:8000",
        "name": "http://10.0.0.7:8000",
        "why": "connection refused",
    },
    "toolbox/manifests.py": {
        "where": "chat.yaml",
        "path": "chat.yaml",
        "problem": "2 containers run vLLM",
        "join": "vllm, draft",
        "kinds": "Service",
        "error": "Permission denied",
    },
    "toolbox/recorded_traffic.py": {"path": "incident.jsonl.gz"},
    "toolbox/patches.py": {"title": "pod chat/llama-0"},
    "toolbox/prometheus.py": {
        "url": "10.0.0.7:9090",
        "where": "--prometheus: http://10.0.0.7:9090",
        "count": "24",
        "len": "24",
    },
    "toolbox/mitigation_check.py": {"name": "http://10.0.0.7:8000", "error": "connection refused"},
    "toolbox/traffic.py": {
        "path": "trace.csv",
        "error": "unexpected end of data",
        "key": "input_tokens",
        "name": "input_tokens",
        "text": "12x",
    },
    "toolbox/workload.py": {
        "name": "chat",
        "title": "deploy/chat",
        "pod": "llama-0",
        "error": "kubectl: forbidden",
    },
}
_NO_VALUE: Final = "\0"
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
            yield Text(f"{source}/{profile}/{alert}.{field}", _notified(text, alert))


def _notified(text: str, alert: str) -> str:
    """An annotation as a receiver shows it: the first of two branches, every label and value filled in."""
    text = re.sub(r' \| reReplaceAll "[^"]+" ""', "", text)
    text = re.sub(r"\{\{ else \}\}.*?(?=\{\{ end \}\})", "", text)
    text = re.sub(
        r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}",
        lambda found: found[2].replace("{{ . }}", _LABELS[found[1]]),
        text,
    )
    return re.sub(r"\{\{(.*?)\}\}", lambda found: _value(found[1], alert), text, flags=re.S)


def _value(code: str, alert: str) -> str:
    if re.match(r"\s*(?:with|if|else|end|range)\b", code):
        return ""
    label = re.search(r"\$labels\.(\w+)|label \"(\w+)\"", code)
    if label is not None:
        name = label[1] or label[2]
        return "ValueError" if (alert, name) == ("KvpressureIsolatedFailure", "reason") else _LABELS.get(name, "7")
    if "first" in code:  # a recommended limit, for which the rule asks Prometheus
        return "96" if "%.0f" in code else "0.7"
    if alert in _FIRING and (_FIRING[alert].endswith("ms") is ("humanizeDuration" in code)):
        return _FIRING[alert]
    forms = {
        "humanizePercentage": "93%",
        "humanizeDuration": "4m 10s",
        "humanize1024": "3.1Gi",
        "%.0f": "42",
        "%.1f": "3.2",
        "%.2f": "0.92",
    }
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
    for kind, names in (("evidence", FACTS), ("condition", BUILT_IN)):
        for where in (f"{kind} {name} {value}" for name in names for value in _VALUE):
            yield Text(where, re.sub(r"\{(\w+)\}", _filled, _declared(where)))


_VALUE: Final[Mapping[str, bool | None]] = {"true": True, "false": False, "unknown": None}
_DECLARED: Final = ("evidence ", "condition ")
_ABSENT: Final = {  # numbers that a value goes without
    "true": frozenset({"readings"}),
    "false": frozenset({"running", "in_flight", "rates", "waiting_mean", "held", "oom_seen", "scrape_error"}),
}


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
            yield from _shown(value, f"{name} {node['title']}" if name == "description" and "title" in node else name)
    elif isinstance(node, list):
        for value in node:
            yield from _shown(value, key)
    elif isinstance(node, str) and key.partition(" ")[0] in _SHOWN:
        yield key, re.sub(r"\$\{?\w+(?::\w+)?\}?", "7", node)


def messages() -> Iterator[Text]:
    """Strings in the code that are sentences: errors, logs, output; what is filled in is a 7. Docstrings and
    declarations are elsewhere.
    """
    for path, node in _strings():
        text = _literal(node, lambda _: "7")
        if text is not None and _is_sentence(text):
            yield Text(f"{path}:{getattr(node, 'lineno', 0)}", text, "message")


def said() -> Iterator[Text]:
    """The same with plausible values, for reading. Left out: help texts, declarations and parts of generated pages,
    which other functions give as a reader sees them, fragments, and what needs a value that ``_VALUES`` lacks or that
    differs from file to file and is not in ``_VALUES_IN``.
    """
    for path, node in _strings(spoken=True):
        values = _VALUES_IN.get(path.removeprefix("exporter/kvpressure/"), {})
        text = None if path.startswith(_SHOWN_ELSEWHERE) else _literal(node, partial(_plausible, values))
        if text is None or not _is_sentence(text) or _NO_VALUE in text:
            continue
        if re.match(r"an? (?!empty)|tls and", text):
            continue  # what is allowed, which follows a message
        if len(text.split()) > 4 and re.match(r"[A-Za-z-]", text) and not re.search(r"[\s:,(]$", text):
            yield Text(f"{path}:{getattr(node, 'lineno', 0)}", text, "message")


def _strings(spoken: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Every string of the code that is no docstring, no part of another string and no help of an option. ``spoken``:
    only those that are raised or printed, which are whole sentences.
    """
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
            elif isinstance(node, ast.keyword) and node.arg in ("help", "epilog"):
                inside |= {id(part) for part in ast.walk(node.value)}
        whole = (
            [one for node in ast.walk(tree) if _speaks(node) for one in ast.walk(node)] if spoken else ast.walk(tree)
        )
        yield from ((str(path.relative_to(ROOT)), node) for node in whole if id(node) not in inside)


def _speaks(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def _plausible(values: Mapping[str, str], part: ast.expr) -> str:
    """What may be filled in here: a value of its file, by the expression or its name, or one that fits everywhere."""
    if (code := ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)) in values:
        return values[code]
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    if not names:
        return _NO_VALUE
    return values.get(names[0]) or (_NO_VALUE if names[0] in _OF_ITS_FILE else _VALUES.get(names[0], _NO_VALUE))


# A pattern, PromQL, a template, a shell command or XML.
_CODE: Final = (
    r"^SELECT |^complete -c |[{(\[]\?|\\[bswd]|\n  |function |(?:by|on) \(|topk\(|\{\{|^<|\| grep"
    r"|^(?:kubectl|journalctl|systemctl|dmesg|curl|for p) "
)


def _is_sentence(text: str) -> bool:
    """Whether a string is prose: no pattern, no code of another language, no help (see ``helps``), no
    message of the C library.
    """
    code = re.search(_CODE, text) or text == "Name or service not known"
    return not code and len(re.findall(r"[a-z]{2,}", text)) > 3


def _literal(node: ast.AST, fill: Callable[[ast.expr], str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else fill(part) for part in node.values)
    return None


def rendered(files: int = 14) -> Iterator[Text]:
    """Evidence, conditions, triage and mitigation of recorded engines: each sentence with its numbers, and each
    engine's page once.

    ``files`` recordings are taken evenly from all folders.
    """
    small = [path for path in sorted(RECORDINGS.rglob("*.jsonl.gz")) if path.stat().st_size <= 60_000]
    for path in small[:: max(1, len(small) // files)]:
        yield from of_recording(path)


def of_recording(path: Path) -> Iterator[Text]:
    """What the engines of one recording are described with: once for each verdict, grade and set of true conditions."""
    pipeline, t, seen = Pipeline(builtin()), builtin(), Counter[Any]()
    with Reader(path, on_problem=lambda _: None) as reader:
        for snapshot in reader:
            state = pipeline.observe(snapshot)
            for engine in state.engines:
                true = tuple(name for name, value in engine.diagnosis.conditions.items() if value)
                kind = (engine.diagnosis.verdict, engine.diagnosis.grade, engine.up, true)
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
    where = f"{path.parent.name}/{path.name.removesuffix('.jsonl.gz')} {engine.diagnosis.verdict}"
    yield from (Text(where, part, "rendered") for part in parts)
    html = render_page(replace(state, engines=(engine,)), "node-1", "/metrics", ViewContext(t))
    shown = re.sub(r"<(script|style|svg|head|code|pre).*?</\1>", "", html, flags=re.S)
    yield Text(where, unescape(re.sub(r"\s*<[^>]*>\s*", "\n\n", shown)), "shown")


def read() -> Iterator[tuple[str, str]]:
    """(sentence, where) of everything, as a person reads it: whole sentences of prose, options with their help,
    messages and evidence with their values. No tables, headings and parts of sentences.
    """
    for text in itertools.chain(pages(), dashboards(), declarations(), rules()):
        if text.where.startswith("setting ") or text.where in _NOT_FOR_USERS:
            continue  # a setting is read as the option of a command
        if text.where.startswith(_DECLARED) and "{" in _declared(text.where):
            continue  # read with the numbers of a recording
        prose = re.sub(r"^(?:\||#).*$", "", text.text, flags=re.M)
        prose = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"\1", prose)  # names stay as they are written
        prose = prose.replace("**", "")
        whole = text.where.endswith(".summary") or text.where.startswith(_DECLARED)
        for one in sentences(prose, WHOLE):
            one = re.sub(r"^\d+\. ", "", one)
            if re.search(r"\{\w+\}", one) and text.kind == "page":
                continue  # a runbook's; the alert's summary has it with its values
            if whole or (re.match(r"[\w\"'(-]", one) and one.endswith((".", "?", "!"))):
                yield f"{_heading(text.where)}{one}", text.where
    for command, option, text in options_of_commands():
        yield f"{option}: {text}", f"{command} --help"
    for one in said():
        yield one.text, one.where
    for one in rendered():
        if one.kind == "rendered":
            # A driver names every GPU; published incidents do not.
            shown = one.text.replace("(not stated)", "(NVIDIA H100)")
            yield from ((sentence, one.where) for sentence in sentences(shown, WHOLE))


def _heading(where: str) -> str:
    """What a reader sees beside a sentence in the same row or panel: the name of a threshold or metric, or the panel's
    title; empty for prose.
    """
    kind, _, name = where.partition(" ")
    if kind in ("threshold", "metric"):
        return f"{name}: "
    return f'Panel "{name.partition(" ")[2]}": ' if kind.endswith(".json") and name.startswith("description ") else ""


def _declared(where: str) -> str:
    """A sentence as it is declared, for ``evidence FACT VALUE`` and ``condition NAME VALUE``."""
    kind, name, value = where.split()
    if kind == "condition":
        found: str = getattr(of(name), value)
        return found
    absent = _ABSENT.get(value, frozenset[str]())
    return FACTS[name].sentence(_VALUE[value], Asked(lambda number: "" if number in absent else f"{{{number}}}"))


def options_of_commands() -> Iterator[tuple[str, str, str]]:
    """(command, option, help) of every option, from ``--help``."""
    os.environ["COLUMNS"] = "1000"  # no line breaks
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([command, "--help"])
        for found in re.finditer(r"^  (\S.*?)(?:  +|\n {8,})(\S.*(?:\n {8,}\S.*)*)", out.getvalue(), flags=re.M):
            if not found[1].startswith("kvpressure"):
                yield command, found[1], " ".join(found[2].split())


def draw(count: int, seed: int) -> list[tuple[str, str]]:
    """(sentence, where) of so many, drawn with a seed; sentences that differ only in numbers count as one."""
    found = {re.sub(r"\d[\d .,]*", "7", one): (one, where) for one, where in read() if len(one.split()) > 5}
    return random.Random(seed).sample([found[key] for key in sorted(found)], count)


if __name__ == "__main__":
    count, seed = (int(word) for word in (*sys.argv[1:], "30", "7")[:2])
    for one, where in draw(count, seed):
        print(f"- {one}  [{where}]")
