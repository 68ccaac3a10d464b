"""Settings: two spellings of the same names, their precedence, and one clear line for every mistake."""

from __future__ import annotations

import argparse
import os
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvpressure.errors import InputError, shown
from kvpressure.settings import settings
from kvpressure.settings.kinds import SECONDS, ListenAddress
from kvpressure.settings.settings import Settings
from kvpressure.sources.catalog import registry


def load(*flags: str, file: Path | None = None) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    settings.add_arguments(parser)
    arguments = [*flags, *(["--config", str(file)] if file else [])]
    return settings.from_args(parser.parse_args(arguments))


def mistake(*flags: str, file: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        load(*flags, file=file)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(directory: Path, text: str | bytes) -> Path:
    path = directory / "settings.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


VALUES: dict[str, tuple[str, Any, str, Any]] = {  # option -> text, YAML value as written, field, parsed
    "web.listen-address": (":9000", "':9000'", "listen_addresses", (ListenAddress("", 9000),)),
    "web.health-listen-address": ("[::1]:9001", "'[::1]:9001'", "health_addresses", (ListenAddress("::1", 9001),)),
    "web.engine-labels": ("prefixed", "prefixed", "engine_labels", "prefixed"),
    "web.runbook-url": ("https://r.example/", "'https://r.example/'", "runbook_url", "https://r.example"),
    "web.dashboard-url": ("http://g:3000", "'http://g:3000'", "dashboard_url", "http://g:3000"),
    "web.max-requests": ("7", "7", "max_requests", 7),
    "interval": ("500ms", "0.5", "interval_seconds", 0.5),
    "engine.timeout": ("2", "2s", "engine_timeout_seconds", 2.0),
    "engine.max-targets": ("3", "3", "engine_max_targets", 3),
    "engine.pace": ("fixed", "fixed", "engine_pace", "fixed"),
    "nvidia.gpm": ("true", "true", "nvidia_gpm", True),
    "node-name": ("node-7", "node-7", "node_name", "node-7"),
    "log.level": ("debug", "debug", "log_level", "debug"),
    "log.format": ("json", "json", "log_format", "json"),
}


class TestSpellings:
    @pytest.mark.parametrize("name", VALUES)
    def test_flag_and_file_say_the_same(self, tmp_path: Path, name: str) -> None:
        text, written, field, parsed = VALUES[name]
        flag = [f"--{name}" if parsed else f"--no-{name}"] if isinstance(parsed, bool) else [f"--{name}", text]
        for loaded in (load(*flag), load(file=write(tmp_path, f"{name}: {written}\n"))):
            assert getattr(loaded, field) == parsed

    def test_flags_win_over_file_over_default(self, tmp_path: Path) -> None:
        file = write(tmp_path, "web.max-requests: 1\nlog.level: error\ninterval: 3\n")
        loaded = load("--web.max-requests=3", file=file)
        assert (loaded.max_requests, loaded.log_level, loaded.interval_seconds) == (3, "error", 3.0)
        assert load(file=file).max_requests == 1
        assert load().max_requests == 20

    def test_several_values(self, tmp_path: Path) -> None:
        expected = (ListenAddress("", 1), ListenAddress("::1", 2))
        assert load("--web.listen-address", ":1", "--web.listen-address", "[::1]:2").listen_addresses == expected
        file = write(tmp_path, "web.listen-address: [':1', '[::1]:2']\n")
        assert load(file=file).listen_addresses == expected

    def test_targets_are_parsed_where_they_are_read(self) -> None:
        (target,) = load("--engine.target", "prod/chat-0=http://10.0.0.5:8000;args=--max-num-seqs 64").engine_targets
        assert (target.namespace, target.pod, target.args) == ("prod", "chat-0", ("--max-num-seqs", "64"))

    def test_thresholds_are_loaded(self, tmp_path: Path) -> None:
        file = tmp_path / "thresholds.yaml"
        file.write_text("memory_warning_ratio: 0.7\n")
        assert load("--thresholds", str(file)).thresholds["memory_warning_ratio"] == 0.7
        assert load().thresholds["memory_warning_ratio"] == 0.8

    def test_the_node_name_is_given_or_the_pods_or_the_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NODE_NAME", "b")
        assert load("--node-name", "a").node_name == "a"
        assert load().node_name == "b"
        monkeypatch.setenv("NODE_NAME", "")
        assert load().node_name == os.uname().nodename


class TestSources:
    def test_every_source_has_a_switch_and_its_pace(self) -> None:
        for name, spec in registry().items():
            on, default = load(f"--collector.{name}").collectors[name], load().collectors[name]
            pace = (on.interval_seconds, on.deadline_seconds)
            assert (on.enabled, *pace) == (True, spec.interval_seconds, spec.deadline_seconds)
            assert replace(on, enabled=spec.default) == default

    def test_switched_off_in_all_spellings(self, tmp_path: Path) -> None:
        for loaded in (load("--no-collector.nvidia"), load(file=write(tmp_path, "collector.nvidia: false\n"))):
            assert not loaded.collectors["nvidia"].enabled

    def test_a_faster_tick_is_faster_for_all_and_a_slower_one_slows_those_that_would_be_faster(self) -> None:
        paces = {tick: load(f"--interval={tick}").collectors for tick in ("0.1", "10", "30")}
        assert [one["engines"].interval_seconds for one in paces.values()] == [0.1, 10, 30]
        assert [one["podresources"].interval_seconds for one in paces.values()] == [1, 10, 30]


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--web.max-requests", "1", "--web.max-requests", "2"], "--web.max-requests: given 2 times; allowed:"),
            (["--web.config.file", "x" * 300], "--web.config.file: 'xxxxxxxxxxxxxxxxxxxx"),
            (["--node-name", "a\nb"], "--node-name: 'a\\nb' is not allowed"),
            (["--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        ],
    )
    def test_flags(self, flags: list[str], text: str) -> None:
        assert mistake(*flags).startswith(text)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("\nweb.max-requests: many\n", ":2: web.max-requests: 'many' is not allowed; allowed: a whole number"),
            ("web.max-requests: true\n", ":1: web.max-requests: True is not allowed"),
            ("web: 5\n", ":1: unknown key 'web'"),
            ("node-name: 5\n", ":1: node-name: 5 is not allowed; allowed: 1 to 253 printable characters"),
            ("nvidia.gpm: 1\n", ":1: nvidia.gpm: 1 is not allowed; allowed: true or false"),
            ("interval: 1\ninterval: 2\n", ":2: 'interval' given twice; allowed: once"),
            ("wep:\n  max-requests: 2\n", ":1: unknown key 'wep'"),
            ("web.max-request: 2\n", ":1: unknown key 'web.max-request'; did you mean web.max-requests?"),
            ("- a\n", ":1: the file is not a mapping; allowed: keys and values"),
            ("a: b: c\n", ":1: not valid YAML: mapping values are not allowed here"),
            ("? [a]\n: b\n", ":1: a key that is not text"),
            (b"\xff\xfe\x00", ": not valid YAML: not text in UTF-8"),
            ("a: &a [*a]\n", ""),
            ("config: other.yaml\n", ":1: unknown key 'config'"),
        ],
    )
    def test_file(self, tmp_path: Path, text: str | bytes, message: str) -> None:
        file = write(tmp_path, text)
        assert mistake(file=file).startswith(f"{file}{message}")

    def test_an_empty_file_is_fine(self, tmp_path: Path) -> None:
        assert load(file=write(tmp_path, "# nothing yet\n")) == load()

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--no-collector.engines", "--engine.target", "a"], "--engine.target: the source engines is switched"),
            (["--no-collector.engines", "--engine.timeout", "1"], "--engine.timeout: the source engines is switched"),
            (["--no-collector.nvidia", "--nvidia.gpm"], "--nvidia.gpm: the source nvidia is switched off"),
            (["--engine.timeout", "6"], "--engine.timeout: one scrape may take 6 s but all of them only 5 s"),
            (["--engine.target", "a", "--engine.target", "http://a:8000/metrics"], "--engine.target: the same URL"),
        ],
    )
    def test_contradictions(self, flags: list[str], text: str) -> None:
        assert mistake(*flags).startswith(text)

    def test_a_page_is_believed_for_longer_than_the_slowest_pace(self, tmp_path: Path) -> None:
        file = tmp_path / "thresholds.yaml"
        file.write_text("stale_page_seconds: 12\n")
        assert mistake("--thresholds", str(file)) == (
            "--thresholds: stale_page_seconds 12: an engine that is slow to answer is read every 12 s;"
            " allowed: above 12"
        )

    def test_nothing_switched_on(self) -> None:
        off = [f"--no-collector.{name}" for name in registry()]
        assert "every source is switched off; allowed: at least one on" in mistake(*off)


