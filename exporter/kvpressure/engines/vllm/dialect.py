"""vLLM's ``EngineDialect``."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import mentions, version_in_tag
from kvpressure.engines.vllm import command_line, limits, log_lines, page, pods, public

VLLM: Final = EngineDialect(
    name="vllm",
    title="vLLM",
    may_start=partial(mentions, ("vllm", "serve")),
    read_command=command_line.read,
    of_image=pods.of_image,
    host=pods.host,
    takes_words=pods.takes_words,
    image_version=partial(version_in_tag, "vllm"),
    process_title="VLLM::",
    environment=("VLLM_", "DYN_SYSTEM_PORT", "NIM_SERVER_PORT"),
    default_port=8000,
    port_names=("vllm",),
    endpoints=command_line.endpoints,
    samples=page.SAMPLES,
    identify=page.identify,
    config_labels=page.CONFIG_LABELS,
    metrics_switch="without --disable-log-stats",
    own_aborts=frozenset({"v1"}),  # 0.27.0 and 0.32.0
    flavour=page.flavour,
    pauses={"/is_paused": "/resume", "/is_sleeping": "/wake_up"},
    log_words=log_lines.WORDS,
    strip=log_lines.strip,
    recognise=log_lines.recognise,
    public_words=public.PUBLIC.command,
    public_arguments=public.PUBLIC.arguments,
    public_environment=public.PUBLIC.environment,
    public_line=public.public_line,
    limits=limits.in_force,
    default_limits=limits.default_limits,
    no_number={"max_model_len": frozenset({"auto", "-1"})},
    one_request_fits=True,
    step_holds_batch=True,
    truncation="truncate_prompt_tokens",
    silent=lambda args: args.values.get("disable_log_stats") == "True",
    reference_version=limits.REFERENCE_VERSION,
    capacity_tokens=limits.capacity_tokens,
    block_size=limits.block_size,
    pool=limits.pool,
    tier=limits.tier,
    tier_mistake=limits.tier_mistake,
    features=limits.features,
    tier_flags={
        "add": "--kv-offloading-size {gib}",
        "larger": "a larger --kv-offloading-size",
        "less": "store_threshold 2 in its kv_connector_extra_config, which stores only what was asked for twice",
        "off": "remove --kv-offloading-size, or the connector of --kv-transfer-config",
    },
    flags_since={"watermark": "0.24", "kv_offloading_size": "0.14"},  # before 0.14 with a backend (pull request 32421)
    deferred_since="0.20",
    words={"broadcast_wait": "no free shared-memory broadcast block"},
    options=command_line.OPTIONS,
    series_pattern=page.SERIES_PATTERN,
    series_labels=page.SERIES_LABELS,
)
