"""Names of the options of ``vllm serve``, to resolve abbreviations and suggest corrections."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from kvpressure.model.arguments import WITH_VALUE

# Source: ``vllm/engine/arg_utils.py`` and ``vllm/entrypoints/openai/cli_args.py`` of 0.7 and 0.11, and the start-up
# lines of later releases. A release may have others, so a name that is missing here is not an error by itself.
NAMES: Final = frozenset(
    """
    additional_config aggregate_engine_logging all2all_backend allow_credentials allowed_headers
    allowed_local_media_path allowed_media_domains allowed_methods allowed_origins api_key api_server_count
    async_scheduling block_size calculate_kv_scales chat_template chat_template_content_format code_revision
    collect_detailed_traces compilation_config config config_format convert cpu_offload_gb cuda_graph_sizes
    cudagraph_capture_sizes data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold decode_context_parallel_size default_mm_loras device disable_async_output_proc
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_logprobs_during_spec_decoding disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
    disable_sliding_window disable_uvicorn_access_log distributed_executor_backend download_dir dtype
    enable_auto_tool_choice enable_chunked_prefill enable_dbo enable_eplb enable_expert_parallel
    enable_force_include_usage enable_log_outputs enable_log_requests enable_lora enable_lora_bias
    enable_mm_embeds enable_multimodal_encoder_data_parallel enable_prefix_caching enable_prompt_adapter
    enable_prompt_embeds enable_prompt_tokens_details enable_reasoning enable_request_id_headers
    enable_server_load_tracking enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint
    enforce_eager eplb_config eplb_log_balancedness eplb_step_interval eplb_window_size
    exclude_tools_when_tool_choice_none expert_placement_strategy fully_sharded_loras generation_config
    gpu_memory_utilization grpc_port guided_decoding_backend guided_decoding_disable_additional_properties
    guided_decoding_disable_any_whitespace guided_decoding_disable_fallback h11_max_header_count
    h11_max_incomplete_event_size headless hf_config_path hf_overrides hf_token host ignore_patterns
    interleave_mm_strings io_processor_plugin kv_cache_dtype kv_cache_memory_bytes kv_events_config
    kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config limit_mm_per_prompt
    load_format log_config_file log_error_stack logits_processor_pattern logits_processors logprobs_mode
    long_lora_scaling_factors long_prefill_token_threshold lora_dtype lora_extra_vocab_size lora_modules
    mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_log_len max_logprobs max_long_partial_prefills max_lora_rank max_loras
    max_model_len max_num_batched_tokens max_num_partial_prefills max_num_seqs max_parallel_loading_workers
    max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture media_io_kwargs middleware
    mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs
    mm_shm_cache_max_object_size_mb model model_impl model_loader_extra_config multi_step_stream_outputs
    ngram_prompt_lookup_max ngram_prompt_lookup_min nnodes node_rank num_gpu_blocks_override num_lookahead_slots
    num_redundant_experts num_scheduler_steps num_speculative_tokens optimization_level otlp_traces_endpoint
    override_attention_dtype override_generation_config override_neuron_config override_pooler_config
    pipeline_parallel_size pooler_config port preemption_mode prefix_caching_hash_algo pt_load_map_location
    qlora_adapter_name_or_path quantization ray_workers_use_nsight reasoning_parser response_role
    return_tokens_as_token_ids revision root_path rope_scaling rope_theta runner safetensors_load_strategy
    scheduler_cls scheduler_delay_factor scheduling_policy seed served_model_name
    show_hidden_metrics_for_version skip_mm_profiling skip_tokenizer_init spec_decoding_acceptance_method
    speculative_config speculative_disable_by_batch_size speculative_disable_mqa_scorer
    speculative_draft_tensor_parallel_size speculative_max_model_len speculative_model
    speculative_model_quantization ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_keyfile stream_interval
    structured_outputs_config swap_space task tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type tokenizer_revision tokens_only
    tool_call_parser tool_parser_plugin tool_server trust_remote_code trust_request_chat_template uds
    use_tqdm_on_load use_v2_block_manager uvicorn_log_level video_pruning_rate watermark worker_cls
    worker_extension_cls
    """.split()  # noqa: SIM905 - two hundred lines otherwise
)
_SORTED: Final = sorted(NAMES)
# Options that decide advice; only these are worth a warning when misspelt.
_DECIDING: Final = (
    *WITH_VALUE,
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "num_gpu_blocks_override",
    "override_generation_config",
)
_CLOSE: Final = 0.85  # of difflib's ratio: one or two letters of a name


def full(name: str) -> str:
    """The option that an abbreviation means, also after ``no_``; other names stay. vLLM accepts a prefix that only
    one option has.
    """
    if name in NAMES or len(name) < 5:
        return name
    if name.startswith("no_"):
        return f"no_{full(name[3:])}"
    first = bisect_left(_SORTED, name)
    found = [known for known in _SORTED[first : first + 2] if known.startswith(name)]
    return found[0] if len(found) == 1 else name


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Unknown names -> the deciding option that is one or two letters away."""
    unknown = sorted(set(names) - NAMES)
    near = {name: difflib.get_close_matches(name, _DECIDING, 1, _CLOSE) for name in unknown}
    return {name: found[0] for name, found in near.items() if found}
