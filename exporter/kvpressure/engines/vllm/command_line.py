"""The command line of a vLLM container as ``EngineArgs``. Pure; see ``parse``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvpressure.args import MAX_TEXT, EngineArgs

_UNKNOWN: Final = "\x00"  # stands for text that a variable or substitution would have brought
_UNKNOWN_WORDS: Final = _UNKNOWN * 2  # for what brings any number of words, however it is quoted: an array
_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_NOT_MODELS: Final = frozenset(
    {
        "python",
        "python3",
        "ray",
        "env",
        "tini",
        "dumb-init",
        "uv",
        "uvicorn",
        "nsys",
        "numactl",
        "torchrun",
        "mpirun",
        "sleep",
        "exec",
    }
)
_SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-q": "quantization",
    "-asc": "api_server_count",
    "-n": "nnodes",
    "-r": "node_rank",
    "-dpl": "data_parallel_size_local",
    "-dpr": "data_parallel_start_rank",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-ep": "enable_expert_parallel",
    "-O": "optimization_level",
}
_FLAG = re.compile(
    r"(?:enable|disable|allow|skip|use|show|log|return|trust)_\w+|enforce_eager|headless|async_scheduling|"
    r"data_parallel_\w+_lb|calculate_kv_scales|language_model_only|fully_sharded_loras|h2c|aggregate_engine_logging"
)
_VALUED: Final = frozenset(
    {"log_config_file", "show_hidden_metrics_for_version"}
)  # named like a flag, yet with a value
_BEFORE_PROGRAM: Final = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "(", "--"})
_WRAPPERS: Final = frozenset({"exec", "env", "tini", "dumb-init", "nohup", "time", "command"})
# Programs that never serve a model; what stands in no list may.
_FOREIGN: Final = frozenset(
    [
        "sleep",
        "tail",
        "cat",
        "echo",
        "printf",
        "true",
        "false",
        ":",
        "test",
        "[",
        "[[",
        "]]",
        "set",
        "unset",
        "export",
        "cd",
        "pwd",
        "ulimit",
        "umask",
        "shift",
        "wait",
        "kill",
        "fi",
        "done",
        "esac",
        "}",
        ")",
        "ls",
        "mkdir",
        "touch",
        "chmod",
        "chown",
        "cp",
        "mv",
        "rm",
        "ln",
        "tar",
        "unzip",
        "date",
        "hostname",
        "id",
        "whoami",
        "df",
        "free",
        "ps",
        "top",
        "grep",
        "sed",
        "awk",
        "tee",
        "pip",
        "pip3",
        "apt",
        "apt-get",
        "apk",
        "git",
        "curl",
        "wget",
        "rsync",
        "aws",
        "gsutil",
        "gcloud",
        "rclone",
        "huggingface-cli",
        "hf",
        "nvidia-smi",
        "nginx",
        "envoy",
        "haproxy",
        "traefik",
        "caddy",
        "redis-server",
        "etcd",
        "sshd",
        "prometheus",
        "node_exporter",
        "dcgm-exporter",
        "fluent-bit",
        "fluentd",
        "filebeat",
        "jupyter",
        "jupyter-lab",
        "jupyter-notebook",
        "lmcache_server",
        "lmcache_controller",
        "mooncake_master",
        "vllm-router",
        "guidellm",
        "genai-perf",
        "lm_eval",
        "locust",
        "wrk",
        "k6",
    ]
)
_NO_SERVERS: Final = frozenset(
    {"bench", "benchmark", "run-batch", "chat", "complete", "collect-env"}
)  # subcommands of vllm
_CLIENT = re.compile(
    r"(?:\S*[._-])?(?:client|router|bench|benchmarks?|download|downloader)(?:\.py)?|(?:benchmark|download)_\S*|"
    r"vllm\.benchmarks\.\S+|vllm_router\.\S+|http\.server",
    re.IGNORECASE,
)  # a program or module, by its whole name
_SHELL_OPTION = re.compile(r"[-+][A-Za-z]+|--[a-z-]*|-")
_SET = re.compile(r"[A-Za-z_]\w*=")
_NUMBER = re.compile(r"-\d+(?:\.\d+)?")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_REFERENCE = re.compile(r"\$?\$\(([A-Za-z_][\w.-]*)\)")
_POSITIONAL = re.compile(r"\"?\$[@*]\"?")
_SUBSTITUTION = re.compile(r"\$\(\([^()]*+(?:\([^()]*+\)[^()]*+)*+\)\)|\$\([^()]*\)|`[^`]*`")
_ARRAY = re.compile(r"\$(?:\{[A-Za-z_]\w*\[[@*]\][^}]*\}|\{[@*]\}|[@*])")
_LEFT = re.compile(r"\$(?:\{[^}]*+\}?|\(|[\w#?!$-])")  # a variable or substitution that is not understood
_ASSIGNMENT = re.compile(r"(?:^|[;&\n])[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|]*)")


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None) -> EngineArgs:
    """Arguments from a container's command followed by its args, and its environment (literal values only).

    Understands ``vllm serve MODEL``, ``python -m vllm.entrypoints...``, bare arguments of an image's entry point,
    ``sh -c "..."`` scripts, ``$(VAR)`` of Kubernetes and ``$VAR`` of the shell. Never raises.
    """
    known = dict(env or {})
    tokens = [_kubernetes(str(item)[:MAX_TEXT], known) for item in argv]
    shelled = _script(tokens)
    if shelled is not None:
        tokens = _shell_tokens(*shelled, known)
    rest, model, complete = _engine_part(tokens)
    options = list(_options(rest))
    values = {name: value for name, value in options if name}
    if model is not None:
        values.setdefault("model", None if _UNKNOWN in model else model)
    complete = complete and "config" not in values and not _hides_options(options, rest, model)
    return EngineArgs(
        values, frozenset(values), complete, {name: value for name, value in known.items() if name.startswith("VLLM_")}
    )


def _hides_options(options: Iterable[tuple[str, str | None]], rest: Sequence[str], model: str | None) -> bool:
    """Whether a variable may have brought in further options. Where a value is expected it brings one word, mostly."""
    if any(token and not token.strip(_UNKNOWN) for token in rest):
        return True
    if model is not None and not model.strip(_UNKNOWN) and (not rest or model == _UNKNOWN_WORDS):
        return True
    return any(
        _UNKNOWN in name
        or (not name and word is not None and (_UNKNOWN in word or _REFERENCE.search(word) is not None))
        for name, word in options
    )


def starts_server(argv: Sequence[str]) -> bool:
    """Whether the command line names vLLM's server: ``vllm serve``, its module, or a script that runs one of them."""
    return any(_anchor(command) is not None for command in _commands_of(argv))


