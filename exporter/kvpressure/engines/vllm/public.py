"""The public part of a command line, an environment and a log line: only what is known to be no secret.

A command line is rebuilt from what was understood: options by name, with values that are numbers or true or false, or
of options that are known to hold no secret (a model's name, a type, a backend). Other options have no value. What was
not understood is left out and its place marked, so that the result never counts as complete. No text of a script, no
expanded variable and no unknown word can leave.

Of log lines, what the patterns of events match is kept: fixed words and numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kvpressure import redaction
from kvpressure.engines import log_table
from kvpressure.engines.base import option
from kvpressure.engines.command import CUT
from kvpressure.engines.vllm.arguments import parse_logged
from kvpressure.engines.vllm.log_lines import match, strip
from kvpressure.model.arguments import EngineArgs
from kvpressure.redaction import REDACTED

MAX_VALUE: Final = 512  # characters of a value, or of one text in JSON
MAX_JSON: Final = 16_384

OPTIONS: Final = frozenset(  # whose values are names, types or modes
    [
        "all2all_backend",
        "attention_backend",
        "attn_type",
        "block_size",
        "chat_template_content_format",
        "code_revision",
        "config_format",
        "convert",
        "data_parallel_backend",
        "decoding_config",
        "device",
        "disaggregation_mode",
        "distributed_executor_backend",
        "dtype",
        "enable_chunked_prefill",
        "expert_placement_strategy",
        "fp8_kv_cache_dtype",
        "generation_config",
        "gpu_memory_utilization",
        "guided_decoding_backend",
        "hf_config_path",
        "io_processor_plugin",
        "kv_cache_dtype",
        "kv_connector",
        "kv_offloading_backend",
        "kv_role",
        "load_format",
        "logprobs_mode",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "mm_encoder_attn_backend",
        "mm_encoder_tp_mode",
        "mm_processor_cache_type",
        "mode",
        "model",
        "model_impl",
        "model_tag",
        "moe_backend",
        "optimization_level",
        "performance_mode",
        "pooler_config",
        "prefix_caching_hash_algo",
        "quantization",
        "quantization_param_path",
        "reasoning_backend",
        "reasoning_parser",
        "response_role",
        "revision",
        "runner",
        "runner_type",
        "scheduler_policy",
        "scheduling_policy",
        "served_model_name",
        "skip_tokenizer_init",
        "structured_outputs_config",
        "task",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "tool_call_parser",
        "uvicorn_log_level",
        "version",
        "worker_type",
    ]
)
JSON_OPTIONS: Final = frozenset(  # whose JSON holds limits and modes; texts in it stay under these keys only
    [
        "additional_config",
        "attention_config",
        "cache_config",
        "compilation_config",
        "default_chat_template_kwargs",
        "eplb_config",
        "hf_overrides",
        "kernel_config",
        "kv_events_config",
        "kv_transfer_config",
        "limit_mm_per_prompt",
        "model_loader_extra_config",
        "override_generation_config",
        "override_neuron_config",
        "parallel_config",
        "rope_scaling",
        "scheduler_config",
        "speculative_config",
    ]
)
JSON_KEYS: Final = frozenset(
    [
        "backend",
        "cudagraph_mode",
        "device",
        "draft_model",
        "dtype",
        "kv_buffer_device",
        "kv_cache_dtype",
        "kv_connector",
        "kv_role",
        "level",
        "method",
        "mode",
        "model",
        "model_type",
        "quantization",
        "rope_type",
        "type",
    ]
)
VARIABLES: Final = frozenset(
    [
        "VLLM_ATTENTION_BACKEND",
        "VLLM_LOGGING_LEVEL",
        "VLLM_TARGET_DEVICE",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_FLASHINFER_MOE_BACKEND",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_ALL2ALL_BACKEND",
        "VLLM_USE_MODELSCOPE",
        "VLLM_USE_V1",
    ]
)

_NUMBER: Final = re.compile(r"[-+]?\d{1,15}(?:\.\d{1,12})?(?:[eE][-+]?\d{1,3})?[kKmMgGtT]?|[-+]?\.\d{1,12}")
_WORD: Final = frozenset({"true", "false", "none", "null", "auto"})
_TEXT: Final = re.compile(rf"[\w.:/@+\-]{{1,{MAX_VALUE}}}")
_OPTION: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")
_NEW_OPTION: Final = re.compile(r"[a-z]{1,24}\d{0,2}(?:[_.][a-z]{1,24}\d{0,2}){0,9}")  # as programs name theirs


def value(name: str, text: str) -> str:
    """``text`` as the value of option ``name``, or ``REDACTED``."""
    last = name.rpartition(".")[2]
    if redaction.is_secret(name) or redaction.is_secret(last):
        return REDACTED
    if _NUMBER.fullmatch(text) or text.lower() in _WORD:
        return text
    if name in JSON_OPTIONS:
        return _json_text(text)
    known = name in OPTIONS or (name.partition(".")[0] in JSON_OPTIONS and last in JSON_KEYS)
    return _name_text(text) if known else REDACTED


def _name_text(text: str) -> str:
    """``text`` if it is a plain name, path or type without a login or token, else ``REDACTED``."""
    return text if _TEXT.fullmatch(text) and redaction.text(text) == text else REDACTED


def _json_text(text: str) -> str:
    if len(text) > MAX_JSON:
        return REDACTED
    try:
        return json.dumps(_json(json.loads(text), ""))
    except (ValueError, RecursionError):
        return REDACTED


def _json(node: Any, name: str) -> Any:
    if isinstance(node, dict):
        return {key: _json(item, key) for key, item in node.items() if _OPTION.fullmatch(key)}
    if isinstance(node, list):
        return [_json(item, name) for item in node]
    if node is None or isinstance(node, bool):
        return node
    if redaction.is_secret(name):
        return REDACTED
    if isinstance(node, int | float):
        return node if _NUMBER.fullmatch(str(node)) else REDACTED
    return _name_text(node) if name in JSON_KEYS else REDACTED


def written(read: EngineArgs) -> tuple[str, ...]:
    """A command line with the public part of these arguments."""
    shown = ["vllm", "serve"]
    for name, text in read.values.items():
        if name in OPTIONS or name in JSON_OPTIONS or _NEW_OPTION.fullmatch(name):
            shown.append(f"{option(name)}={REDACTED if text is None else value(name, text)}")
    return (*shown, *(() if read.complete or "config" in read.values else (CUT,)))


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """The engine's own variables; only numbers and known modes keep their values."""
    return {
        name: value(name, text) if name not in VARIABLES else _name_text(text)
        for name, text in env.items()
        if name.startswith("VLLM_") and _OPTION.fullmatch(name) and not redaction.is_secret(name)
    }


def public_line(text: str) -> str | None:
    """The public part of an event's log line, ``None`` for any other line."""
    message = strip(text)
    found = match(message)
    if found is None:
        return None
    return _logged_arguments(message) if found[0] == "args" else log_table.public(message, found)


def _logged_arguments(message: str) -> str:
    form, values = parse_logged(message)
    fields = [
        (name, "None" if text is None else repr(value(name, text)))
        for name, text in values.items()
        if name in OPTIONS or name in JSON_OPTIONS or _NEW_OPTION.fullmatch(name)
    ]
    if form == "all":
        return f"args: Namespace({', '.join(f'{name}={text}' for name, text in fields)})"
    return "non-default args: {" + ", ".join(f"{name!r}: {text}" for name, text in fields) + "}"
