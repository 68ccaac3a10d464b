"""The simple commands of a shell script, as far as they are known without running it.

Discovery needs it where only a manifest is seen: a pod that has not started has neither a process nor a log, and which
of two branches a pod takes, or where its server listens, stands nowhere else. Anybody may have written the script. The
text is read once, except for the scripts of ``eval`` and nested shells, to a fixed depth; the length of expanded
variables is bounded. A here-document is read as commands: it may be a script. Which branch a ``case`` takes stays
unknown. Pure; never raises.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Final

from kvpressure.engines.command import MAX_WORD, Node, bounded, either
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen

UNKNOWN: Final = "\x00"  # stands for the unknown text of a variable or substitution
UNKNOWN_WORDS: Final = UNKNOWN * 2  # for any number of unknown words, however quoted: an array
_ITEM: Final = "\x01"  # before each word of an array, in the value of its variable

SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
SET: Final = re.compile(r"([A-Za-z_]\w*+)(\+?)=")
REFERENCE: Final = re.compile(r"\$?\$\(([A-Za-z_][\w.-]*+)\)")  # which the kubelet replaces

_MAX_DEPTH: Final = 48  # of expansions and quotations in one another
_MAX_STEPS: Final = 8192  # a script of 16 KiB takes about 5 000
_MAX_NESTED: Final = 2  # of scripts in one another
_TESTS: Final = ("test", "[", "[[")
_OPENS: Final = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSES: Final = frozenset({"fi", "done", "esac"})
_KEYWORDS: Final = _OPENS | _CLOSES | {"then", "elif", "else", "do", "!", "}"}
_DECLARES: Final = frozenset({"export", "local", "declare", "readonly", "typeset"})
_NAMES_VARIABLES: Final = frozenset({"read", "unset", "let", "printf", "mapfile", "readarray", "getopts"})

_PLAIN: Final = re.compile(r"[^\s;|&()<>\"'\\$`#]++")
_BLANKS: Final = re.compile(r"[^\S\n]++")
_PIECES: Final = re.compile(r"\s++|\S++")
_PLAIN_UNTIL: Final = {  # by what closes it: text without anything special in it
    '"': re.compile(r"[^\"\\$`]++"),
    "}": re.compile(r"[^}\"'\\$`]++"),
    ")": re.compile(r"[^()\"'\\$`]++"),
}
_NAME: Final = re.compile(r"[A-Za-z_]\w*+|[@*]|[0-9#?!$-]")
_BRACE: Final = re.compile(r"([A-Za-z_]\w*+|[@*])(?:\[([@*])\])?(\}|:?[-=])")
_OPERATOR: Final = re.compile(r"&&|\|\||;;|[;|&()\n]")
_ARITHMETIC: Final = re.compile(r"\([^()]*+(?:\([^()]*+\)[^()]*+)*+\)\)")  # after the first sign of "(("
_CHANGED: Final = re.compile(
    r"([A-Za-z_]\w*+)\s*+(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*+([A-Za-z_]\w*+)"
)
_REDIRECTION: Final = re.compile(r"&>>?|>[>&|]?|<<<|<<-?|<[&>]?")
_SHELL_OPTION: Final = re.compile(r"[-+][A-Za-z]++|--[a-z-]*+|-")
_COMMAND_OPTION: Final = re.compile(r"-[a-z]*c")
_NAMED_OPTION: Final = re.compile(r"[-+][A-Za-z]*[oO]")

_LEADER: Final = re.compile(
    r"(?:--(?:(?:ray|data[-_]parallel)[-_])?address|--master[-_]addr|--dist[-_]init[-_]addr|-dpa)[= ](?:tcp://)?"
    r"(\d{1,3}(?:\.\d{1,3}){3}|[A-Za-z0-9][A-Za-z0-9-]*+)(?=[.:\s]|$)"
)
_PLACE: Final = re.compile(r"\bray start\b(?P<head>[^\n]*\s--head\b)?|\.sh (?P<word>leader|worker)\b")
"""How Ray starts a node, and how vLLM's example script is told to."""

_Piece = tuple[str | None, bool]  # text, and whether blanks in it end a word; None = between two words


class NotUnderstood(Exception):
    """An unclosed quotation, or a bound was reached."""


