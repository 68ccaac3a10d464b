"""Drift, and the command line of ``kvpressure bundle``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from jinja2 import TemplateNotFound

from kvpressure.bundle.render import OWNED, differences, render, write
from kvpressure.bundle.rules import Options, load_groups
from kvpressure.cli import main
from kvpressure.settings.thresholds import builtin
from tests.bundle.conftest import ROOT
from tests.docs.test_documents import headings

pytestmark = pytest.mark.slow


def test_every_link_of_a_bundle_in_an_empty_directory_leads_somewhere(tmp_path: Path) -> None:
    write(render(Options(builtin())), tmp_path)
    for page in tmp_path.rglob("*.md"):
        for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {file}"
            assert not anchor or anchor in headings(target), f"{page}: {file}#{anchor}"
    assert "/reference/alerts.md" in (tmp_path / "alerts/README.md").read_text(), "links within the bundle stay"
    reasons = tmp_path / "docs/reference/failure-reasons.md"
    assert "values (docs/operations.md)" in reasons.read_text(), "pages elsewhere are named"


def test_the_committed_bundle_is_what_would_be_generated(options: Options) -> None:
    found = differences(render(options), ROOT)
    assert not found, "run kvpressure bundle: " + "; ".join(found)


@pytest.mark.parametrize("directory", OWNED)
def test_check_names_drifted_missing_and_unknown_files(
    tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    directory: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    changed, removed = sorted(item for item in (copy / directory).iterdir() if item.is_file())[:2]
    changed.write_text(changed.read_text() + " ")
    removed.unlink()
    (copy / directory / "mine.txt").write_text("x")
    assert main(["bundle", "--check", "--out", str(copy)]) == 1
    out = capsys.readouterr().out
    assert f"{changed.relative_to(copy)}: differs" in out
    assert f"{removed.relative_to(copy)}: missing" in out
    assert f"{directory}/mine.txt: not part of the bundle" in out
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("--values", "runbook_url: x", "unknown key 'runbook_url'; allowed: runbook_base_url"),
        ("--values", "runbook_base_url: ftp://x", "allowed: an http:// or https:// address"),
        ("--values", "exclude: [Nothing]", "no alert is called 'Nothing'"),
        ("--values", "exclude: load", "expected a list"),
        ("--values", "durations: {InferenceBatchCollapse: {warning: soon}}", "allowed: 0.01 to 86400 seconds"),
        ("--values", "durations: {InferenceSlow: {critical: 60}}", "allowed: 120 seconds or more"),
        ("--values", "labels: {alertname: x}", "is not a label that may be set"),
        ("--values", "exporter_job: '.*'", "allowed: letters, digits and _ / -"),
        (
            "--thresholds",
            "memory_warning_ratio: 0.95",
            "input.yaml:1: memory_warning_ratio: 0.95 is above memory_critical_ratio",
        ),
        ("--values", "a: [", "not valid YAML"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    expected: str,
) -> None:
    file = tmp_path / "input.yaml"
    file.write_text(text)
    assert main(["bundle", "--out", str(tmp_path / "out"), name, str(file)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate_window_seconds", 0.001),
        ("latency_min_finished_per_second", 0),
        ("signature_batch_size", 7),
        ("signature_batch_size", 1e-9),
        ("batch_collapse_min_requests", 1e-3),
        ("wait_page_seconds", 0.001),
    ],
)
def test_thresholds_at_the_end_of_what_is_allowed_make_rules(name: str, value: float) -> None:
    assert load_groups(Options(builtin().override({name: value}, "test")))


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "alerts").write_text("a file where a directory has to be")
    assert main(["bundle", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_template_is_not_blamed_on_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(_: Options) -> dict[str, str]:
        raise TemplateNotFound("runbooks/InferenceNew.md.j2")  # an OSError

    monkeypatch.setattr("kvpressure.cli.bundle.render", render)
    with pytest.raises(TemplateNotFound, match=r"InferenceNew\.md\.j2"):
        main(["bundle", "--out", str(tmp_path)])
