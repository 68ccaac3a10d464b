"""The simple commands of a shell script, as far as they are known without running it.

Anybody may have written the script. The text is read once, except for the scripts of ``eval`` and nested shells, to a
fixed depth; the length of expanded variables is bounded. Pure; never raises.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Final

from kvpressure.engines.command import MAX_WORD, bounded
from kvpressure.model.frozen import frozen

UNKNOWN: Final = "\x00"  # stands for the unknown text of a variable or substitution
UNKNOWN_WORDS: Final = UNKNOWN * 2  # for any number of unknown words, however quoted: an array

BEFORE_PROGRAM: Final = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "--"})
SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
SET: Final = re.compile(r"([A-Za-z_]\w*+)(\+?)=")
REFERENCE: Final = re.compile(r"\$?\$\(([A-Za-z_][\w.-]*+)\)")  # which the kubelet replaces

_MAX_DEPTH: Final = 48  # of expansions and quotations in one another
_MAX_STEPS: Final = 8192  # a script of 16 KiB takes about 5 000
_MAX_NESTED: Final = 2  # of scripts in one another
_OPENS: Final = frozenset({"if", "while", "until", "for", "case", "select"})
_CLOSES: Final = frozenset({"fi", "done", "esac"})
_NAMES_ITS_VARIABLE: Final = frozenset({"for", "select", "read", "unset"})
_DECLARES: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})
_BEFORE_ASSIGNMENT: Final = _DECLARES | BEFORE_PROGRAM

_PLAIN: Final = re.compile(r"[^\s;|&()<>\"'\\$`#]++")
_BLANKS: Final = re.compile(r"[ \t\r\f\v]++")
_PIECES: Final = re.compile(r"\s++|\S++")
_PLAIN_UNTIL: Final = {  # by what closes it: text without anything special in it
    '"': re.compile(r"[^\"\\$`]++"),
    "}": re.compile(r"[^}\"'\\$`]++"),
    ")": re.compile(r"[^()\"'\\$`]++"),
}
_TABS: Final = r"\t*+"  # which may stand before the end of a here-document
_NAME: Final = re.compile(r"[A-Za-z_]\w*+")
_BRACE: Final = re.compile(r"([A-Za-z_]\w*+)(\}|:?[-=])")
_REDIRECTION: Final = re.compile(r"&>>?|>[>&|]?|<<<|<<-?|<[&>]?")
_SHELL_OPTION: Final = re.compile(r"[-+][A-Za-z]++|--[a-z-]*+|-")
_COMMAND_OPTION: Final = re.compile(r"-[a-z]*c")
_NAMED_OPTION: Final = re.compile(r"[-+][A-Za-z]*[oO]")

_Put = Callable[[str, bool], None]  # text, and whether blanks in it end a word


class NotUnderstood(Exception):
    """An unclosed quotation, or a bound was reached."""


class WorkBudget:
    """Remaining characters of expanded variables, and remaining steps."""

    def __init__(self, characters: int, steps: int = _MAX_STEPS) -> None:
        self._left = characters
        self._steps = steps

    def takes(self, text: str) -> bool:
        """Whether ``text`` fits; if so, it is charged."""
        if len(text) >= self._left:
            return False
        self._left -= len(text) + 1
        return True

    def step(self) -> None:
        """Take one step. Raises ``NotUnderstood`` when there were too many."""
        self._steps -= 1
        if self._steps < 0:
            raise NotUnderstood


def of_kubelet(text: str, env: Mapping[str, str], budget: WorkBudget) -> str:
    """A word of a container's command with ``$(VAR)`` expanded as the kubelet does; unknown names stay, ``$$(VAR)``
    is an escape.
    """

    def value(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return found[0][1:]
        brought = env.get(found[1])
        return found[0] if brought is None else brought if budget.takes(brought) else UNKNOWN

    return REFERENCE.sub(value, text) if "$(" in text else text


@frozen
class ShellScript:
    """``commands``: words of every simple command. ``understood``: the whole script was parsed."""

    commands: list[list[str]]
    understood: bool


def script_of(tokens: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """(script, positional parameters) if the tokens run a shell with ``-c``, else None."""
    shell = False
    for index, token in enumerate(tokens[:-1]):
        if shell and _COMMAND_OPTION.fullmatch(token):
            at = index + 1
            while at < len(tokens) and _SHELL_OPTION.fullmatch(tokens[at]):  # between -c and its script, up to --
                last = tokens[at] in ("-", "--")
                at += 2 if _NAMED_OPTION.fullmatch(tokens[at]) else 1  # -o pipefail
                if last:
                    break
            return (tokens[at], tokens[at + 2 :]) if at < len(tokens) else None
        shell = shell or base(token) in SHELLS
    return None


def base(token: str) -> str:
    """The last part of a path."""
    return token.rsplit("/", 1)[-1]


def program_of(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], ShellScript, bool]:
    """(words of a container's command, the commands that it runs, whether a script says which)."""
    budget = WorkBudget(MAX_WORD)
    words = [of_kubelet(word, env, budget) for word in bounded(argv)]
    script = script_of(words)
    if script is None:
        return words, ShellScript([words] if words else [], True), False
    return words, read(*script, env, budget), True


def read(text: str, parameters: Sequence[str], variables: Mapping[str, str], budget: WorkBudget) -> ShellScript:
    """The commands of a script; ``variables``: its environment. Unknown text becomes ``UNKNOWN``."""
    scan = _Scan(text, parameters, dict(variables), budget, 0)
    understood = scan.run()
    return ShellScript(scan.commands, understood)


class _Scan:
    """One pass over a script; positions only grow."""

    def __init__(
        self, text: str, parameters: Sequence[str], variables: MutableMapping[str, str], budget: WorkBudget, nested: int
    ) -> None:
        self.commands: list[list[str]] = []
        self._text = text
        self._parameters = parameters
        self._variables = variables
        self._budget = budget
        self._nested = nested
        self._understood = True
        self._command: list[str] = []
        self._word: list[str] | None = None
        self._splits = True  # blanks that a variable brings end the word: not in an assignment
        self._redirection = ""
        self._heredocs: list[tuple[str, bool]] = []  # their last line, and whether tabs may stand before it
        self._depth = 0
        self._blocks = 0  # conditions and loops that are open
        self._chained = False  # the command stands after && or ||

    def run(self) -> bool:
        """Parse the text; returns whether all was understood."""
        try:
            self._run()
        except NotUnderstood:
            self._understood = False
        self._end_command("")
        return self._understood

    def _run(self) -> None:
        text, position = self._text, 0
        while position < len(text):
            self._budget.step()
            found = _PLAIN.match(text, position)
            if found is not None:
                position = found.end()
                self._put(found[0], False)
                continue
            sign = text[position]
            step = _STEPS.get(sign)
            position = step(self, position) if step is not None else self._literal(position)

    # --- signs outside quotes: each returns the position after it -------------------------------------------------

    def _literal(self, position: int) -> int:
        if self._text[position].isspace():
            self._end_word()
        else:
            self._put(self._text[position], False)
        return position + 1

    def _blank(self, position: int) -> int:
        self._end_word()
        found = _BLANKS.match(self._text, position)
        return found.end() if found is not None else position + 1

    def _newline(self, position: int) -> int:
        self._end_command("\n")
        position += 1
        for last, tabs in self._heredocs:
            position = self._heredoc(position, last, tabs)
        self._heredocs = []
        return position

    def _separator(self, position: int) -> int:
        text = self._text
        if text.startswith("&>", position):
            return self._redirect(position)
        twice = text[position : position + 2]
        sign = twice if twice in ("&&", "||", ";;") else text[position]
        self._end_command(sign)
        return position + len(sign)

    def _parenthesis(self, position: int) -> int:
        if self._text[position] == "(" and self._word is not None and SET.fullmatch("".join(self._word)):
            end = self._until(")", position + 1, False, _nowhere)  # an array
            self._put(UNKNOWN_WORDS, False)
            return end
        self._end_command(";")
        return position + 1

    def _comment(self, position: int) -> int:
        if self._word is not None:
            return self._literal(position)
        end = self._text.find("\n", position)
        return len(self._text) if end < 0 else end

    def _escape(self, position: int) -> int:
        following = self._text[position + 1 : position + 2]
        if following == "\n":
            self._end_word()
        else:
            self._put(following, False)
        return position + 2

    def _double(self, position: int) -> int:
        if self._text.startswith('"$@"', position):
            self._put_parameters()
            return position + 4
        self._put("", False)
        return self._until('"', position + 1, True, self._put)

    def _redirect(self, position: int) -> int:
        text = self._text
        if text[position] in "<>" and text.startswith("(", position + 1):
            end = self._until(")", position + 2, False, _nowhere)
            self._put(UNKNOWN, False)
            return end
        if self._word is not None and "".join(self._word).isdigit():
            self._word = None  # the number of a file, not an argument
        self._end_word()
        found = _REDIRECTION.match(text, position)
        self._redirection = found[0] if found is not None else ">"
        return position + len(self._redirection)

    # --- quotes and expansions: their text goes to ``put`` ---------------------------------------------------

    def _verbatim(self, position: int, put: _Put) -> int:
        """Read a single-quoted text; ``position`` is that of its opening quote."""
        end = self._text.find("'", position + 1)
        if end < 0:
            raise NotUnderstood
        put(self._text[position + 1 : end], False)
        return end + 1

    def _until(self, closing: str, position: int, quoted: bool, put: _Put) -> int:
        """Read up to ``closing``, and return the position after it; ``position`` is after what opened it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstood
        while True:
            self._budget.step()
            found = _PLAIN_UNTIL[closing].match(self._text, position)
            if found is not None:
                put(found[0], not quoted)
                position = found.end()
            sign = self._text[position : position + 1]
            if sign == closing:
                self._depth -= 1
                return position + 1
            position = self._within(closing, sign, position, quoted, put)

    def _within(self, closing: str, sign: str, position: int, quoted: bool, put: _Put) -> int:
        """Read what a ``sign`` before ``closing`` begins."""
        if sign == "":
            raise NotUnderstood
        if sign == "$":
            return self._expansion(position, quoted, put)
        if sign == "`":
            return self._substitution(position, put)
        if sign == '"':
            return self._until('"', position + 1, True, put)
        if sign == "'" and not quoted:
            return self._verbatim(position, put)
        if sign == "(" and closing == ")":
            return self._until(")", position + 1, quoted, put)
        if sign != "\\":
            put(sign, False)
            return position + 1
        following = self._text[position + 1 : position + 2]
        if closing == '"':
            following = " " if following == "\n" else following if following in '"\\$`' else sign + following
        put(following, False)
        return position + 2

    def _substitution(self, position: int, put: _Put) -> int:
        end = self._text.find("`", position + 1)
        if end < 0:
            raise NotUnderstood
        put(UNKNOWN, False)
        return end + 1

    def _expansion(self, position: int, quoted: bool, put: _Put) -> int:
        """Read an expansion; ``position`` is that of its ``$``."""
        text = self._text
        sign = text[position + 1 : position + 2]
        if sign == "{":
            return self._brace(position + 2, quoted, put)
        if sign == "(":
            end = self._until(")", position + 2, False, _nowhere)
            put(UNKNOWN, False)
            return end
        found = _NAME.match(text, position + 1)
        if found is not None:
            put(self._value(self._variables.get(found[0], UNKNOWN)), not quoted)
            return found.end()
        if sign and sign in "@*":
            put(self._value(" ".join(self._parameters)), not quoted)
            return position + 2
        if sign and sign in "0123456789#?!$-":
            put(UNKNOWN, False)
            return position + 2
        if not (sign and sign in "'\"" and not quoted):  # $'...' and $"..." are quotations
            put("$", False)
        return position + 1

    def _brace(self, position: int, quoted: bool, put: _Put) -> int:
        """Read ``${...}``; ``position`` is after the brace."""
        text = self._text
        found = _BRACE.match(text, position)
        if found is None:
            name = _NAME.match(text, position)
            many = (
                text.startswith(("[@]", "[*]"), name.end())
                if name is not None
                else text[position : position + 1] in ("@", "*")
            )
            end = self._until("}", position, False, _nowhere)
            put(UNKNOWN_WORDS if many else UNKNOWN, False)
            return end
        value = self._variables.get(found[1])
        if found[2] == "}":
            put(self._value(UNKNOWN if value is None else value), not quoted)
            return found.end()
        given = value is not None and (value != "" or ":" not in found[2])
        if given and value is not None:
            put(self._value(value), not quoted)
        return self._until("}", found.end(), quoted, _nowhere if given else put)

    def _value(self, text: str) -> str:
        return text if self._budget.takes(text) else UNKNOWN

    # --- words and commands -----------------------------------------------------------------------------------------

    def _put(self, text: str, splits: bool) -> None:
        if splits and self._splits:
            for piece in _PIECES.findall(text):
                self._budget.step()
                if piece.isspace():
                    self._end_word()
                else:
                    self._word = [*(self._word or ()), piece]
            return
        if self._word is None:
            self._word = []
        self._word.append(text)
        if len(self._word) == 1 and SET.match(text) and self._may_assign():
            self._splits = False

    def _may_assign(self) -> bool:
        """Whether the word is at a place where an assignment is possible."""
        return not self._command or SET.match(self._command[-1]) is not None or self._command[-1] in _BEFORE_ASSIGNMENT

    def _put_parameters(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if index:
                self._end_word()
            self._put(self._value(parameter), False)

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, self._word, self._splits = "".join(self._word), None, True
        redirection, self._redirection = self._redirection, ""
        if redirection in ("<<", "<<-"):
            self._heredocs.append((word, redirection == "<<-"))
        elif not redirection:
            self._command.append(word)
        elif word.startswith("--"):  # a file of this name is a mistake; without its name a value is another option's
            self._command.append(word)
            self._understood = False

    def _end_command(self, separator: str) -> None:
        self._end_word()
        self._redirection = ""
        command, self._command = self._command, []
        if command:
            self._follow(command)
        if separator != "\n" or command:
            self._chained = separator in ("&&", "||")

    def _follow(self, command: list[str]) -> None:
        """Record the command's assignments, and parse the script that it runs."""
        start = next((index for index, word in enumerate(command) if word not in BEFORE_PROGRAM), len(command))
        program = command[start] if start < len(command) else ""
        opened = sum(word in _OPENS for word in command[: start + 1])
        self._blocks = max(0, self._blocks + opened - (program in _CLOSES))
        if program in _NAMES_ITS_VARIABLE:
            self._variables.update(
                dict.fromkeys(
                    command[start + 1 :] if program in ("read", "unset") else command[start + 1 : start + 2], UNKNOWN
                )
            )
        elif program in _DECLARES or SET.match(program):
            self._assign(command[start:])
        if program == "eval" and self._nested < _MAX_NESTED:
            self._look_into(" ".join(command[start + 1 :]), self._parameters, self._variables)
            return
        shelled = script_of(command) if self._nested < _MAX_NESTED else None
        if shelled is None:
            self.commands.append(command)
        else:
            self._look_into(*shelled, self._variables)

    def _assign(self, words: Sequence[str]) -> None:
        for word in words:
            found = SET.match(word)
            if found is None:
                if word in _DECLARES or word.startswith("-"):
                    continue
                return
            name, value = found[1], word[found.end() :]
            before = self._variables.get(name)
            if found[2]:
                value = (UNKNOWN if before is None else self._value(before)) + value
            certain = not self._chained and not self._blocks
            self._variables[name] = value if certain or value == before else UNKNOWN

    def _look_into(self, text: str, parameters: Sequence[str], variables: MutableMapping[str, str]) -> None:
        scan = _Scan(text, parameters, variables, self._budget, self._nested + 1)
        understood = scan.run()
        self.commands += scan.commands
        if variables is self._variables:  # else it is a text, which may have been meant for something else
            self._understood = self._understood and understood

    def _heredoc(self, position: int, last: str, tabs: bool) -> int:
        """The position after the here-document that ends with ``last``; it may be a script and is parsed as one."""
        found = re.compile(rf"^{_TABS if tabs else ''}{re.escape(last)}$", re.MULTILINE).search(self._text, position)
        stop, end = (len(self._text), len(self._text)) if found is None else found.span()
        if self._nested < _MAX_NESTED:
            self._look_into(self._text[position:stop], (), ChainMap({}, self._variables))
        return end


def _nowhere(_text: str, _splits: bool) -> None:
    """Discard the text."""


_STEPS: Final[Mapping[str, Callable[[_Scan, int], int]]] = {
    " ": _Scan._blank,
    "\t": _Scan._blank,
    "\r": _Scan._blank,
    "\n": _Scan._newline,
    ";": _Scan._separator,
    "&": _Scan._separator,
    "|": _Scan._separator,
    "(": _Scan._parenthesis,
    ")": _Scan._parenthesis,
    "#": _Scan._comment,
    "\\": _Scan._escape,
    "'": lambda scan, position: scan._verbatim(position, scan._put),
    '"': _Scan._double,
    "$": lambda scan, position: scan._expansion(position, False, scan._put),
    "`": lambda scan, position: scan._substitution(position, scan._put),
    "<": _Scan._redirect,
    ">": _Scan._redirect,
}
