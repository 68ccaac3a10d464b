"""SGLang's ``EngineDialect``."""

from __future__ import annotations

from functools import partial
from typing import Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.command import mentions, version_in_tag
from kvpressure.engines.sglang import aliases, arguments, limits, log_lines

SGLANG: Final = EngineDialect(
    name="sglang",
    title="SGLang",
    may_start=partial(mentions, ("sglang", "sgl_jax")),
    read_command=arguments.read,
    of_image=arguments.of_image,
    host=arguments.host,
    takes_words=arguments.takes_words,
    image_version=partial(version_in_tag, "sglang"),
    process_title="sglang::",
    environment=arguments.VARIABLES,
    default_port=30000,
    port_names=("sglang",),
    endpoints=arguments.endpoints,
    samples=aliases.SAMPLES,
    identify=aliases.identify,
    repeated_by=aliases.REPEATED_BY,
    config_labels=aliases.CONFIG_LABELS,
    metrics_switch="with --enable-metrics",
    flavour=aliases.flavour,
    log_words=log_lines.WORDS,
    strip=log_lines.strip,
    recognise=log_lines.recognise,
    public_words=arguments.PUBLIC.command,
    public_arguments=arguments.PUBLIC.arguments,
    public_environment=arguments.PUBLIC.environment,
    public_line=log_lines.public_line,
    limits=limits.in_force,
    default_limits=limits.default_limits,
    not_limits=limits.NOT_LIMITS,
    no_number={"max_num_batched_tokens": frozenset({"-1"})},
    truncation="allow_auto_truncate",
    silent=lambda args: not arguments.endpoints(args).metrics,
    reference_version=limits.REFERENCE_VERSION,
    capacity_tokens=limits.capacity_tokens,
    block_size=limits.block_size,
    pool=limits.pool,
    tier=limits.tier,
    tier_mistake=limits.tier_mistake,
    tier_flags={
        "add": "--enable-hierarchical-cache --hicache-ratio 2",
        "larger": "a larger --hicache-ratio or --hicache-size",
        "less": "--hicache-write-policy write_through_selective, which stores only what was asked for before",
        "off": "remove --enable-hierarchical-cache",
    },
    features=limits.features,
    flag=arguments.option,
    words={"preemption": "retraction", "preemptions": "retractions", "preempted": "retracted"},
    options=arguments.KNOWN_OPTIONS,
    series_pattern=aliases.SERIES_PATTERN,
    series_labels=aliases.SERIES_LABELS,
)