class TestKinds:
    def test_seconds(self) -> None:
        said = {"1.5": 1.5, "250ms": 0.25, "2m": 120.0, "1h": 3600.0, 2: 2.0, "86400": 86400.0}
        assert {text: SECONDS.parse(text) for text in said} == said


class TestTable:
    def test_every_field_that_can_be_set_has_a_flag(self) -> None:
        parser = argparse.ArgumentParser()
        settings.add_arguments(parser)
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert {f"--{name}" for name in settings.options()} <= flags
        internal = {item.name for item in fields(Settings) if "option" not in item.metadata}
        assert internal == {"collectors", "keep_exposition", "shared"}


@pytest.mark.attack("YAML aliases that make millions of values", "one error line")
@pytest.mark.writer(
    "whoever writes the settings or web configuration file",
    "aliases that expand to millions of values",
    "one error line with file and line number",
    "values are counted with aliases written out",
)
def test_aliases_that_make_one_value_of_millions_are_one_short_line(tmp_path: Path) -> None:
    """The message about it took 537 MB."""
    tracemalloc.start()
    try:
        nested = "&a [x,x,x,x,x,x,x,x,x,x]"
        for name, before in zip("bcdefgh", "abcdefg", strict=True):
            nested = f"&{name} [{nested}{f',*{before}' * 9}]"
        text = mistake(file=write(tmp_path, f"log.level: {nested}\n"))
        assert "more than 10000 values" in text
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tag", ["!mine", "!!set", "!!python/dict"])
def test_a_mapping_of_another_type_is_refused(tmp_path: Path, tag: str) -> None:
    """PyYAML refuses it or makes something else of it; it was read as if the type were not there."""
    text = mistake(file=write(tmp_path, f"collector: {tag}\n  demo: true\n"))
    assert "settings.yaml:1" in text or ":1: " in text
    assert "allowed: plain mappings" in text


def test_a_wrong_value_of_any_size_is_shown_shortly() -> None:
    value: object = ["x"] * 10
    for _ in range(12):
        value = [value] * 10
    assert len(shown(value)) <= 100
    assert shown("y" * 10_000_000) == "'" + "y" * 96 + "..."
