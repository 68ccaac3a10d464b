"""The bundle's pages: runbooks, alert reference, thresholds, and an index of the files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from kvpressure.bundle.rules import Options
from kvpressure.bundle.spec import Alert, RuleGroup
from kvpressure.bundle.templating import context, render
from kvpressure.bundle.text import span, words
from kvpressure.bundle.verdicts_page import render_verdicts
from kvpressure.model.gpu_faults import NVIDIA_XIDS, UNLISTED
from kvpressure.publish.failure_reasons import render_failure_reasons
from kvpressure.publish.links import RUNBOOK_FOLDER
from kvpressure.publish.reference import first_sentence, render_metrics_reference, render_settings_reference
from kvpressure.settings.thresholds import Threshold, plain

_ALERT_NAME: Final = re.compile(r"(?<![`\[\w])(?:Inference|Gpu|Kvpressure)\w+(?![`\w])")

ALERTMANAGER_NOTE: Final = (
    "An example: put your receivers in place of the URLs, and merge route and inhibit_rules into your configuration\n"
    "(docs/routing.md)."
)


def pages(options: Options, groups: Sequence[RuleGroup], pack: Sequence[RuleGroup]) -> dict[str, str]:
    """Every page: path -> Markdown. ``pack``: the groups over vLLM's own metrics, whose alerts have a runbook too."""
    alerts = [alert for group in groups for alert in group.alerts]
    names = {alert.name for alert in alerts}
    others = [alert for group in pack for alert in group.alerts if alert.name not in names]
    recordings = [item for group in groups for item in group.recordings]
    variables = context(
        options.thresholds,
        literal=options.profile == "literal",
        options=options,
        groups=groups,
        alerts=alerts,
        others=others,
        recordings=recordings,
        entries=options.thresholds.settable(),
        span=span,
        words=words,
        shown=shown,
        first_sentence=first_sentence,
        xids=NVIDIA_XIDS,
        unlisted=UNLISTED,
        percent=lambda name: f"{plain(options.thresholds[name] * 100)} %",
    )
    found = {
        "docs/reference/thresholds.md": _page("docs/thresholds.md.j2", variables),
        "docs/reference/alerts.md": _page("docs/alerts.md.j2", variables),
        "docs/reference/metrics.md": render_metrics_reference(),
        "docs/reference/settings.md": render_settings_reference(),
        "docs/reference/failure-reasons.md": render_failure_reasons(),
        "docs/verdicts.md": render_verdicts(options.thresholds),
        "alerts/README.md": _page("docs/alerts-readme.md.j2", variables),
        "dashboards/README.md": _page("docs/dashboards-readme.md.j2", variables),
    }
    for alert in (*alerts, *others):
        page = _page(f"runbooks/{alert.name}.md.j2", variables | {"alert": alert})
        found[runbook(alert)] = _linked(page, {other.name for other in (*alerts, *others)} - {alert.name})
    return found


def _linked(page: str, names: set[str]) -> str:
    """A runbook in which the names of other alerts are links to their runbooks."""
    return _ALERT_NAME.sub(lambda match: f"[{match[0]}]({match[0]}.md)" if match[0] in names else match[0], page)


def runbook(alert: Alert) -> str:
    """Path of the alert's runbook."""
    return f"{RUNBOOK_FOLDER}/{alert.name}.md"


def _page(template: str, variables: dict[str, Any]) -> str:
    """A rendered page with single empty lines and one line break at its end."""
    text = re.sub(r"[ \t]+\n", "\n", render(template, variables))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def shown(entry: Threshold) -> str:
    """Value of a threshold with its unit; the plain number too where the words round or convert."""
    text = words(entry)
    return text if entry.text in text else f"{text} ({entry.text})"
