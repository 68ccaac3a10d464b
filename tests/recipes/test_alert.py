"""Recipe: an alert is a rule template and a runbook, in ``bundle/templates``. Rules, their promtool tests,
the runbook and the reference follow.
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

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "alert"


@pytest.fixture
def hand_written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of the recipe, as if they lay among the package's templates."""
    environment = templating.environment()
    own = jinja2.FileSystemLoader(HERE)
    assert environment.loader is not None
    monkeypatch.setattr(environment, "loader", jinja2.ChoiceLoader([own, environment.loader]))
    return [path for path in HERE.rglob("*") if path.is_file()]


def test_two_files_make_an_alert(hand_written: list[Path]) -> None:
    assert len(hand_written) == 2
    files = render(Options(builtin()))
    rules = [rule for group in yaml.safe_load(files[RULES])["groups"] for rule in group["rules"]]
    (toy,) = [rule for rule in rules if rule.get("alert") == "ToyManyRequests"]
    assert toy["labels"]["severity"] == "warning"
    assert toy["annotations"]["runbook_url"] == "docs/runbooks/ToyManyRequests.md"
    assert "Put the toy away." in files["docs/runbooks/ToyManyRequests.md"]
    assert "[ToyManyRequests](runbooks/ToyManyRequests.md)" in files["docs/alerts.md"]
    assert "ToyManyRequests" in files["docs/runbooks/README.md"]
    tests = "".join(text for name, text in files.items() if name.startswith("alerts/tests/"))
    assert "ToyManyRequests warning: boundaries" in tests