class WorkBudget:
    """Remaining characters of expanded variables, of which each step takes one."""

    def __init__(self) -> None:
        self._left = MAX_WORD + _MAX_STEPS

    def takes(self, text: str) -> bool:
        """Whether ``text`` fits; if so, it is charged."""
        if len(text) >= self._left:
            return False
        self._left -= len(text) + 1
        return True

    def step(self) -> None:
        """Take one step. Raises ``NotUnderstood`` when there were too many."""
        if not self.takes(""):
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
class SimpleCommand:
    """``certain``: it runs if what stands before it succeeds; else it stands in a branch that may be taken."""

    words: Sequence[str]
    certain: bool = True


@frozen
class ShellScript:
    """``commands``: those that may be run. ``understood``: the whole script was parsed."""

    commands: Sequence[SimpleCommand]
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
    budget = WorkBudget()
    words = [of_kubelet(word, env, budget) for word in bounded(argv)]
    script = script_of(words)
    if script is None:
        return words, ShellScript([SimpleCommand(words)] if words else [], True), False
    scan = _Scan(*script, ChainMap(dict(env)), budget, 0)
    understood = scan.run()
    return words, ShellScript(scan.commands, understood), True


def node_of(script: ShellScript, args: EngineArgs) -> Node | None:
    """The place in an engine of several nodes, by the commands and the arguments of the server among them."""
    text = "\n".join(" ".join(command.words) for command in script.commands)
    address, place, rank = _LEADER.search(text), _PLACE.search(text), args.integer("node_rank")
    leads = None if place is None else bool(place["head"]) or place["word"] == "leader"
    if rank is not None or args.values.get("headless") == "True":
        leads = rank == 0
    if address is None and leads is None and (args.integer("nnodes") or 1) == 1:
        return None
    return Node("" if address is None else address[1], leads)


def servers(
    commands: Sequence[SimpleCommand], args: Sequence[EngineArgs]
) -> tuple[EngineArgs, Sequence[EngineArgs]] | None:
    """(arguments of the server that these commands start, those of further ones); None without a command. Commands in
    branches are ways to start one server.
    """
    if not all(command.certain for command in commands):
        return either(args) if len(args) > 1 else args[0], ()
    return (args[0], args[1:]) if commands else None


def is_here(command: SimpleCommand) -> bool:
    """Whether it was understood that the command runs in this container: one for all nodes of a Ray cluster runs on
    its head only.
    """
    return command.certain and "symmetric-run" not in command.words


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def _opposite(result: bool | None) -> bool | None:
    return None if result is None else not result


class _Block:
    """An open condition, loop or group. ``runs``: whether its present branch does; ``later``: whether another one may
    still be taken. ``outside``: variables and positional parameters around a group; ``function``: it is a function's.
    """

    def __init__(self, word: str, runs: bool | None) -> None:
        self.word = word
        self.outside: tuple[ChainMap[str, str], Sequence[str] | None] | None = None
        self.function = False
        self.runs = self.later = runs

    def decide(self, result: bool | None) -> None:
        """Take the branch after a test with this result."""
        self.runs = _both(self.later, result)
        self.later = _both(self.later, _opposite(result))


