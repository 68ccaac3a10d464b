"""The model of thresholds: what a user may set, and one clear line for the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.errors import InputError
from kvpressure.settings import thresholds
from kvpressure.settings.thresholds import LARGEST, Thresholds, builtin, load

T = builtin()
NAMES = [entry.name for entry in T.settable()]


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "thresholds.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load(file)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path), "")


def test_the_built_in_ones_are_allowed_and_say_where_they_come_from():
    for entry in T.entries():
        assert entry.allowed.admits(entry.value), entry.name
        assert entry.source, entry.name
        assert entry.reason, entry.name
        assert bool(entry.change) != entry.constant, entry.name
        assert entry.not_above is None or T[entry.not_above] >= entry.value, entry.name


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    file = tmp_path / "thresholds.yaml"
    file.write_text("kv_full_ratio: 0.99\nstalled_seconds: {value: 30}\n")
    changed = load(file)
    assert (changed["kv_full_ratio"], changed["stalled_seconds"]) == (0.99, 30)
    assert {name for name in NAMES if changed[name] != T[name]} == {"kv_full_ratio", "stalled_seconds"}
    assert changed.entry("kv_full_ratio").overridden
    assert T["kv_full_ratio"] == 0.97


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# mine\nkv_full_ratio: 1.5\n", "/thresholds.yaml:2: kv_full_ratio: 1.5 is not allowed; allowed: a number"),
        ("stalled_seconds: 0\n", "/thresholds.yaml:1: stalled_seconds: 0 is not allowed; allowed: a number from"),
        ("crash_loop_restarts: 2.5\n", "/thresholds.yaml:1: crash_loop_restarts: 2.5 is not allowed; allowed: a"),
        ("kv_full_ratio: true\n", "/thresholds.yaml:1: kv_full_ratio: True is not allowed; allowed: a number from 0"),
        ("\n\nkv_ful_ratio: 0.9\n", "/thresholds.yaml:3: unknown threshold 'kv_ful_ratio'; did you mean"),
        ("zzz: 1\n", "/thresholds.yaml:1: unknown threshold 'zzz'; allowed: the names in docs/reference/thresholds.md"),
        ("memory_warning_ratio: 0.95\n", "/thresholds.yaml:1: memory_warning_ratio: 0.95 is above"),
        ("crash_loop_restarts: 4\nmemory_critical_ratio: 0.7\n", "/thresholds.yaml:2: memory_critical_ratio: 0.7 is"),
        ("kv_full_ratio: 0.9\nkv_full_ratio: 0.8\n", "/thresholds.yaml:2: 'kv_full_ratio' given twice; allowed: once"),
        ("- 1\n", '/thresholds.yaml:1: the file is not a mapping; allowed: lines "name: value"'),
        ("kv_full_ratio: 1" + "0" * 5000 + "\n", "/thresholds.yaml:1: not a value: Exceeds the limit"),
        ("kv_full_ratio: 2026-13-45\n", "/thresholds.yaml:1: not a value: month must be in 1..12"),
        ("a: [\n", "/thresholds.yaml:2: not valid YAML"),
        ("a: " + "[" * 200, "/thresholds.yaml: nested too deep"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_line_name_value_and_what_is_allowed(tmp_path, text, message):
    said = refused(tmp_path, text)
    assert said.startswith(message)
    assert "; allowed: " in said or "; did you mean " in said


def test_each_one_that_a_site_may_move_says_when():
    assert {e.name: e.change for e in T.settable() if not e.change or e.change.startswith(("not ", "never"))} == {}


def test_both_sides_of_a_pair_may_move_together():
    moved = T.override({"memory_warning_ratio": 0.93, "memory_critical_ratio": 0.96}, "here")
    assert moved["memory_warning_ratio"] == 0.93


@given(
    st.sampled_from(NAMES),
    st.floats() | st.integers() | st.text(max_size=5) | st.none() | st.booleans() | st.lists(st.integers()),
)
def test_any_value_is_taken_as_it_is_or_refused_by_name(name, value):
    entry = T.entry(name)
    free = Thresholds({item.name: replace(item, not_above=None) for item in T.entries()})
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and abs(value) <= LARGEST and entry.allowed.admits(float(value)):
        assert free.override({name: value}, "here")[name] == value
        return
    with pytest.raises(InputError, match=rf"^there:3: {name}: .*; allowed: .*\({entry.unit}\)$"):
        free.override({name: value}, "here", {name: "there:3"})


def test_no_constant_has_the_name_of_a_settable_one():
    folder = Path(thresholds.__file__).parent
    names = [set(yaml.safe_load((folder / name).read_text())) for name in ("thresholds.yaml", "constants.yaml")]
    assert not names[0] & names[1]


def test_a_constant_is_no_threshold_that_a_site_may_set():
    with pytest.raises(InputError, match=r"^here: unknown threshold 'gpu_starved_ratio'; "):
        T.override({"gpu_starved_ratio": 0.2}, "here")
