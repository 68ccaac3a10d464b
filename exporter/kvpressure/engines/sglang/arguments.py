"""SGLang arguments under common names, what follows from them, and the command lines that start the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvpressure.engines import shell
from kvpressure.engines.command import CUT, Command, Endpoints, Host, dynamo, on_first_node
from kvpressure.engines.options import read_options
from kvpressure.engines.public import PublicNames
from kvpressure.engines.shell import REFERENCE, UNKNOWN, base
from kvpressure.model.arguments import EngineArgs

OPTIONS: Final[Mapping[str, str]] = {  # common name -> SGLang's name
    "model": "model_path",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "block_size": "page_size",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
}
COMMON: Final[Mapping[str, str]] = {own: name for name, own in OPTIONS.items()}
KNOWN_OPTIONS: Final = read_options(Path(__file__).with_name("options.json"), COMMON)
VARIABLES: Final = ("SGLANG_", "SGL_")
"""Prefixes of the variables that the server reads."""
_TEXTS: Final = frozenset(  # options whose values are names, types or modes
    [
        "attention_backend",
        "device",
        "disaggregation_mode",
        "disaggregation_transfer_backend",
        "dtype",
        "grammar_backend",
        "kv_cache_dtype",
        "load_balance_method",
        "load_format",
        "model",
        "quantization",
        "reasoning_parser",
        "sampling_backend",
        "schedule_policy",
        "served_model_name",
        "speculative_algorithm",
        "tool_call_parser",
    ]
)
_NAMED: Final = re.compile(
    r"\bdynamo\.sglang\b|\bsglang\.launch_server\b|\bsglang[ \t]++serve\b|\bsgl_jax\.launch_server\b"
)
_WRAPPER: Final = "dynamo.sglang"  # runs the server inside and sets some of its arguments
_MODULES: Final = ("sglang.launch_server", "sgl_jax.launch_server", _WRAPPER)
_OF_SGLANG: Final = frozenset({"model", "max_num_seqs", "gpu_memory_utilization", "max_num_batched_tokens"})


def _any_option(name: str) -> str:
    return "--" + OPTIONS.get(name, name).replace("_", "-")


def option(name: str) -> str:
    """The flag of a common argument; "" = none."""
    flag = _any_option(name)
    return flag if flag in KNOWN_OPTIONS.spellings else ""


def names_server(argv: Sequence[str]) -> bool:
    """Whether the text contains the words that start SGLang's server."""
    return _NAMED.search(" ".join(map(str, argv))) is not None


def read(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
    """A container's command followed by its args, and its environment; see ``base.EngineDialect``. Never raises."""
    known = dict(env or {})
    tokens, script, scripted = shell.program_of(argv, known)
    servers = [command for command in script.commands if _after_start(command.words) is not None]
    bare = _arguments(tokens, script.understood, known) if not scripted and _bare(tokens) else EngineArgs()
    args, others = shell.servers(
        servers,
        [
            _arguments(_after_start(one.words) or (), script.understood and _WRAPPER not in one.words, known)
            for one in servers
        ],
    ) or (bare, ())
    starts = bool(servers) or names_server(argv)
    return Command(args, starts, any(map(shell.is_here, servers)), others, shell.node_of(script, args))


def _after_start(command: Sequence[str]) -> Sequence[str] | None:
    """The words after those that start the server, a model in front as an option; ``None`` if nothing starts it."""
    for index, word in enumerate(command):
        following = command[index + 1] if index + 1 < len(command) else ""
        if base(word) == "sglang" and following == "serve":
            rest = command[index + 2 :]
            named = rest and not rest[0].startswith("-") and UNKNOWN not in rest[0] and rest[0] != CUT
            return ["--model-path", *rest] if named else rest
        if word in _MODULES or word.endswith("sglang/launch_server.py"):
            return command[index + 1 :]
    return None


def _bare(tokens: Sequence[str]) -> bool:
    return bool(tokens) and tokens[0].startswith("-")


def _arguments(words: Sequence[str], understood: bool, env: Mapping[str, str]) -> EngineArgs:
    options = list(KNOWN_OPTIONS.read(words))
    values = {name: value for name, value in options if name}
    hidden = CUT in words or any(REFERENCE.search(word) for word in words if not word.startswith("--"))
    complete = understood and not hidden and KNOWN_OPTIONS.explain(options) and "config" not in values
    shown = {name: value for name, value in values.items() if UNKNOWN not in name}
    own = {name: value for name, value in env.items() if name.startswith(VARIABLES)}
    return EngineArgs(shown, frozenset(shown), complete, own)


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def of_image(image: str) -> bool:
    """Whether an image contains SGLang's server; its router's images are named after it too."""
    name = image.rpartition("/")[2]
    return ("sglang" in name or "sgl-dev" in name) and "router" not in name and "gateway" not in name


def host(_image: str, argv: Sequence[str], env: Mapping[str, str], args: EngineArgs) -> Host | None:
    """The program around SGLang that publishes its metrics; in gRPC mode, its second server (pull request 20801)."""
    if args.values.get("grpc_mode") == "True":
        port = args.integer("metrics_http_port") or (args.port or 30000) + 1
        return Host("SGLang's server of metrics", port if endpoints(args).metrics else None, asked=True)
    return dynamo(argv, env)


def takes_words(_argv: Sequence[str], args: EngineArgs) -> bool:
    """Whether words for an image's entry point are arguments of SGLang."""
    return bool(_OF_SGLANG & args.explicit)


def endpoints(args: EngineArgs) -> Endpoints:
    """Further nodes serve nothing; all data-parallel ranks share one port. Metrics must be switched on."""
    asked = any("metrics" in name and value != "False" for name, value in args.values.items())
    return Endpoints(serves=on_first_node(args), metrics=asked or not args.complete)


# --- what may leave the node -----------------------------------------------------------------------------------------


PUBLIC: Final = PublicNames(("python3", "-m", "sglang.launch_server"), _any_option, VARIABLES, _TEXTS)