class _Scan:
    """One pass over a script; ``_at`` only grows."""

    def __init__(
        self,
        text: str,
        parameters: Sequence[str] | None,
        variables: ChainMap[str, str],
        budget: WorkBudget,
        nested: int,
        certain: bool = True,
    ) -> None:
        self.commands: list[SimpleCommand] = []
        self._text, self._at = text, 0
        self._variables = variables
        self._parameters = parameters  # None = unknown
        self._of_functions: set[str] = set()  # variables that change when a function is called
        self._budget = budget
        self._nested = nested
        self._certain = certain
        self._understood = True
        self._command: list[str] = []
        self._word: list[str] | None = None
        self._splits = True  # blanks that a variable brings end the word: not in an assignment
        self._redirection = ""
        self._depth = 0
        self._outer: tuple[str, list[str]] | None = None  # an array's name with "=", and the command before it
        self._blocks: list[_Block] = []
        self._before = ""  # the operator before the command
        self._status: bool | None = None  # whether the last command succeeded
        self._passes: bool | None = None  # the same, where a program that is no test is taken to succeed
        self._ended = False  # by exec or exit

    def run(self) -> bool:
        """Parse the text; returns whether all was understood."""
        try:
            while self._at < len(self._text):
                self._budget.step()
                self._step()
        except NotUnderstood:
            self._understood = False
        self._end_command("\n")
        return self._understood

    def _step(self) -> None:
        text, at = self._text, self._at
        sign = text[at]
        if found := _PLAIN.match(text, at):
            self._put(found[0], False)
            self._at = found.end()
        elif found := _BLANKS.match(text, at):
            self._end_word()
            self._at = found.end()
        elif sign == "#" and self._word is None:
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
        elif sign in "<>" or text.startswith("&>", at):
            self._redirect()
        elif found := _OPERATOR.match(text, at):
            self._at = found.end()
            self._operate(found[0])
        else:
            for piece, splits in self._pieces(False):
                self._put(piece, splits)

    # --- operators --------------------------------------------------------------------------------------------------

    def _operate(self, sign: str) -> None:
        if sign == "(" and self._word is not None and SET.fullmatch("".join(self._word)):
            self._outer, self._word, self._command = ("".join(self._word), self._command), None, []
        elif sign == "(" and (found := _ARITHMETIC.match(self._text, self._at)):
            changed = _CHANGED.findall(found[0])
            self._variables.update(dict.fromkeys((name or after for name, after in changed), UNKNOWN))
            self._at = found.end()
            self._put("((", False)
        elif self._outer is not None and sign in ")\n":
            self._end_word()
            if sign == ")":
                (name, before), self._outer = self._outer, None
                self._word, self._command = [name, *(_ITEM + word for word in self._command)], before
        else:
            self._end_command(sign)

    def _redirect(self) -> None:
        if self._text[self._at] in "<>" and self._text.startswith("(", self._at + 1):
            self._at += 2
            self._until(")", False)
            self._put(UNKNOWN, False)
            return
        if self._word is not None and "".join(self._word).isdigit():
            self._word = None  # the number of a file, not an argument
        self._end_word()
        found = _REDIRECTION.match(self._text, self._at)
        self._redirection = found[0] if found is not None else ">"
        self._at += len(self._redirection)

    # --- quotes and expansions --------------------------------------------------------------------------------------

    def _pieces(self, quoted: bool, closing: str = "") -> list[_Piece]:
        """What begins here with a sign that is not plain text."""
        text, sign = self._text, self._text[self._at]
        self._at += 1
        if sign == "$":
            return self._expansion(quoted)
        if sign == "`":
            self._verbatim(sign)
            return [(UNKNOWN, False)]
        if sign == '"':
            return [("", False)] * text.startswith(sign, self._at) + self._until(sign, True)
        if sign == "'" and not quoted:
            return [(self._verbatim(sign), False)]
        if sign == "(" and closing == ")":
            return self._until(")", quoted)
        if sign != "\\":
            return [(sign, False)]
        following = text[self._at : self._at + 1]
        self._at += 1
        if closing == '"':
            return [(" " if following == "\n" else following if following in '"\\$`' else sign + following, False)]
        return [(None, False) if following == "\n" and not closing else (following, False)]

    def _verbatim(self, closing: str) -> str:
        end = self._text.find(closing, self._at)
        if end < 0:
            raise NotUnderstood
        text, self._at = self._text[self._at : end], end + 1
        return text

    def _until(self, closing: str, quoted: bool) -> list[_Piece]:
        """Read up to ``closing`` and over it."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstood
        pieces: list[_Piece] = []
        while not self._text.startswith(closing, self._at):
            self._budget.step()
            if self._at >= len(self._text):
                raise NotUnderstood
            if found := _PLAIN_UNTIL[closing].match(self._text, self._at):
                pieces.append((found[0], not quoted))
                self._at = found.end()
            else:
                pieces += self._pieces(quoted, closing)
        self._depth -= 1
        self._at += 1
        return pieces

    def _expansion(self, quoted: bool) -> list[_Piece]:
        """Read an expansion, after its ``$``."""
        sign = self._text[self._at : self._at + 1]
        if sign == "{":
            return self._brace(quoted)
        if sign == "(":
            self._at += 1
            self._until(")", False)
            return [(UNKNOWN, False)]
        if found := _NAME.match(self._text, self._at):
            self._at = found.end()
            return self._value(found[0], quoted)
        # $'...' and $"..." are quotations
        return [] if sign and sign in "'\"" and not quoted else [("$", False)]

    def _brace(self, quoted: bool) -> list[_Piece]:
        """Read ``${...}``."""
        self._at += 1
        found = _BRACE.match(self._text, self._at)
        if found is None:
            many = "[@]" in (head := self._text[self._at : self._at + 64].partition("}")[0]) or "[*]" in head
            self._until("}", False)
            return [(UNKNOWN_WORDS if many else UNKNOWN, False)]
        self._at = found.end()
        value = self._variables.get(found[1])
        if found[3] == "}":
            return self._value(found[1], quoted, many=found[2] is not None)
        otherwise = self._until("}", quoted)
        if value is not None and (value or ":" not in found[3]):
            return self._value(found[1], quoted, many=found[2] is not None)
        if found[3].endswith("="):
            self._variables[found[1]] = UNKNOWN  # set from here on, where this branch runs
        return otherwise

    def _value(self, name: str, quoted: bool, many: bool = False) -> list[_Piece]:
        """What a variable, a whole array (``many``) or all positional parameters bring."""
        value, words = self._variables.get(name), self._parameters
        if name not in ("@", "*"):
            if value is None:
                return [(UNKNOWN_WORDS if many else UNKNOWN, not quoted)]
            words = [*filter(None, value.split(_ITEM))] if many else [value.removeprefix(_ITEM).partition(_ITEM)[0]]
        if words is None or not all(map(self._budget.takes, words)):
            return [(UNKNOWN_WORDS, not quoted)]
        pieces: list[_Piece] = [piece for word in words for piece in ((None, False), (word, not quoted))]
        return pieces[1:]

    # --- words and commands -----------------------------------------------------------------------------------------

    def _put(self, text: str | None, splits: bool) -> None:
        if text is None:
            self._end_word()
            return
        if splits and self._splits:
            for piece in _PIECES.findall(text):
                self._budget.step()
                if piece.isspace():
                    self._end_word()
                else:
                    self._word = [*(self._word or ()), piece]
            return
        self._word = self._word or []
        self._word.append(text)
        if len(self._word) == 1 and SET.match(text):
            self._splits = False

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, self._word, self._splits = "".join(self._word), None, True
        redirection, self._redirection = self._redirection, ""
        if not redirection:
            self._command.append(word)
            opens = self._command[2:] if self._command[0] == "function" else self._command
            if word == "{" and _KEYWORDS.issuperset(opens) and self._outer is None:
                self._end_command("\n")  # what follows is read in the group
        elif word.startswith("--"):  # a file of this name is a mistake; without its name a value is another option's
            self._command.append(word)
            self._understood = False

    def _end_command(self, separator: str) -> None:
        self._end_word()
        self._redirection = ""
        words, self._command = self._command, []
        if separator == ")" and self._blocks and self._blocks[-1].word == "case":
            self._before = ""
            return  # the pattern of a branch
        if words:
            self._follow(words, separator)
        if separator in "()":
            self._keyword("{" if separator == "(" else "}")
        if words or separator != "\n":
            self._before = separator

    def _follow(self, words: Sequence[str], separator: str) -> None:
        """Keep track of what the keywords before a command open and close, then take the command itself."""
        at, negated = 0, False
        if words[0] == "function":
            at, self._before = 2, ")"
        while at < len(words) and (word := words[at]) in _KEYWORDS:
            at += 1
            negated ^= word == "!"
            self._keyword(word)
            if word in ("for", "select", "case"):
                self._variables.update(dict.fromkeys(words[at : at + 1], UNKNOWN))
                return
        words = words[at:]
        if words and (runs := self._runs()) is not False:
            result = _opposite(_result(words)) if negated else _result(words)
            reached = self._reached()
            self._take(words, self._certain and runs is True, separator)
            self._status = result if reached or result is (self._before == "||") else None
            self._passes = True if self._status is None and runs and words[0] not in _TESTS else self._status

    def _reached(self) -> bool | None:
        """Whether the operator before the command lets it run."""
        if self._before == "&&":
            return self._passes
        return _opposite(self._status) if self._before == "||" else True

    def _runs(self) -> bool | None:
        return False if self._ended else _both(self._reached(), self._blocks[-1].runs if self._blocks else True)

    def _keyword(self, word: str) -> None:
        if word in _OPENS:
            block = _Block(word, _both(self._runs(), None) if word == "case" else self._runs())
            self._blocks.append(block)
            if word == "{" and len(self._variables.maps) < _MAX_DEPTH:
                block.outside, block.function = (self._variables, self._parameters), self._before == ")"
                self._variables = self._variables.new_child()
                self._parameters = None if block.function else self._parameters
        elif not self._blocks:
            return
        elif word in _CLOSES or (word == "}" and self._blocks[-1].word == "{"):
            self._end_group(self._blocks.pop())
        elif word in ("elif", "else"):
            self._blocks[-1].runs = self._blocks[-1].later
        elif word in ("then", "do"):
            results = {"for": None, "select": None, "until": _opposite(self._status)}
            self._blocks[-1].decide(results.get(self._blocks[-1].word, self._status))

    def _end_group(self, block: _Block) -> None:
        """Forget what was set in a group: it is another process, or a function that is called later or never."""
        if block.outside is not None:
            changed = self._variables.maps[0].keys()
            self._variables, self._parameters = block.outside
            self._variables.update(dict.fromkeys(changed, UNKNOWN))
            self._of_functions |= changed if block.function else set()

    def _take(self, words: Sequence[str], certain: bool, separator: str) -> None:
        """Record a command's assignments, and parse the script that it runs."""
        program, outside = words[0], self._variables
        prefixes = SET.match(program) is not None and not all(map(SET.match, words))
        if prefixes or separator in ("&", "|") or self._before == "|":
            self._variables = outside.new_child()  # what is set for or by another process ends with it
        if program in _NAMES_VARIABLES:
            names = (found[0] for found in map(_NAME.match, words[1:]) if found)
            self._variables.update(dict.fromkeys(names, UNKNOWN))
        elif program == "shift" or (program == "set" and "--" in words):
            self._parameters = words[words.index("--") + 1 :] if certain and program == "set" else None
        elif program in _DECLARES or SET.match(program):
            self._assign(words, certain)
        if (
            certain
            and separator not in ("&", "|", ")")
            and (program == "exit" or (program == "exec" and len(words) > 1))
        ):
            self._ended = True
        shelled = script_of(words) if self._nested < _MAX_NESTED else None
        if program == "eval" and self._nested < _MAX_NESTED:
            self._parameters = self._look_into(" ".join(words[1:]), self._parameters, certain, self._variables)
        elif shelled is not None:
            self._look_into(*shelled, certain, self._variables.new_child())
        else:
            self.commands.append(SimpleCommand(words, certain))
        self._variables = outside

    def _assign(self, words: Sequence[str], certain: bool) -> None:
        for word in words:
            found = SET.match(word)
            if found is None:
                if word in _DECLARES or word.startswith("-"):
                    continue
                return
            before, value = self._variables.get(found[1]), word[found.end() :]
            if found[2]:  # +=
                value = (UNKNOWN if before is None or not self._budget.takes(before) else before) + value
            lasting = certain and found[1] not in self._of_functions
            self._variables[found[1]] = value if lasting or value == before else UNKNOWN

    def _look_into(
        self, text: str, parameters: Sequence[str] | None, certain: bool, variables: ChainMap[str, str]
    ) -> Sequence[str] | None:
        """Parse a script in the script; returns its parameters at its end."""
        scan = _Scan(text, parameters, variables, self._budget, self._nested + 1, certain)
        self._understood = scan.run() and self._understood
        self.commands += scan.commands
        return scan._parameters


_RESULTS: Final = {":": True, "true": True, "false": False}
_NUMBERS: Final = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-ge": (0, 1), "-lt": (-1,), "-le": (-1, 0)}


def _result(words: Sequence[str]) -> bool | None:
    """Whether a command succeeds, where that is certain: a comparison of known texts; None for any other."""
    match words:
        case [(":" | "true" | "false") as word, *_]:
            return _RESULTS[word]
        case ["[[", _, _, pattern, "]]"] if any(sign in pattern for sign in "*?["):
            return None
        case ["test", *test] | ["[", *test, "]"] | ["[[", *test, "]]"] if not any(UNKNOWN in word for word in test):
            return _compared(test)
    return None


def _compared(test: Sequence[str]) -> bool | None:
    match test:
        case [("-n" | "-z") as operator, word]:
            return (operator == "-n") == bool(word)
        case [left, ("=" | "==" | "!=") as operator, right]:
            return (left == right) == (operator != "!=")
        case [left, operator, right] if operator in _NUMBERS and left.isdecimal() and right.isdecimal():
            one, other = int(left[:18]), int(right[:18])
            return (one > other) - (one < other) in _NUMBERS[operator]
    return None