def runs_something_else(argv: Sequence[str], entry_point: bool = False) -> bool:
    """Whether every program in the command line is known to be no server of vLLM: ``sleep``, ``vllm bench``, another server.
    Any other program may start one. ``entry_point``: the words go to an image's own entry point, so that the first may be a model.
    """
    commands = _commands_of(argv)
    if entry_point and argv and _base(str(argv[0])) not in _NOT_MODELS | _SHELLS | {"vllm"}:
        return False
    return bool(commands) and all(_is_foreign(command) for command in commands)


def _commands_of(argv: Sequence[str]) -> list[list[str]]:
    """The simple commands that the words are, or that the script among them has."""
    tokens = [str(item)[:MAX_TEXT] for item in argv]
    shelled = _script(tokens)
    return [command for command in ([tokens] if shelled is None else _commands(*shelled, {})) if command]


def _is_foreign(command: Sequence[str]) -> bool:
    start = next(
        (
            index
            for index, word in enumerate(command)
            if word not in _BEFORE_PROGRAM and _base(word) not in _WRAPPERS and not _SET.match(word)
        ),
        None,
    )
    if start is None:  # words of the shell or assignments at most, else something that was not understood
        return all(word != "--" and (word in _BEFORE_PROGRAM or _SET.match(word)) for word in command)
    program, following = _base(command[start]), [word for word in command[start + 1 :] if not word.startswith("-")]
    if program == "vllm":
        return bool(following) and following[0] in _NO_SERVERS
    if re.fullmatch(r"python[\d.]*", program):
        return bool(following) and _CLIENT.fullmatch(_base(following[0])) is not None
    return program in _FOREIGN or _CLIENT.fullmatch(program) is not None


def _expand(pattern: re.Pattern[str], text: str, value_of: Callable[[re.Match[str]], str]) -> str:
    """Replace variables. Values may be long and named often, so that what they bring in is bounded."""
    room = MAX_TEXT

    def value(found: re.Match[str]) -> str:
        nonlocal room
        brought = value_of(found)
        room -= len(brought)
        return brought if room >= 0 else _UNKNOWN

    return pattern.sub(value, text[:MAX_TEXT])


def _kubernetes(text: str, env: Mapping[str, str]) -> str:
    """Expand ``$(VAR)`` the way the kubelet does; unknown names stay as they are, ``$$(VAR)`` is an escape."""
    if "$(" not in text:
        return text
    return _expand(_REFERENCE, text, lambda m: m[0][1:] if m[0].startswith("$$") else env.get(m[1], m[0]))


