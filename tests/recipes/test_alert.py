"""The recipe for an alert: a rule template and a runbook, and nothing else.

A toy alert that lives in this test only appears in the rules, in promtool's unit tests, as a runbook and in the reference, with
no change to the package.
"""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
import yaml

from kvpressure.bundle import templating
from kvpressure.bundle.render import RULES, render
from kvpressure.bundle.rules import Options
from kvpressure.settings.thresholds import builtin

RULE = """
family: load
evaluation_interval: calm
limit: << t("rules_alert_limit") >>
alerts:
  - name: ToyManyRequests
    subject: engine
    summary: '{{ $labels.namespace }}/{{ $labels.pod }}: {{ printf "%.0f" $value }} requests in flight'
    description: "Engine {{ $labels.engine }} has {{ $value }} requests in flight (threshold << t("batch_collapse_min_requests") >>)."
    choice: A toy.
    levels:
      - severity: warning
        for: << t("alert_for_seconds") >>
        expr: << engine("kvpressure_requests_in_flight >= " ~ t("batch_collapse_min_requests")) >>
        tests:
          - inputs: {kvpressure_requests_in_flight: ">= << t("batch_collapse_min_requests") >>"}
"""
RUNBOOK = """<% extends "runbooks/_base.md.j2" %>
<% block meaning %>Many requests are in flight on this toy.<% endblock %>
<% block impact %>None: this is a toy.<% endblock %>
<% block diagnosis %>Look at the toy.<% endblock %>
<% block mitigation %>Put the toy away.<% endblock %>
<% block verification %>The toy is gone.<% endblock %>
<% block prevention %>No toys in production.<% endblock %>
"""


@pytest.fixture
def hand_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The two files of the recipe, in a folder beside the package's templates."""
    files = {"rules/toy.yaml.j2": RULE, "runbooks/ToyManyRequests.md.j2": RUNBOOK}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = templating.environment()
    own = jinja2.FileSystemLoader(tmp_path)
    assert environment.loader is not None
    monkeypatch.setattr(environment, "loader", jinja2.ChoiceLoader([own, environment.loader]))
    return [path for path in tmp_path.rglob("*") if path.is_file()]


def test_two_files_make_an_alert(hand_written: list[Path]) -> None:
    assert len(hand_written) == 2
    files = render(Options(builtin()))
    rules = [rule for group in yaml.safe_load(files[RULES])["groups"] for rule in group["rules"]]
    (toy,) = [rule for rule in rules if rule.get("alert") == "ToyManyRequests"]
    assert toy["labels"]["severity"] == "warning"
    assert toy["annotations"]["runbook_url"].endswith("/docs/runbooks/ToyManyRequests.md")
    assert "Put the toy away." in files["docs/runbooks/ToyManyRequests.md"]
    assert "[ToyManyRequests](runbooks/ToyManyRequests.md)" in files["docs/alerts.md"]
    assert "ToyManyRequests" in files["docs/runbooks/README.md"]
    tests = "".join(text for name, text in files.items() if name.startswith("alerts/tests/"))
    assert "ToyManyRequests warning: boundaries" in tests
