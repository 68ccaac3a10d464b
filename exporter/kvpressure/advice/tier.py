"""What to do about a KV tier in host memory: add one where KV memory is short, or mend one that is of no use."""

from __future__ import annotations

from math import ceil
from typing import Final

from kvpressure.advice.action import Action
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import GIB, parse_version
from kvpressure.model.state import EngineState
from kvpressure.printable import capital, say
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import TWICE

_REMEDIES: Final = {
    "tier_saturated": (
        "Store less in the KV tier, or use a faster one",
        "A larger tier does not help: copies hold it, or what lies behind it is slow. Store less: {less}",
    ),
    "tier_too_small": (
        "Make the KV tier larger, or store less in it",
        "To keep what is stored for {keeps}, the tier would have to be {times} as large: {larger}. If that is not"
        " possible, store less ({less}), or {off}",
    ),
    "tier_slow": ("Switch the KV tier off", "Computing the tokens again is faster: {off}"),
    "tier_unused": (
        "Switch the KV tier off, or find out why it is never asked",
        "Prompts may have no common beginning, or the engine cannot match what it stored (hybrid models). Until then"
        " {off}",
    ),
}


def mended(engine: EngineState, t: Thresholds) -> Action | None:
    """What makes the engine's tier of use; ``None`` without such a finding."""
    name = next((name for name in _REMEDIES if engine.diagnosis.conditions.get(name)), None)
    if name is None:
        return None
    title, text = _REMEDIES[name]
    turnover, keeps = engine.signals.tier.tier_turnover_seconds, t["context_window_seconds"]
    times = {"keeps": say(keeps, "seconds"), "times": say(keeps / turnover if turnover else None, "multiple")}
    why = capital(engine.diagnosis.evidence[name].text) if name in engine.diagnosis.evidence else ""
    return Action(title, f"{why}. {text.format_map({**dialect(engine.dialect).tier_flags, **times})}.".lstrip(". "))


def added(engine: EngineState) -> Action | None:
    """A tier of twice the KV pool (SGLang's own default); ``None`` where there is one, the server knows none, or it is
    half of a pair, whose blocks come and go over the network.
    """
    one, s = dialect(engine.dialect), engine.signals
    pool, paired = s.memory.kv_pool_bytes, s.load.kv_role in ("kv_producer", "kv_consumer")
    version, first = parse_version(engine.version), parse_version(one.flags_since.get("kv_offloading_size"))
    if s.tier.tier_configured or paired or not one.tier_flags or (version and first and version < first):
        return None
    gib = str(ceil(TWICE * pool * len(engine.gpus) / GIB)) if pool and engine.gpus else "GIB"
    unless = "" if s.tier.tier_configured is False else ", unless there is one"
    return Action(
        f"Add a KV tier in host memory{unless}",
        f"{one.tier_flags['add'].format(gib=gib)} keeps what the GPU evicts, twice as much as the KV pool holds."
        f" Prompts that come back, and {one.called('preempted')} requests, are then loaded, not computed again. No more"
        " requests run at once. Host memory must have room for it.",
    )
