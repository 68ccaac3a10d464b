"""Commands that a person may paste: each is built from arguments by ``printable.command`` alone, and splits back into
the same arguments, whatever names and addresses are in it.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from kvpressure.advice import triage
from kvpressure.advice.limits import PlanInput
from kvpressure.advice.mitigation import explained, plan
from kvpressure.advice.plan import pressure_plan
from kvpressure.cli import main
from kvpressure.engines.registry import dialect
from kvpressure.model.state import REUSE, STEP_TOKENS, VERDICTS, EngineState, State
from kvpressure.printable import BESIDE, INTO, OR, PIPE, command, visible
from kvpressure.settings.thresholds import builtin
from tests.publish.states import NOW, full_engine, full_state

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "exporter" / "kvpressure"
RECORDINGS = ROOT / "tests/fixtures/recordings"
T = builtin()
HOSTILE = (
    *("a;touch${IFS}/x/pwn", "$(reboot)", "`reboot`", "it's", 'a"b', "a b", "a\nb", "-x", "--all", "a|b>c&d"),
    *("*?[a]", "~", "#a", "a\\", "\x1b[2J\u202e", "!!"),
)
OPERATORS = {PIPE, OR, BESIDE, INTO}


def words_of(text: str) -> list[str]:
    """The words of a command as a shell reads them, operators included."""
    assert "\n" not in text
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_command_splits_back(name: str) -> None:
    given = ("kubectl", "logs", "-n", name, f"pod/{name}", PIPE, "grep", name, INTO, name)
    assert words_of(command(*given)) == [word if word in OPERATORS else visible(word) for word in given]


def commands_of(engine: EngineState) -> Iterator[str]:
    around = full_state()
    yield from (step.command for step in triage.steps(engine, State(time=NOW), T))
    yield from (step.command for step in triage.steps(engine, around, T))
    for confidence in (0.3, 0.9):
        for verdict in VERDICTS:
            judged = replace(engine, diagnosis=replace(engine.diagnosis, verdict=verdict, confidence=confidence))
            for one in (judged, replace(judged, up=False, error="refused"), replace(judged, up=False, error="tgi")):
                yield from (text for action in plan(one, T).actions for text in action.commands)
    for conditions in ({}, {"crash_loop": True}, {"host_oom_killed": True}):
        asked = replace(engine, diagnosis=replace(engine.diagnosis, conditions=conditions))
        workload = ("-n", engine.key.namespace, f"deploy/{engine.container}")
        for where in ((), workload):
            yield from (text for step in pressure_plan(PlanInput(asked), T, where).steps for text in step.commands)


def named(name: str, *, host: bool = False) -> EngineState:
    engine = full_engine()
    pod = f"10.0.0.5:80{name}" if host else name
    key = replace(engine.key, namespace=name, pod=pod, model_name=name, engine=name)
    return replace(engine, key=key, container=name, target=f"http://10.0.0.5:8000/{name}/metrics")


PLAIN = "@"


@pytest.mark.attack(
    "a shell's signs, line breaks and options in namespaces, pods, containers and addresses of printed commands",
    "each command splits back into the same arguments",
)
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_changes_a_command(name: str, host: bool) -> None:
    expected = [words_of(text) for text in commands_of(named(PLAIN, host=host))]
    made = [words_of(text) for text in commands_of(named(name, host=host))]
    assert len(expected) > 40
    assert [[word.replace(PLAIN, visible(name)) for word in words] for words in expected] == made
    for words in made:
        options = {word for word in words if word.startswith("-")} - {visible(name)}
        assert not any(visible(name) in word for word in options), "a name is never part of an option"


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_every_flag_that_advice_names_is_one_that_a_kept_release_of_the_server_has(server: str) -> None:
    engine, named = replace(full_engine(), dialect=server), set[str]()
    for verdict, stage, up in product(VERDICTS, (None, STEP_TOKENS, REUSE), (True, False)):
        for conditions in ({}, *({name: True} for name in engine.diagnosis.conditions)):
            found = replace(engine.diagnosis, verdict=verdict, stage=stage, conditions=conditions)
            one = replace(engine, diagnosis=found, up=up, error=None if up else "refused")
            actions = (*plan(one, T).actions, *pressure_plan(PlanInput(one), T, ()).steps)
            texts = (explained(one, T).action, *(f"{action.title} {action.text} {action.flags}" for action in actions))
            named |= {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)}
    known = dialect(server).options.spellings
    assert len(named & known.keys()) > 5
    assert not named - known.keys() - {"--profile"}, "(of kubectl debug)"


def test_the_input_and_an_address_in_it_are_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, path = "http://10.0.0.5:8000/a;touch${IFS}/x/pwn3", tmp_path / "a; b.jsonl"
    text = gzip.decompress((RECORDINGS / "vllm-cpu/d_kv_pressure.jsonl.gz").read_bytes()).decode()
    path.write_text(text.replace('"http://127.0.0.1:8000/metrics"', json.dumps(f"{address}/metrics")))
    for asked, printed, words in (
        ("mitigate", r"\$ (kvpressure mitigate --verify .*)", ["--verify", address]),
        ("diagnose", r"\$ (kvpressure mitigate (?!--verify).*)", [str(path)]),
    ):
        main([asked, str(path)])
        (line,) = re.findall(printed, capsys.readouterr().out)
        assert shlex.split(line) == ["kvpressure", "mitigate", *words]


# --- in the code ------------------------------------------------------------------------------------------

PROGRAMS = r"(kubectl|curl|systemctl|journalctl|dmesg|docker|nvidia-smi|kvpressure (mitigate|diagnose|audit|probe)) "
QUOTES = {"shlex.quote", "shlex.join"}
REFUSALS = {"toolbox/kubectl.py": "what a call to kubectl came to", "toolbox/report.py": "`again` is made by command"}


def pasted(node: ast.AST, file: str) -> bool:
    """Whether a name is put into the text of a command, or quoted by hand."""
    if isinstance(node, ast.JoinedStr) and file not in REFUSALS:
        text = "".join(part.value if isinstance(part, ast.Constant) else "@" for part in node.values)
        return re.search(PROGRAMS + r"[^;:]*@", text) is not None
    return isinstance(node, ast.Attribute) and ast.unparse(node) in QUOTES and file != "printable.py"


def test_no_command_is_pasted_together() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = [
        f"{file}:{node.lineno}"
        for file, text in sources.items()
        if re.search(PROGRAMS + "|shlex", text)
        for node in ast.walk(ast.parse(text))
        if pasted(node, file)
    ]
    assert found == [], "use kvpressure.printable.command"
