"""What of a vLLM server's command line, variables and log may leave the node."""

from __future__ import annotations

from typing import Final

from kvpressure.engines import log_table
from kvpressure.engines.base import option
from kvpressure.engines.public import PublicNames
from kvpressure.engines.vllm.arguments import parse_logged
from kvpressure.engines.vllm.log_lines import match, strip

_OPTIONS: Final = frozenset(
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
_JSON_OPTIONS: Final = frozenset(
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
_JSON_KEYS: Final = frozenset(
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
_VARIABLES: Final = frozenset(
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
PUBLIC: Final = PublicNames(("vllm", "serve"), option, ("VLLM_",), _OPTIONS, _JSON_OPTIONS, _JSON_KEYS, _VARIABLES)


def public_line(text: str) -> str | None:
    """The public part of an event's log line, ``None`` for any other line."""
    message = strip(text)
    found = match(message)
    if found is None:
        return None
    return _logged_arguments(message) if found[0] == "args" else log_table.public(message, found)


def _logged_arguments(message: str) -> str:
    form, values = parse_logged(message)
    shown = PUBLIC.arguments(values).items()
    fields = [(name, "None" if values[name] is None else repr(text)) for name, text in shown]
    if form == "all":
        return f"args: Namespace({', '.join(f'{name}={text}' for name, text in fields)})"
    return "non-default args: {" + ", ".join(f"{name!r}: {text}" for name, text in fields) + "}"