def _script(tokens: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """The script and its positional parameters, when the tokens run a shell with ``-c``."""
    for index, token in enumerate(tokens[:-1]):
        if re.fullmatch(r"-[a-z]*c", token) and index and any(_base(t) in _SHELLS for t in tokens[:index]):
            at = index + 1
            while at < len(tokens) and _SHELL_OPTION.fullmatch(tokens[at]):  # between -c and its script, up to --
                last = tokens[at] in ("-", "--")
                at += 2 if re.fullmatch(r"[-+][A-Za-z]*[oO]", tokens[at]) else 1  # -o pipefail
                if last:
                    break
            return (tokens[at], tokens[at + 2 :]) if at < len(tokens) else None
    return None


def _base(token: str) -> str:
    return token.rsplit("/", 1)[-1]


def _shell_tokens(script: str, parameters: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Words of the one simple command in ``script`` that starts vLLM (all words when none does)."""
    commands = _commands(script, parameters, env)
    return next((command for command in commands if _anchor(command) is not None), [w for c in commands for w in c])


def _commands(script: str, parameters: Sequence[str], env: Mapping[str, str]) -> list[list[str]]:
    """Words of every simple command in ``script``, and of every one that is given to ``eval`` there."""
    known = {**env, **{m[1]: m[2].strip("\"'") for m in _ASSIGNMENT.finditer(script)}}
    positional = shlex.join(parameters)
    text = _expand(_POSITIONAL, script.replace("\\\n", " "), lambda _: positional)
    text = _ARRAY.sub(_UNKNOWN_WORDS, text)
    for _ in range(2):  # one in another
        text = _SUBSTITUTION.sub(_UNKNOWN, text)
    for _ in range(3):  # a variable may name another one
        text = _expand(_VARIABLE, text, lambda m: known.get(m[1] or m[3] or "", _UNKNOWN if m[2] is None else m[2]))
    commands: list[list[str]] = []
    for command in _split(_LEFT.sub(_UNKNOWN, text)):
        start = next((index for index, word in enumerate(command) if word not in _BEFORE_PROGRAM), 0)
        commands += _split(" ".join(command[start + 1 :])) if command[start : start + 1] == ["eval"] else [command]
    return commands


def _split(text: str) -> list[list[str]]:
    """Words of every simple command in a text whose variables are replaced."""
    lexer = shlex.shlex(text[:MAX_TEXT], posix=True, punctuation_chars=";|&\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError:  # an unclosed quotation
        words = text.split()
    commands: list[list[str]] = [[]]
    for word in words:
        if word.strip(";|&\n"):
            commands[-1].append(word)
        else:
            commands.append([])
    return commands


def _anchor(tokens: Sequence[str]) -> int | None:
    """Index of the first token after the words that start a vLLM server."""
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        if _base(token) == "vllm" and following == "serve":
            return index + 2
        if token.startswith("vllm.entrypoints.") or re.search(r"(?:^|[/.])api_server(?:\.py)?$", token):
            return index + 1
    return 1 if tokens[:1] == ["serve"] else None


def _engine_part(tokens: Sequence[str]) -> tuple[Sequence[str], str | None, bool]:
    """Tokens after the start words, the positional model if there is one, and whether nothing is hidden."""
    start = _anchor(tokens)
    if start is not None:
        rest = tokens[start:]
        if rest and not rest[0].startswith("-"):
            return rest[1:], rest[0], True
        return rest, None, True
    if not tokens or tokens[0].startswith("-"):
        return tokens, None, bool(tokens)
    first = tokens[0]
    entry_point_model = (
        _base(first) not in _NOT_MODELS | _SHELLS
        and not first.endswith((".sh", ".py"))
        and (len(tokens) == 1 or tokens[1].startswith("-"))
    )
    return (tokens[1:], first, True) if entry_point_model else (tokens, None, False)


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """``(name, value)`` of every option; a flag is ``True``, ``--no-x`` makes x ``False``. Words beside them have no name."""
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        name, value = _name(token)
        if not name:
            yield "", token
            continue
        if value is None and index < len(tokens) and _takes(name, tokens[index]):
            value = tokens[index]
            index += 1
        if value is None and name.startswith("no_"):
            yield name[3:], "False"
        else:
            yield name, "True" if value is None else None if _UNKNOWN in value else value


def _name(token: str) -> tuple[str, str | None]:
    """Option name and the value after ``=``; an empty name for what is no option."""
    head, equals, value = token.partition("=")
    if head in _SHORT:
        return _SHORT[head], value if equals else None
    if not head.startswith("--") or len(head) < 3:
        return "", None
    return head[2:].replace("-", "_"), value if equals else None


def _takes(name: str, following: str) -> bool:
    """Whether ``following`` is the value of option ``name`` rather than the next option or a positional."""
    if name.startswith("no_") or (_FLAG.fullmatch(name) and name not in _VALUED):
        return following.lower() in ("true", "false", "0", "1")
    return not following.startswith("-") or _NUMBER.fullmatch(following) is not None
