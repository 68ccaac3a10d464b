"""The list of evicted blocks predicts what more memory would keep."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.kvevents.reuse import FACTORS, ReuseEstimator
from tests.kvevents.cache import replay, trace

OWNER = ("", "")
CAPACITIES = (1_500, 3_000, 6_000, 12_000)


@pytest.mark.slow
def test_the_hit_ratio_of_more_memory_is_predicted_on_a_real_trace():
    requests = trace()
    sizes = {int(capacity * factor) for capacity in CAPACITIES for factor in FACTORS}
    larger = {size: list(replay(requests, size)) for size in sorted(sizes)}
    for capacity in CAPACITIES:
        estimator = ReuseEstimator(capacity)
        since: dict[float, tuple[int, int, int]] = {}  # from when on a factor is published
        for index, (asked, hits) in enumerate(replay(requests, capacity, estimator)):
            for factor in estimator.gain:
                since.setdefault(factor, (index, asked, hits))
        for factor, (index, asked_before, hits_before) in since.items():
            span = asked - asked_before
            predicted = (hits - hits_before + estimator.gain[factor]) / span
            exact = larger[int(capacity * factor)]
            assert predicted == pytest.approx((exact[-1][1] - exact[index][1]) / span, abs=0.01)
        assert set(since) == set(FACTORS)


_EVENTS = st.lists(st.tuples(st.sampled_from(("stored", "removed")), st.integers(-12, 12)), max_size=300)


@given(_EVENTS, st.integers(1, 4))
def test_the_rank_of_a_block_is_that_of_a_plain_list(events, capacity):
    estimator, resident, ghosts, evictions = ReuseEstimator(capacity), set(), [], 0
    gain, again = dict.fromkeys(FACTORS, 0), 0
    for event, block in events:
        estimator.stored([block], OWNER) if event == "stored" else estimator.removed([block])
        if event == "removed":
            evictions += block not in ghosts
            resident.discard(block)
            ghosts = [*(ghost for ghost in ghosts if ghost != block), block][-7 * capacity :]
        elif block not in resident:
            if block in ghosts:
                rank = len(ghosts) - 1 - ghosts.index(block)
                ghosts.remove(block)
                again += 1
                for factor in FACTORS:
                    gain[factor] += evictions >= (factor - 1) * capacity and rank < (factor - 1) * capacity
            resident.add(block)
    assert (estimator.again, estimator.resident) == (again, len(resident))
    assert estimator.gain == {f: n for f, n in gain.items() if evictions >= (f - 1) * capacity}


@pytest.mark.slow
@pytest.mark.parametrize(("removes", "capacity"), [(False, 500), (True, 3_000)])
def test_memory_is_bounded_whatever_a_publisher_sends(removes, capacity):
    tracemalloc.start()
    estimator, blocks = ReuseEstimator(capacity), random.Random(1)
    for size in [1] * 20_000 + [32_768] * 10:
        some = [blocks.getrandbits(64) for _ in range(size)]
        estimator.stored(some, OWNER)
        if removes:
            estimator.removed(some)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 6 * 2**20
    assert estimator.resident == pytest.approx(0 if removes else 347_680, rel=0.1)


def test_ages_are_of_blocks_that_came_back_and_a_reset_forgets_them():
    estimator = ReuseEstimator(1)
    for at, event, block in ((0, "removed", 8), (5, "stored", 8), (10, "stored", 9), (30, "removed", 9)):
        estimator.clock = at
        estimator.stored([block], OWNER) if event == "stored" else estimator.removed([block])
    estimator.clock = 90
    estimator.stored([9], OWNER)
    assert (estimator.again, estimator.evicted_age_seconds, estimator.again_gap_seconds) == (2, 20, 60), (
        "8: age unknown"
    )
    assert estimator.gain[2.0] == 2
    estimator.removed([9])
    estimator.reset()
    estimator.stored([9], OWNER)
    assert (estimator.again, estimator.gain) == (2, {}), "a ghost of before proves nothing"
