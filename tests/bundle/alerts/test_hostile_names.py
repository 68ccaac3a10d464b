"""A name that mentions people or hides a link in a chat: no notification of any alert has its signs.

Anybody who serves a model or creates a pod chooses names that stand in the labels of alerts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from kvpressure.advice.action import HARMS, told
from kvpressure.bundle.rules import PROFILES, Options, load_groups, rule_file
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import Cause
from kvpressure.settings.thresholds import builtin
from tests.helpers.prometheus import prometheus
from tests.helpers.waiting import until
from tests.helpers.web import serving_pages
from tests.publish.states import full_engine

SIGNS = "<>|@`[]"
HOSTILE = "Q<!channel>Q<http://evil|fix>Q@here Q`id`Q[x](http://evil) @Q <@Q> org/model@rev Q@@here"
HARMLESS = "Q_!channel_Q_http://evil_fix_Q_here Q_id_Q_x_(http://evil) _Q __Q_ org/model@rev Q@_here"
ACTION = re.compile(r"\{\{(.*?)\}\}", re.S)
PRINTED_NAME = re.compile(r"^-? (\.|\$\w+|\$labels\.\w+|\.Labels\.\w+|.*\blabel \"\w+\")( \| printf .*)? -?$")
ASSIGNED = re.compile(r"^-? (with |if |else |range |\$\w+ :?= )")
KINDS = [*(("kvpressure", profile) for profile in PROFILES), ("vllm", "default")]


def alerts_of(source: str, profile: str) -> Iterator[dict[str, Any]]:
    options = Options(builtin(), profile=profile, source=source)
    for group in rule_file(load_groups(options), options.values)["groups"]:
        yield from (rule for rule in group["rules"] if "alert" in rule)


def unsafe(text: str) -> list[str]:
    text = text.replace("{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}", "")
    return [code for code in ACTION.findall(text) if PRINTED_NAME.search(code) and not ASSIGNED.search(code)]


@pytest.mark.parametrize(("source", "profile"), KINDS)
def test_every_label_that_is_printed_is_filtered(source: str, profile: str) -> None:
    rules = list(alerts_of(source, profile))
    assert rules
    assert {
        (rule["alert"], name): found
        for rule in rules
        for name, text in rule["annotations"].items()
        if (found := unsafe(text))
    } == {}


def test_the_test_sees_them() -> None:
    assert unsafe("{{ $labels.pod }} {{- .Labels.pod -}}") == [" $labels.pod ", "- .Labels.pod -"]
    assert unsafe("{{ with $labels.role }}{{ . }}{{ end }} {{ $known }}") == [" . ", " $known "]
    assert unsafe('{{ . | first | label "pod" }}') == [' . | first | label "pod" ']


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("model", [HOSTILE, "ends. early", "nothing\0", 1024 * "\u00fc"])
def test_what_the_exporter_says_has_no_sign_either_and_is_whole(harm: str, model: str) -> None:
    for pod in (HOSTILE, "chat-0"):
        engine = replace(full_engine(), key=EngineKey(HOSTILE, pod, model, "0"))
        text = told(engine, HARMS[harm], Cause(HOSTILE, "wait"))
        assert [sign for sign in SIGNS if sign in text.replace(HARMLESS, "")] == []
        assert ("--pod" in text) is (pod == "chat-0"), "a name without its signs is no name"
    assert len(text.encode()) < 1024
    assert "/chat-0)" in text.split(". ")[0]
    assert re.search(r"\. Cause: .*\. First action: .*\. Run: kvpressure .* --pod chat-0$", text)


def test_the_exporter_says_the_same_while_a_queue_grows() -> None:
    signals = full_engine().signals
    queues = [replace(signals, load=replace(signals.load, waiting=waiting)) for waiting in (100.0, 420.0, 999.0)]
    (text,) = {told(replace(full_engine(), signals=one), HARMS["kv_pressure"], Cause("full")) for one in queues}
    assert "Engine 0, at least 100 requests waiting. Cause: " in text


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


@pytest.mark.live
@pytest.mark.attack(
    "names of models, pods, namespaces, containers and roles that mention a channel or hide a link",
    "no notification of any alert has `<`, `>`, `|`, a bracket, a backtick or an `@` that mentions, of them",
)
def test_a_real_prometheus_prints_no_sign_of_a_hostile_name(tmp_path: Path) -> None:
    rules = [rule for kind in KINDS for rule in alerts_of(*kind)]
    names = sorted({name for rule in rules for text in rule["annotations"].values() for name in LABEL.findall(text)})
    series = ",".join(f'{name}="{escaped(HOSTILE)}"' for name in names if name not in ("instance", "__name__"))
    labelled = f"hostile{{{series}}} 1\n"
    owner = ",".join(f'{name}="{escaped(HOSTILE)}"' for name in ("uuid", "namespace", "pod"))
    owned = f"kvpressure_gpu_pod_info{{{owner}}} 1\n"
    evaluated = [
        {
            "alert": f"A{number}",
            "expr": f'label_replace(hostile, "instance", {json.dumps(HOSTILE)}, "", "")',
            "annotations": rule["annotations"],
        }
        for number, rule in enumerate(rules)
    ]
    group = {"name": "all", "interval": "1s", "rules": evaluated}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    with serving_pages(lambda _: (labelled + owned).encode()) as address:
        scrape = {"job_name": "x", "honor_labels": True, "static_configs": [{"targets": [address[7:]]}]}
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [scrape],
        }
        with prometheus(tmp_path, configuration) as url:
            found = until(lambda: firing(url, len(rules)), seconds=60)
    for rule, printed in zip(rules, found, strict=True):
        for name, text in printed.items():
            where = f"{rule['alert']}.{name}: {text}"
            assert "error expanding" not in text, where
            if name in ("summary", "description"):
                written = ACTION.sub("", rule["annotations"][name])
                others = text.replace(HARMLESS, "")
                assert [others.count(sign) for sign in SIGNS] == [written.count(sign) for sign in SIGNS], where
                assert (HARMLESS in text) is bool(PRINTED.search(rule["annotations"][name])), where
            else:
                assert "<!channel>" not in text, where


LABEL = re.compile(r"\$labels\.(\w+)")
PRINTED = re.compile(r"with \$labels\.\w+ |\$labels\.\w+ \|")


def firing(url: str, count: int) -> list[dict[str, str]] | None:
    """The annotations of every rule, in order, once each fires."""
    with urlopen(f"{url}/api/v1/rules", timeout=5) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    found = [alert["annotations"] for rule in rules for alert in rule["alerts"] if alert["state"] == "firing"]
    return found if len(rules) == len(found) == count else None
