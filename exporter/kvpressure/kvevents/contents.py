"""What the KV events of one engine add up to: who holds its prefix cache, and what was evicted and stored again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvpressure.kvevents.holders import NONE, UNKNOWN, Holders, Salts
from kvpressure.kvevents.reuse import ReuseEstimator
from kvpressure.model.readings import KV_AGAIN, KV_AGAIN_AGE, KV_AGAIN_GAP, KV_GAIN_PREFIX, KV_SEEN

GPU: Final = "GPU"
STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"
_FULL: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that keep a block until it is evicted; the others drop blocks by design. None = not told."""
_KNOWN_SHARE: Final = 0.8  # of the last evictions, from which on those seen are nearly all: the oldest go first
_LAST: Final = 64  # evictions, after which half of what is known of them is new

# Why the contents of a cache are unknown, beside why an endpoint cannot be read (``model.reasons``)
CONNECTING: Final = "connecting"
LATE: Final = "late"  # not everything in it was seen being stored
GAP: Final = "gap"
BAD_EVENTS: Final = "bad_events"
FLOOD: Final = "flood"
SILENT_SECONDS: Final = 60.0
SILENT: Final = "silent"  # blocks were filled, and nothing was sent
HYBRID: Final = "hybrid_groups"
NOT_INSTALLED: Final = "not_installed"
SHARED: Final = "shared_endpoint"  # of two targets: whose cache it is, is unknown
REASONS: Final = (CONNECTING, LATE, GAP, BAD_EVENTS, FLOOD, SILENT, HYBRID, NOT_INSTALLED, SHARED)


class Event(NamedTuple):
    """Consecutive blocks were ``STORED``, blocks were ``REMOVED``, or the whole cache was ``CLEARED``. ``salt``: of the
    chain that begins here, 0 = none; ``None`` = that of ``parent``. ``spec``: kind of the cache group.
    """

    kind: str
    blocks: Sequence[int] = ()
    parent: int | None = None
    adapter: str = NONE
    salt: int | None = 0
    block_size: int = 0
    medium: str = GPU
    group: int | None = None
    spec: str | None = None


class Contents:
    """The prefix cache on the GPU of one engine; of a hybrid model, one group with full attention."""

    def __init__(self) -> None:
        self.reuse, self._salts, self._seen_seconds = ReuseEstimator(), Salts(), 0.0
        self.begin(LATE)

    @property
    def reason(self) -> str:
        """Why the contents are unknown, "" = they are known."""
        return HYBRID if self._hybrid else "" if self._known_share >= _KNOWN_SHARE else self._lost

    def begin(self, reason: str) -> None:
        """Forget everything. ``reason``: why some blocks may be in the cache that are not seen, "" = it is empty."""
        self.block_size: int | None = None
        self._group: int | None = None
        self._hybrid = self._tiers = False
        self._forget_blocks(reason)

    def _forget_blocks(self, reason: str) -> None:
        self.holders = Holders(self.reuse)
        self.reuse.reset()
        self._lost, self._known_share, self._clock = reason or LATE, float(not reason), 0.0

    def set_capacity(self, tokens: float | None) -> None:
        """The size of the cache, ``None`` = unknown."""
        if tokens is not None and self.block_size:
            self.reuse.set_capacity(int(tokens // self.block_size))

    def counters(self) -> Mapping[str, float]:
        """Tokens evicted and stored again while the contents were known, since the start, by name; none where they may
        have been loaded instead.
        """
        size, reuse = self.block_size, self.reuse
        if size is None or self._tiers:
            return {}
        gain = {f"{KV_GAIN_PREFIX}{factor:g}": blocks for factor, blocks in reuse.gain.items()}
        named = {
            KV_AGAIN: reuse.again,
            KV_AGAIN_AGE: reuse.evicted_age_seconds,
            KV_AGAIN_GAP: reuse.again_gap_seconds,
            **gain,
        }
        return {KV_SEEN: self._seen_seconds, **{name: float(blocks * size) for name, blocks in named.items()}}

    def take(self, time: float, events: Iterable[Event]) -> None:
        """Take the events of one step, none where nothing was to be stored since the last one. ``time``: in Unix
        seconds; one before the last counts as the last.
        """
        passed, self.reuse.counting = time - self._clock, not self.reason
        if self.reuse.counting and 0 < passed <= SILENT_SECONDS:
            self._seen_seconds += passed
        self._clock = self.reuse.clock = max(self._clock, time)
        for event in events:
            if event.kind == CLEARED:
                self._forget_blocks("")
            elif event.medium != GPU:
                self._tiers = self._tiers or event.kind == STORED
            elif event.kind == STORED and event.spec not in _FULL:
                self._hybrid = self._hybrid or self.block_size is None  # until a group with full attention comes
            elif event.kind == STORED:
                self._store(event)
            elif event.kind == REMOVED and event.group == self._group:
                tracked, seen = self.reuse.removed(event.blocks)
                kept = 0.5 ** (tracked / _LAST)
                self._known_share = kept * self._known_share + (1 - kept) * seen / max(tracked, 1)

    def _store(self, event: Event) -> None:
        self._hybrid = event.spec is None and (self._hybrid or bool(event.group))
        if self.block_size is None:
            self._group = event.group
        if event.group != self._group:
            return  # the same tokens once more
        self.block_size = max(self.block_size or 0, event.block_size)
        salt = event.salt if event.salt is not None or event.parent is None else self._salts.of(event.parent)
        if salt is not None:
            self._salts.put(event.blocks, salt)
        self.reuse.stored(event.blocks, (event.adapter, UNKNOWN if salt is None else f"{salt:05x}" if salt else NONE))
