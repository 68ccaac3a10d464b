"""``kvpressure top`` in a real terminal: table, keys, sizes, no colour, and what dies under it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvpressure.toolbox.live_table import KEYS, OPEN_KEYS, wrapped
from tests.helpers.command import Capsys, refused, run
from tests.helpers.terminal import Terminal
from tests.helpers.waiting import until
from tests.toolbox.conftest import FIXTURES, FakeClock, ServeJson, ServePod
from tests.toolbox.test_diagnose import CHAT, dead_address, document_of, heavy

pytestmark = pytest.mark.live

PATH = "/api/v1/diagnosis"
ROOT = FIXTURES.parents[1]
SERVER = """\
import time
from tests.toolbox.fake_vllm import FakeVllm
with FakeVllm() as fake:
    print(fake.url, flush=True)
    time.sleep(60)
"""
DOWN, UP, ENTER = b"\x1b[B", b"\x1b[A", b"\r"


def node(*pods: str, **of_each: Any) -> dict[str, Any]:
    """An exporter's document: an idle engine, and one under KV pressure for each of ``pods``."""
    document = document_of("vllm-cpu/a_idle")
    (pressed,) = document_of("incidents/KV01")["engines"]
    document["engines"] = [document["engines"][0] | {"namespace": "prod", "pod": "calm-0"}]
    of_each = {"namespace": "prod", "since": document["time"] - 300} | of_each
    document["engines"] += [pressed | {"pod": pod} | of_each for pod in pods]
    return document


@pytest.fixture
def answers() -> dict[str, Any]:
    """What an exporter answers, by path."""
    return {PATH: node("chat-0", "chat-1")}


@pytest.fixture
def terminal(serve_json: ServeJson, answers: dict[str, Any]) -> Iterator[Terminal]:
    """The table of that exporter."""
    with Terminal("top", "--exporter", serve_json(answers)) as opened:
        until(lambda: "calm-0" in opened.text)
        yield opened


def rows(terminal: Terminal) -> list[str]:
    """The engines of the table, from the top."""
    return re.findall(r"^[> ]*\d* (\S+) .*%", "\n".join(terminal.screen[1:]), re.MULTILINE)


def test_the_worst_engine_is_first_on_a_screen_of_80_by_24(terminal: Terminal) -> None:
    assert rows(terminal) == ["chat-0", "chat-1", "calm-0"]
    headline, titles, first, *_, keys = terminal.screen
    assert headline == "3 engines: 2 KV pressure, 1 idle."
    assert titles.split() == ["ENGINE", "VERDICT", "SINCE", "KV", "WAIT", "TTFT", "TOK/S", "GPU"]
    assert titles in (ROOT / "README.md").read_text(), "its picture"
    assert re.search(r">1 chat-0 +KV pressure +5 min +\d+ % +\d+ ", first)
    assert (keys, len(terminal.screen)) == (KEYS, 24)
    assert max(map(len, terminal.screen)) <= 80


def test_a_key_opens_an_engine_as_diagnose_prints_it(
    terminal: Terminal, capsys: Capsys, serve_json: ServeJson, answers: dict[str, Any]
) -> None:
    terminal.resize(200, 60)
    terminal.press(DOWN + ENTER)
    until(lambda: terminal.screen[-1] == OPEN_KEYS)
    assert terminal.screen[0].startswith("prod/chat-1 ")
    _, printed, _ = run(capsys, f"diagnose --pod chat-1 --exporter {serve_json(answers)}")
    evidence, _, after = printed.partition("\ntriage\n")
    shown = {line.strip() for line in terminal.screen}
    told = [line.strip() for line in f"{evidence}\n{after.partition('next')[2]}".splitlines()]
    assert [line for line in told if line not in shown and len(line) < 200 and "127.0.0.1" not in line] == []
    assert "     $ kubectl" in terminal.text
    terminal.press(b"\x1b")
    until(lambda: terminal.screen[-1] == KEYS)
    assert ">2 " in terminal.text
    terminal.press(b"3")
    until(lambda: "VERDICT  IDLE" in terminal.text)
    terminal.press(b"q")
    assert terminal.ends() == 0


def test_a_long_answer_is_scrolled(terminal: Terminal) -> None:
    terminal.resize(60, 10)
    terminal.press(b"1")
    until(lambda: terminal.screen[-1] == OPEN_KEYS and len(terminal.screen) == 10)
    top = terminal.screen
    terminal.press(DOWN * 3)
    until(lambda: terminal.screen[:4] == top[3:7])
    terminal.press(DOWN * 200)
    until(lambda: terminal.screen[:6] != top[3:9] and terminal.screen[-1] == OPEN_KEYS)  # a screen is drawn in parts
    terminal.press(UP * 300)
    until(lambda: terminal.screen == top)


@pytest.mark.parametrize(("columns", "least", "most"), [(36, 2, 3), (50, 3, 5), (140, 8, 8)])
def test_another_size_shows_at_once_what_fits(terminal: Terminal, columns: int, least: int, most: int) -> None:
    terminal.resize(columns, 8)
    screen = until(lambda: terminal.screen if len(terminal.screen) == 8 else None)
    assert max(map(len, screen)) <= columns
    assert least <= len(screen[1].split()) <= most
    assert screen[2].startswith(">1 ")
    assert ("prod/chat-0" in screen[2]) == (columns == 140)


