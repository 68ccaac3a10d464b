"""A condition of another package: requests wait while none runs. Its evaluation, its sentences and its
runbook are declared together.
"""

from __future__ import annotations

from kvpressure.diagnosis.conditions import Declared, Moment


def all_waiting(moment: Moment) -> bool | None:
    load = moment.s.load
    if load.running is None or load.waiting is None:
        return None
    return load.waiting > 0 and load.running == 0


ALL_WAITING = Declared(
    name="toy_all_waiting",
    find=all_waiting,
    true="all {in_flight} in flight are waiting",
    false="not all of the {in_flight} in flight are waiting",
    unknown="whether all requests are waiting: unknown (no metrics of the queue)",
    runbook="InferenceQueueTimeHigh",
)
