"""The command line of a vLLM container as ``EngineArgs``. Pure; see ``read``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvpressure.engines import shell
from kvpressure.engines.command import CUT, Command, Endpoints, on_first_node
from kvpressure.engines.shell import REFERENCE, SHELLS, UNKNOWN, UNKNOWN_WORDS, base
from kvpressure.engines.vllm.options import full
from kvpressure.model.arguments import EngineArgs
from kvpressure.redaction import REDACTED

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
        "tritonserver",
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
OF_VLLM: Final = frozenset(
    {
        "model",
        "served_model_name",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "kv_cache_dtype",
        "enforce_eager",
    }
)
"""Arguments that identify words as vLLM's, whatever program they go to."""
_NUMBER = re.compile(r"-\d+(?:\.\d+)?")
_SERVER = re.compile(r"vllm(?<!\wvllm)(?:\s++serve\b|\.entrypoints\b)")
_WRAPPER = re.compile(r"\S*/vllm/inference_api\.py|dynamo\.vllm|huggingfaceserver")
"""Programs that run vLLM inside and set some of its arguments: KAITO, NVIDIA Dynamo's worker, KServe's Hugging Face
server.
"""
_WRAPPER_NAMES: Final = {"model_id": "model", "model_name": "served_model_name"}  # KServe's Hugging Face server
_MODULE = re.compile(r"(?:\S*[/.])?api_server(?:\.py)?")


def read(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """A container's command followed by its args, and its environment; see ``base.EngineDialect``. Never raises.

    Understands ``vllm serve MODEL``, ``python -m vllm.entrypoints...``, bare arguments of an image's entry point,
    ``sh -c "..."`` scripts, ``$(VAR)`` of Kubernetes and ``$VAR`` of the shell.
    """
    known = dict(env or {})
    tokens, script, scripted = shell.program_of(argv, known)
    servers = [command for command in script.commands if _anchor(command.words) is not None]
    bare = tokens if not scripted and base(next(iter(tokens), "")) != "ray" else ()
    args, others = shell.servers(
        servers, [_arguments(server.words, known, script.understood) for server in servers]
    ) or (_arguments(bare, known, script.understood), ())
    starts = bool(servers) and _names_engine(servers[0].words, args)
    certain = starts and any(map(shell.is_here, servers))
    starts = starts or names_server(argv)
    return Command(args, starts, certain, others, shell.node_of(script, args))


def _names_engine(words: Sequence[str], args: EngineArgs) -> bool:
    """Whether the words that start a server are certainly vLLM's: ``serve`` alone, for an image's entry point, may be
    any program's, this exporter's too.
    """
    return list(words[:1]) != ["serve"] or bool(OF_VLLM & args.explicit)


def names_server(argv: Sequence[str]) -> bool:
    """Whether the text contains the words that start vLLM's server."""
    text = " ".join(map(str, argv))
    return "vllm" in text and _SERVER.search(text) is not None


def _arguments(tokens: Sequence[str], env: Mapping[str, str], understood: bool) -> EngineArgs:
    """``tokens``: of a server or an image's entry point."""
    rest, model, complete = _engine_part(tokens)
    options = list(_options(rest))
    values = {name: value for name, value in options if name}
    if model is not None:
        values.setdefault("model", None if UNKNOWN in model else model)
    wrapped = any(map(_WRAPPER.fullmatch, tokens)) or not _WRAPPER_NAMES.keys().isdisjoint(values)
    for name, of_engine in _WRAPPER_NAMES.items():
        if name in values:
            values.setdefault(of_engine, values.pop(name))
    complete = (
        complete and understood and not wrapped and "config" not in values and not _hides_options(options, rest, model)
    )
    return EngineArgs(
        values, frozenset(values), complete, {name: value for name, value in env.items() if name.startswith("VLLM_")}
    )


def _hides_options(options: Iterable[tuple[str, str | None]], rest: Sequence[str], model: str | None) -> bool:
    """Whether a variable may contain further options; in place of a value it is taken for one word."""
    if any(token == CUT or (token and not token.strip(UNKNOWN)) for token in rest):
        return True
    if model is not None and not model.strip(UNKNOWN) and (not rest or model == UNKNOWN_WORDS):
        return True
    return any(
        UNKNOWN in name or (not name and word is not None and (UNKNOWN in word or REFERENCE.search(word) is not None))
        for name, word in options
    )


def endpoints(args: EngineArgs) -> Endpoints:
    """Headless ranks serve nothing; with an external load balancer each data-parallel rank of the node serves on its
    own port.
    """
    port_each = args.values.get("data_parallel_multi_port_external_lb") == "True"
    serves = args.values.get("headless") != "True" and (port_each or on_first_node(args))
    ranks = args.integer("data_parallel_size_local")
    if ranks is None and not {"data_parallel_size_local", "nnodes", "data_parallel_start_rank"} & args.explicit:
        ranks = args.data_parallel_size  # all ranks are here
    return Endpoints(serves, port_each, ranks)


def _anchor(tokens: Sequence[str]) -> int | None:
    """Index of the first token after the words that start a vLLM server; None without them."""
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        if following == "serve" and base(token) in ("vllm", "vllm.entrypoints.cli.main"):
            return index + 2
        if token.startswith("vllm.entrypoints.") or _MODULE.fullmatch(token) or _WRAPPER.fullmatch(token):
            return index + 1
    return 1 if tokens[:1] == ["serve"] else None


def _engine_part(tokens: Sequence[str]) -> tuple[Sequence[str], str | None, bool]:
    """(tokens after the start words, positional model or None, whether nothing is hidden)."""
    start = _anchor(tokens)
    if start is not None:
        rest = tokens[start:]
        if rest and not rest[0].startswith("-") and rest[0] != CUT:
            return rest[1:], rest[0], True
        return rest, None, True
    if not tokens or tokens[0].startswith("-"):
        return tokens, None, bool(tokens)
    first = tokens[0]
    entry_point_model = (
        base(first) not in _NOT_MODELS | SHELLS
        and not first.endswith((".sh", ".py"))
        and (len(tokens) == 1 or tokens[1].startswith("-"))
    )
    return (tokens[1:], first, True) if entry_point_model else (tokens, None, False)


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) of every option; a flag is ``True``, ``--no-x`` makes x ``False``. Other words have the name ""."""
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
            yield name, "True" if value is None else None if UNKNOWN in value or value == REDACTED else value


def _name(token: str) -> tuple[str, str | None]:
    """(option name, value after ``=`` or None); name "" for other words."""
    head, equals, value = token.partition("=")
    if head in _SHORT:
        return _SHORT[head], value if equals else None
    if not head.startswith("--") or len(head) < 3:
        return "", None
    return full(head[2:].replace("-", "_")), value if equals else None


def _takes(name: str, following: str) -> bool:
    """Whether ``following`` is the value of option ``name``."""
    if name.startswith("no_") or (_FLAG.fullmatch(name) and name not in _VALUED):
        return following.lower() in ("true", "false", "0", "1")
    return not following.startswith("-") or _NUMBER.fullmatch(following) is not None