def test_more_engines_than_lines_follow_the_selected_one(serve_json: ServeJson) -> None:
    document = node(*(f"chat-{number:02}" for number in range(30)))
    with Terminal("top", "--exporter", serve_json({PATH: document}), rows=10) as terminal:
        until(lambda: len(rows(terminal)) == 7)
        terminal.press(DOWN * 20)
        until(lambda: "> chat-20" in terminal.text)
        assert len(terminal.screen) == 10


@pytest.mark.parametrize("end", [b"q", b"\x03", signal.SIGTERM])
def test_the_terminal_is_left_as_it_was(terminal: Terminal, end: bytes | signal.Signals) -> None:
    assert not terminal.is_as_before
    terminal.press(b"\x1a")  # Ctrl-Z would leave it without a cursor
    terminal.press(end) if isinstance(end, bytes) else terminal.child.send_signal(end)
    assert terminal.ends() == (0 if end == b"q" else 130)
    assert terminal.is_as_before
    assert until(lambda: terminal.written.endswith(b"\x1b[?1049l\x1b[?25h"))


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_a_choice(
    serve_json: ServeJson, answers: dict[str, Any], environ: dict[str, str], coloured: bool
) -> None:
    with Terminal("top", "--exporter", serve_json(answers), environ=environ) as terminal:
        until(lambda: "calm-0" in terminal.text)
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.written)) is coloured


def test_a_dumb_terminal_gets_the_table_once(serve_json: ServeJson, answers: dict[str, Any]) -> None:
    with Terminal("top", "--exporter", serve_json(answers), environ={"TERM": "dumb"}) as terminal:
        assert terminal.ends() == 1
        until(lambda: "calm-0" in terminal.text)
        assert b"\x1b" not in terminal.written


def test_names_cannot_write_to_the_terminal(serve_json: ServeJson) -> None:
    document = node("chat-0", model_name="a\x1b]0;pwned\x07b")
    with Terminal("top", "--exporter", serve_json({PATH: document}), columns=200) as terminal:
        until(lambda: "pwned" in terminal.text)
        terminal.press(b"1")
        until(lambda: terminal.screen[-1] == OPEN_KEYS)
        assert b"\x1b]" not in terminal.written
        assert b"\x07" not in terminal.written


def test_a_server_that_dies_is_down_since_then() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    url = server.stdout.readline().strip()
    with server, Terminal("top", url, f"b/late=http://{dead_address()}") as terminal:
        until(lambda: "idle" in terminal.text)
        before = until(lambda: re.search(r"b/late .*down \(connection r… +(\d+) s", terminal.text))
        server.kill()
        until(lambda: "2 down (connection refused)" in terminal.screen[0])
        ages = [int(age) for age in re.findall(r"down \(connection r… +(\d+) s", terminal.text)]
        assert len(ages) == 2
        assert min(ages) < int(before[1]) + 3
        terminal.press(b"1")
        until(lambda: "down since" in terminal.text)


def test_an_exporter_that_stops_is_said_until_it_is_back(terminal: Terminal, answers: dict[str, Any]) -> None:
    document = answers.pop(PATH)
    until(lambda: "HTTP status 404" in terminal.text)
    assert rows(terminal) == [], "what it said last is not shown as if it were so"
    answers[PATH] = document
    until(lambda: len(rows(terminal)) == 3)
    assert "404" not in terminal.text


# --- once -------------------------------------------------------------------------------------------------


def test_once_prints_the_table_and_says_by_its_status_whether_all_is_well(
    capsys: Capsys, serve_json: ServeJson, answers: dict[str, Any]
) -> None:
    bad, well = serve_json(answers), serve_json({PATH: node()})
    status, out, _ = run(capsys, f"top --once --exporter {bad} --exporter {well}")
    assert (status, out.splitlines()[0], len(out.splitlines())) == (1, "4 engines: 2 KV pressure, 2 idle.", 6)
    assert run(capsys, f"top --once --exporter {well}")[0] == 0
    gone = f"http://{dead_address()}"
    status, out, _ = run(capsys, f"top --once --exporter {well} --exporter {gone}")
    assert (status, f"exporter {gone}{PATH}: connection refused, since" in out.replace("\n", " ")) == (1, True)
    assert "connection refused" in refused(capsys, f"top --once --exporter {gone}")


def test_once_waits_for_a_certain_answer(capsys: Capsys, clock: FakeClock, serve_pod: ServePod) -> None:
    _, url = serve_pod(heavy(CHAT), 90)
    begin = clock.t
    status, out, _ = run(capsys, f"top --once {url} --args='--max-num-seqs 128'")
    assert (status, "KV pressure" in out) == (1, True)
    assert clock.t - begin < 10
    assert "could not scrape" in refused(capsys, f"top --once http://{dead_address()}")


def test_inputs_that_cannot_be_used_are_refused(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one kind of input" in refused(capsys, "top http://a --exporter b")
    monkeypatch.setattr("kvpressure.toolbox.fetch.EXPORTER_PORT", int(dead_address().rpartition(":")[2]))
    assert "no exporter on this machine; give URLs, or --exporter" in refused(capsys, "top")


# --- parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 36, 50, 80])
def test_a_wrapped_command_is_still_the_same_when_pasted(width: int) -> None:
    words = ["kubectl", "patch", "deploy/chat", "-n", "prod", "-p", '{"a": "b c",  "d": 1}', "it's", "--since=2h"]
    lines = wrapped(f"     $ printf '%s\\n' {shlex.join(words)}", width)
    assert len(lines) > 1
    pasted = "\n".join(lines).lstrip().removeprefix("$")
    ran = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == words
