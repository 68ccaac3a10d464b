"""The rules: one table per verdict, asked in the order of ``TABLES``; the first that holds is the answer.

What makes other numbers meaningless comes first (no scrape, sleep, no progress), then nothing to do (idle), then a
queue that no resource of the engine explains (deferred), then the binding resource (cache, sequence limit, host,
GPU), then healthy. ``docs/verdicts.md`` is written from here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvpressure.diagnosis.logic import ALWAYS, Condition, Grade, Lower, Row, Verdict, maybe, no, unknown, unsure, yes
from kvpressure.model.state import REUSE, STEP_TOKENS

CERTAIN, STRONG, LIKELY, DOUBTFUL, GUESS = Grade.CERTAIN, Grade.STRONG, Grade.LIKELY, Grade.DOUBTFUL, Grade.GUESS

_KV: Final = ("kv_full", "KV usage")
_LIMIT: Final = (
    "limit_is_stated",
    "{max_num_seqs} (not in the start-up log, arguments not visible): --engine.target '…;args={max_num_seqs_flag} N'",
)
_GPU: Final = ("gpu_saturated", "GPU activity")
_THROTTLED: Final = ("cpu_throttled", "CPU throttling")
_CPU: Final = ("cpu_saturated", "CPU use")
_TOKENS: Final = ("tokens_flow", "token counters")
_WORK: Final = ("work_present", "running and waiting requests")
_QUEUE: Final = ("queue_present", "waiting requests")

_UNSORTED: Final = "why requests wait: for KV cache, a LoRA slot or remote KV blocks ({deferred_where})"
_PEER: Final = "the other server of the pair: only its own page shows what it does"
_DEFERRED: Final = "what the deferred requests wait for: LoRA slots, a grammar, or KV blocks from elsewhere"


def _all_yes(*names: str) -> tuple[Condition, ...]:
    return tuple(yes(name) for name in names)


# --- named conditions -----------------------------------------------------------------------------------------------

queue_unsorted = yes("queue_present") & unknown("queue_for_capacity")
deferred = yes("queue_present") & no("queue_for_capacity")
lasting_queue = yes("queue_present") & unsure("queue_short")
cache_queue = yes("queue_for_capacity") | (queue_unsorted & yes("kv_near_full"))
preempting = (
    yes("preempting")
    & maybe("kv_near_full_now")
    & (yes("preempting_now") | (maybe("preempted_recently") & maybe("waited_recently")))
)
still_preempting = preempting & (maybe("waiting_now") | no("waited_recently"))
may_not_fit = no("any_prompt_fits") | (yes("kv_warm") & unknown("any_prompt_fits"))
room_for_queue = yes("kv_free_beside_queue") & unsure("head_of_line_blocked")
harmed = lasting_queue | yes("latency_multiplied") | yes("outside_engine_time") | yes("throughput_fell")

TRANSFER_SIGNS: Final = (
    "answers_suspect",
    "transfer_failing",
    "transfer_slow",
    "lease_expired",
    "prefill_wasted",
    "loads_stuck",
)
_HARM: Final = ("latency_multiplied", "steps_slower", "throughput_fell")

_FAILING: Final = Lower(
    yes("scrape_failing"), at_most=DOUBTFUL, missing="what happened since the last successful scrape"
)

unanswered = (yes("prompts_looked_up") & no("tokens_flow") & no("finishing")) | (
    no("work_present") & yes("prompts_just_now") & no("tokens_recently")
)

# --- no usable metrics ---------------------------------------------------------------------------------------------

NO_SCRAPE: Final = Verdict(
    "unknown",
    "No fresh metrics",
    at_once=True,
    requires=unsure("page_fresh"),
    rows=(Row("no scrape", ALWAYS, Grade.NOTHING, "what the engine does now"),),
    supports=(no("page_fresh"),),
    missing=(("page_fresh", "{page_fresh}"),),
    when="the last scrape is older than {stale_page_seconds}, or scrapes fail",
)

ASLEEP: Final = Verdict(
    "unknown",
    "Asleep",
    requires=maybe("work_present") & (yes("engine_asleep") | (yes("engine_paused") & unsure("tokens_recently"))),
    rows=(
        Row(
            "asleep",
            yes("engine_asleep"),
            GUESS,
            "what the engine does when it is awake: it is asleep, its weights are offloaded",
        ),
        Row(
            "paused",
            ALWAYS,
            GUESS,
            "what the engine does when it goes on: it was told to pause, or updates its weights",
        ),
    ),
    supports=_all_yes("engine_asleep", "engine_paused", "work_present"),
    when="the engine is asleep, or was told to pause, and requests are in flight",
)

REFUSING: Final = Verdict(
    "unknown",
    "Requests refused",
    at_once=True,
    requires=yes("server_refuses"),
    unless=(yes("kv_full") & yes("queue_for_capacity"),),  # a server that shuts down admits nobody
    rows=(
        Row(
            "aborted by the server",
            ALWAYS,
            GUESS,
            "why the server ends requests without an answer: it shuts down, or was told to abort them",
        ),
    ),
    supports=_all_yes("server_refuses", "clients_give_up"),
    when="most requests that end were aborted by the server, as in a drain",
)

# --- no progress: a state machine whose states are these rows ---------------------------------------------------------

_computing = (
    yes("kv_rising")
    & unsure("gauges_still")
    & yes("something_runs")
    & unsure("preempting")
    & unsure("kv_full")
    & (unsure("no_progress_very_long") | yes("prefill_hidden"))  # which ends when the cache is full
)
_one_step = unsure("no_progress_very_long") & yes("something_runs") & unsure("preempting") & unsure("kv_full")
_only_deferred = unsure("something_runs") & deferred
_clients_gone = yes("clients_gone") | (unknown("clients_gone") & no("http_answers"))
_gpu_silent = yes("gpu_idle") | (yes("gpu_shared") & unknown("gpu_idle"))
_unseen_load = (  # under such load clients would connect or disconnect
    yes("something_runs") & yes("waiting_now") & maybe("gpu_idle") & unknown("clients_gone") & unsure("http_answers")
)

LONG_PREFILL: Final = Verdict(
    "compute_bound",
    "Long prefill",
    requires=yes("no_progress") & _computing & (yes("queue_present") | yes("prefill_hidden")),
    rows=(
        Row("long prefill, requests waiting", yes("queue_present"), DOUBTFUL),
        Row("long prefill", ALWAYS, DOUBTFUL),
    ),
    supports=_all_yes("prefill_hidden", "queue_present", "work_present"),
    against=_all_yes("no_progress"),
    missing=(_GPU,),
    when=(
        "there has been no progress for {no_progress_seconds}, but KV usage rises, and requests wait or it rises"
        " fast: a long prompt is being computed"
    ),
)

NO_PROGRESS: Final = Verdict(
    "stalled",
    "No progress",
    at_once=True,
    requires=yes("no_progress"),
    unless=(_computing,),
    rows=(
        Row(
            "all preempted at a full cache",
            unsure("something_runs")
            & yes("kv_full")
            & yes("preempting")
            & unsure("gpu_idle")
            & unsure("no_progress_very_long"),
            DOUBTFUL,
            "whether those that were preempted will run again",
            verdict="kv_pressure",
        ),
        Row(
            "suspicious",
            unsure("no_progress_long"),
            GUESS,
            "whether the engine has stopped (a verdict follows after {stalled_seconds} without progress)",
            verdict="unknown",
        ),
        Row(
            "first request",
            no("ever_produced") & yes("something_runs") & unsure("no_progress_very_long"),
            GUESS,
            "what a first answer takes: there has been no progress since the start, so kernels may be compiled for the"
            " first request",
            verdict="unknown",
        ),
        Row(
            "long step on a CPU",
            _one_step & yes("gpu_unseen") & yes("cpu_saturated"),
            GUESS,
            "when the current step ends: the model seems to compute on the CPU, which is busy",
            verdict="unknown",
        ),
        Row(
            "long step, a whole prompt",
            _one_step & yes("prompt_at_once") & unsure("gpu_idle"),
            GUESS,
            "when the current step ends: a prompt was let in last, and it is computed as a whole",
            verdict="unknown",
        ),
        Row(
            "long prefill, as usual here",
            yes("prefill_usual")
            & yes("something_runs")
            & unsure("gpu_idle")
            & unsure("preempting")
            & unsure("kv_full"),
            GUESS,
            "{prefill_usual}",
            verdict="unknown",
        ),
        Row(
            "all deferred",
            _only_deferred & (unsure("no_progress_very_long") | yes("cpu_saturated")),
            DOUBTFUL,
            verdict="",
        ),
        Row(
            "queue of unknown cause",
            unsure("something_runs") & queue_unsorted & yes("waits_for_blocks"),
            DOUBTFUL,
            _UNSORTED,
        ),
        Row(
            "frozen",
            yes("gauges_still")
            & (
                (unsure("waiting_now") & maybe("gpu_idle") & _clients_gone)
                | (yes("gpu_idle") & yes("clients_gone") & unsure("http_answers"))
            ),
            GUESS,
            "whether requests are in flight: no gauge moves and clients seem to be gone, so gauges may be left over"
            " from aborted requests",
            verdict="unknown",
        ),
        Row(
            "stalled or left-over gauges",
            yes("gauges_still") & unsure("clients_came") & ((no("waiting_now") & _gpu_silent) | _unseen_load),
            DOUBTFUL,
            "whether requests are in flight: only gauges that no longer move show them, and these may be left over from"
            " aborted requests",
        ),
        Row("stalled, seen", yes("queue_present") | yes("gpu_idle"), STRONG),
        Row("stalled", ALWAYS, LIKELY),
    ),
    lower=(Lower(_only_deferred, at_most=LIKELY, missing=_DEFERRED),),
    supports=_all_yes("no_progress", "work_present", "gpu_idle", "clients_came"),
    against=_all_yes("tokens_flow"),
    missing=(_GPU, _CPU),
    when=(
        "requests are in flight, but there has been no progress for {stalled_seconds}. `unknown` up to"
        " {prefill_patience_seconds} for a first request, a single long step, deferred requests, or the usual prefill"
        " time. `unknown` where the clients are gone"
    ),
    confident=(
        "pending requests are certain: the GPU is active, clients stay or connect, the queue grew, or few requests"
        " run and none waits"
    ),
)

# --- the other server of a pair ---------------------------------------------------------------------------------------

TRANSFER_BOUND: Final = Verdict(
    "transfer_bound",
    "KV transfer",
    requires=(yes("queue_present") & yes("waits_for_peer")) | (yes("transfer_failing") & unanswered),
    rows=(
        Row("loads stand still", yes("loads_stuck"), DOUBTFUL, _PEER),
        Row("transfers fail", yes("transfer_failing"), DOUBTFUL, _PEER),
        Row("transfers are slow", yes("transfer_slow"), DOUBTFUL, _PEER),
        Row("loads hold the cache", yes("loads_hold_cache"), DOUBTFUL, _PEER),
    ),
    supports=_all_yes(
        "loads_stuck",
        "transfer_failing",
        "transfer_slow",
        "waits_for_peer",
        "loads_hold_cache",
        "queue_present",
        *_HARM,
    ),
    against=_all_yes("preempting", "prefill_dominates"),
    when=(
        "most waiting requests wait for KV blocks to move between two servers, and these stand still, fail, are slow or"
        " hold the cache"
    ),
)

# --- nothing to do, or nothing that the engine's resources explain ----------------------------------------------------

NOBODY_ANSWERED: Final = Verdict(
    "unknown",
    "Nobody answered",
    requires=unanswered,
    rows=(
        Row(
            "requests come and none is answered",
            ALWAYS,
            GUESS,
            "why no request is answered: prompts are admitted, but no token is produced; clients may time out before"
            " their first token",
        ),
    ),
    supports=(yes("prompts_looked_up"), no("tokens_flow"), no("finishing")),
    when="prompts are admitted, but no token is produced and no request finishes",
)

_at_rest = (yes("server_at_rest") & maybe("gpu_idle")) | (yes("gpu_idle") & no("gpu_shared") & maybe("server_at_rest"))

IDLE: Final = Verdict(
    "idle",
    "Idle",
    requires=no("work_present") & unsure("tokens_recently"),
    unless=(yes("cpu_saturated"),),  # requests may be prepared that the engine has not seen yet
    rows=(
        Row(
            "clients stay connected",
            yes("clients_stay") & unsure("tokens_recently") & unsure("gpu_idle"),
            GUESS,
            "whether requests are in flight: the engine counts them when a step ends, and the first step of a kind may"
            " compile for a minute",
            verdict="unknown",
        ),
        Row("nothing in flight, no tokens", no("tokens_recently") & _at_rest & yes("page_young"), CERTAIN),
        Row("nothing in flight", no("tokens_recently"), DOUBTFUL, "a second sign of rest: a long step moves no gauge"),
        Row("gauges show nothing", ALWAYS, DOUBTFUL, "whether tokens were produced just now: gauges may lag"),
    ),
    lower=(_FAILING,),
    supports=(no("work_present"), no("tokens_recently"), yes("server_at_rest"), yes("gpu_idle")),
    against=(*_all_yes("kv_held_without_load", "clients_stay"), no("page_young")),
    when="no request is in flight and no token came in the last moment",
    confident="no client is connected or the GPU is idle, neither denies it, and the last scrape is young",
)

DEFERRED: Final = Verdict(
    "unknown",
    "Deferred requests",
    unless=(yes("waits_for_peer") & yes("queue_short") & no("loads_stuck"),),  # loads that come along well
    requires=deferred | (lasting_queue & yes("deferred_fill_limit") & no("kv_near_full") & unsure("finishing")),
    rows=(
        Row(
            "deferred, cache full",
            deferred & yes("kv_full") & maybe("waits_for_blocks"),
            DOUBTFUL,
            "whether the cache keeps them waiting: all are deferred, waiting for KV blocks of another server",
            verdict="kv_pressure",
        ),
        Row("deferred", deferred, GUESS, _DEFERRED),
        Row(
            "deferred fill the limit",
            ALWAYS,
            GUESS,
            "whether the deferred requests keep the others out: with those running they are as many as {max_num_seqs},"
            " and they may count against it",
        ),
    ),
    stages=(("saturated", yes("kv_full")),),
    supports=(no("queue_for_capacity"), yes("kv_full")),
    when=(
        "every waiting request is deferred: it waits for a LoRA slot, a grammar, or KV blocks of another server, and"
        " these do not come along well"
    ),
)

# --- the cache --------------------------------------------------------------------------------------------------------


_only_blocks_left = (  # samples may miss the peaks of a cache that fills within a second
    yes("queue_for_capacity")
    & yes("queue_unbroken")
    & yes("kv_warm")
    & yes("running_far_below")
    & may_not_fit
    & no("step_budget_used")
)

KV_PRESSURE: Final = Verdict(
    "kv_pressure",
    "KV pressure",
    unless=(
        no("work_present"),
        yes("loads_hold_cache"),
        room_for_queue,  # samples of a cache that was full for a moment stay for a while
        yes("running_at_limit") & no("limit_is_observed") & maybe("running_at_limit_now") & ~preempting,
    ),
    rows=(
        Row("full, preempting, queue", yes("kv_full") & preempting & cache_queue, CERTAIN),
        Row(
            "full, preempting, not counted",
            yes("kv_full") & preempting & ~cache_queue & no("preemptions_borne_out"),
            DOUBTFUL,
        ),
        Row("full, preempted are back", yes("kv_full") & (preempting | cache_queue) & no("waited_recently"), STRONG),
        Row("full, short queue", yes("kv_full") & cache_queue & yes("queue_short") & ~preempting, DOUBTFUL),
        Row("full, below the limit", yes("kv_full") & (preempting | cache_queue) & no("running_at_limit"), CERTAIN),
        Row("full", yes("kv_full") & (preempting | cache_queue), STRONG),
        Row(
            "full, many just began to wait",
            yes("kv_full")
            & yes("many_wait_now")
            & yes("kv_near_full_now")
            & no("running_at_limit")
            & maybe("queue_for_capacity_now"),
            LIKELY,
        ),
        Row(
            "full, some just began to wait",
            yes("kv_full")
            & yes("waiting_now")
            & yes("kv_near_full_now")
            & no("running_at_limit")
            & maybe("queue_for_capacity_now"),
            DOUBTFUL,
            "whether the queue lasts",
        ),
        Row("nearly full, preempting", yes("kv_near_full") & still_preempting & maybe("preemptions_borne_out"), STRONG),
        Row("nearly full, preempting, not counted", yes("kv_near_full") & still_preempting, DOUBTFUL),
        Row("no other limit", _only_blocks_left, STRONG),
        Row("average prompt does not fit", yes("queue_for_capacity") & yes("mean_prompt_blocked"), LIKELY),
        Row(
            "long prompt does not fit", cache_queue & yes("head_of_line_blocked") & unsure("running_at_limit"), DOUBTFUL
        ),
        Row(
            "nearly full, queue",
            yes("kv_near_full") & lasting_queue & cache_queue & unsure("running_at_limit"),
            DOUBTFUL,
        ),
        Row("preempting, usage unknown", preempting & unknown("kv_near_full"), DOUBTFUL),
    ),
    lower=(
        Lower(
            yes("blocks_held_for_others"),
            at_most=DOUBTFUL,
            missing="whether KV blocks are held for another server that has not pulled them yet",
        ),
    ),
    stages=(
        ("failing", yes("allocation_failure_logged")),
        (
            "thrashing",
            yes("preempting") & (yes("preempting_much") | (no("preempting_much") & yes("latency_multiplied"))),
        ),
        ("saturated", yes("kv_full") | yes("preempting")),
        ("building", ALWAYS),
    ),
    supports=_all_yes(
        "kv_full",
        "queue_for_capacity",
        "preempting",
        "head_of_line_blocked",
        "running_far_below",
        *_HARM,
        "clients_give_up",
        "gpu_out_of_memory",
    ),
    against=_all_yes("running_at_limit", "prefill_dominates"),
    missing=(_KV, _GPU, _LIMIT),
    when=(
        "the KV cache is full (usage {kv_full_ratio} or more) while requests wait for it or are preempted, and "
        "max_num_seqs is not the reason. Also below full (usage {kv_near_full_ratio}) with "
        "preemptions, or where the next prompt does not fit"
    ),
    confident="the cache is full and the queue lasts, or vLLM counts preemptions",
)

_prefill_only = yes("first_token_long") & yes("prefill_dominates") & ~lasting_queue
_evicted_early = yes("evicted_before_reuse") | yes("tier_too_small") | yes("tier_saturated")
_IF_EVICTED: Final = "{prefill_repeated}"

REUSE_LOST: Final = Verdict(
    "kv_pressure",
    "Reuse lost",
    requires=yes("prefill_dominates") & (yes("first_token_long") | yes("latency_multiplied") | lasting_queue),
    rows=(
        Row("evicted and computed again", yes("prefill_repeated"), STRONG),
        Row(
            "hits collapsed",
            yes("prefix_cache_collapsed") & unknown("prefill_repeated") & (_prefill_only | _evicted_early),
            DOUBTFUL,
            _IF_EVICTED,
        ),
        Row(
            "evicted as early as reused",
            _prefill_only & yes("few_cache_hits") & _evicted_early & unknown("prefill_repeated"),
            DOUBTFUL,
            _IF_EVICTED,
        ),
    ),
    stages=((REUSE, ALWAYS),),
    supports=_all_yes(
        "prefill_repeated",
        "prefix_cache_collapsed",
        "evicted_before_reuse",
        "tier_too_small",
        "tier_saturated",
        "few_cache_hits",
        "first_token_long",
        "queue_present",
        *_HARM,
    ),
    missing=(_KV,),
    when=(
        "users wait for prefill, and {hit_ratio_usual_ratio} or more of it computes prompts again whose KV blocks were"
        " evicted; without KV events, where hits collapsed, or blocks are evicted about as early as they are reused or"
        " the KV tier does not keep them"
    ),
    confident="the server's KV events show it",
)

# --- the sequence limit -----------------------------------------------------------------------------------------------

_gpu_at_peak = yes("gpu_computes") & yes("gpu_works")
_gpu_may_bind = (unknown("gpu_computes") | yes("gpu_of_others")) & maybe("gpu_saturated") & yes("prefill_dominates")

STEP_BUDGET: Final = Verdict(
    "concurrency_limited",
    "Step budget",
    requires=lasting_queue
    & (unsure("running_at_limit") | yes("limit_is_observed"))
    & unsure("kv_near_full")
    & ~may_not_fit
    & unsure("steps_slower")  # where a full step takes much longer, its tokens cost time: the GPU is the limit
    & ~_gpu_at_peak,
    rows=(
        Row("used up", yes("step_budget_used") & (yes("steps_small") | no("gpu_computes")), STRONG),
        Row(
            "small steps, or GPU below its peak",
            unknown("step_budget_used")
            & (yes("steps_small") | (no("steps_small") & no("gpu_computes")))
            & yes("prefill_dominates")
            & yes("queue_for_capacity")
            & unsure("running_plateau"),
            DOUBTFUL,
            "{max_num_batched_tokens}, which keeps the steps as small as they are (needs the arguments or the start-up"
            " log)",
        ),
    ),
    lower=(Lower(unknown("kv_full"), by=2),),
    stages=((STEP_TOKENS, ALWAYS),),
    supports=_all_yes("step_budget_used", "steps_small", "queue_present", "prefill_dominates", *_HARM),
    missing=(_KV, _GPU, _LIMIT),
    when="a queue lasts below max_num_seqs, and fast steps use up max_num_batched_tokens",
    confident="that budget is known and small, or the GPU is below its peak",
)

_no_more_tokens = yes("past_peak") | (yes("steps_slower") & maybe("throughput_fell"))

CONCURRENCY_LIMITED: Final = Verdict(
    "concurrency_limited",
    "Concurrency limited",
    requires=yes("running_at_limit") & lasting_queue,
    unless=(yes("limit_is_observed") & yes("prefill_dominates"),),  # constant because of prefill
    rows=(
        Row(
            "limit and cache reached at once",
            yes("kv_full"),
            DOUBTFUL,
            "which of the two binds: with a higher {max_num_seqs} the cache would, so do not raise it",
        ),
        Row(
            "throughput no longer grows",
            _no_more_tokens,
            DOUBTFUL,
            "why steps are slow: with a higher {max_num_seqs} they would be slower still, so do not raise it",
        ),
        Row("limit read", yes("limit_is_stated"), CERTAIN),
        Row("limit is a default", no("limit_is_observed"), STRONG),
        Row("limit inferred", ALWAYS, LIKELY),
    ),
    lower=(
        Lower(
            unknown("kv_full") | unknown("queue_short") | (yes("limit_is_observed") & may_not_fit),
            by=2,
        ),
        Lower(unknown("tokens_flow"), by=3),  # a scheduler that has stopped looks just like this
        Lower(_gpu_at_peak, at_most=DOUBTFUL, against=("gpu_works",)),
        Lower(_gpu_may_bind, at_most=DOUBTFUL, against=("prefill_dominates",)),
        Lower(yes("steps_slower"), at_most=DOUBTFUL),  # seen within seconds, a lower throughput only after a minute
        Lower(may_not_fit, against=("any_prompt_fits",)),
    ),
    supports=_all_yes("running_at_limit", "queue_present", "latency_multiplied", "clients_give_up"),
    against=_all_yes("kv_full", "gpu_starved", "past_peak", "steps_slower", "throughput_fell"),
    missing=(_KV, _TOKENS),
    when="max_num_seqs is reached, and a queue lasts",
    confident="KV usage is below full, steps are fast, and the GPU is below its peak",
)

# --- the host ---------------------------------------------------------------------------------------------------------

_busy = yes("tokens_flow") | yes("work_present")
_suffers = harmed | maybe("gpu_utilization_low")
_seen = harmed & no("gpu_saturated")
_not_its_cpu = no("steps_slower") & no("outside_engine_time") & unsure("gpu_utilization_low") & ~harmed
_prefill_queue = lasting_queue & yes("prefill_dominates")
_short_of_cpu = (
    (yes("cpu_throttled") | yes("cpu_contended"))
    & unsure("gpu_saturated")
    & _busy
    & _suffers
    & ~_not_its_cpu
    & ~_prefill_queue
)
_cpu_full = yes("cpu_saturated") & unsure("gpu_saturated") & (_busy | yes("gpu_idle")) & _suffers
_gpu_low = yes("gpu_utilization_low")
_starved = yes("gpu_starved") & yes("tokens_flow") & yes("several_run")
_stopped = yes("cpu_throttled_mostly") & _gpu_low & no("gpu_saturated") & maybe("latency_multiplied")

HOST_BOUND: Final = Verdict(
    "host_bound",
    "Host bound",
    rows=(
        Row(
            "CPU mostly throttled, steps slower",
            _short_of_cpu & yes("cpu_throttled_mostly") & yes("steps_slower") & unsure("kv_near_full"),
            LIKELY,
        ),
        Row("CPU short, GPU waits", _short_of_cpu & _gpu_low & (_stopped | _seen), STRONG),
        Row("CPU short", _short_of_cpu & ~_gpu_low & _seen, LIKELY),
        Row("CPU short, no harm seen", _short_of_cpu, DOUBTFUL),
        Row("CPU full, GPU waits", _cpu_full & _gpu_low & _busy & _seen, STRONG),
        Row("CPU full", _cpu_full, DOUBTFUL),
        Row("GPU starved", _starved & (maybe("latency_multiplied") | _seen), LIKELY),
        Row("GPU starved, latency as ever", _starved, DOUBTFUL),
        Row("API server", yes("api_server_saturated") & yes("outside_engine_time") & unsure("kv_near_full"), LIKELY),
        Row(
            "API server, time outside unknown",
            yes("api_server_saturated")
            & unknown("outside_engine_time")
            & unsure("gpu_saturated")
            & unsure("kv_near_full")
            & unsure("latency_multiplied")
            & ~lasting_queue
            & _busy,
            DOUBTFUL,
            "how much time requests spend outside the engine",
        ),
        Row(
            "time lost outside the engine",
            yes("outside_engine_time")
            & yes("tokens_flow")
            & ~lasting_queue
            & unsure("gpu_saturated")
            & unsure("kv_near_full"),
            DOUBTFUL,
            "what takes the time outside the engine: its API server, tokenization, the network, or clients that read"
            " slowly",
        ),
        Row(
            "queue without a reason in the engine",
            lasting_queue
            & yes("queue_for_capacity")
            & _gpu_low
            & no("kv_near_full")
            & yes("tokens_flow")
            & unsure("prefill_dominates")
            & unsure("running_plateau"),
            DOUBTFUL,
        ),
    ),
    lower=(Lower(queue_unsorted, at_most=DOUBTFUL, missing=_UNSORTED),),
    supports=_all_yes(
        "cpu_throttled",
        "cpu_contended",
        "cpu_saturated",
        "outside_engine_time",
        "gpu_starved",
        "api_server_saturated",
        "gpu_utilization_low",
        "queue_present",
        *_HARM,
    ),
    against=_all_yes("kv_near_full", "gpu_saturated"),
    missing=(_GPU, _THROTTLED, _CPU),
    when="the CPU is throttled, contended or at its limit, the GPU starves, or time is lost outside the engine",
    confident=(
        "the CPU is throttled most of the time and steps are at least {latency_multiplied_ratio} slower, or the "
        "GPU starves while several requests run and users suffer"
    ),
)

# --- the GPU ----------------------------------------------------------------------------------------------------------

_below_limits = unsure("running_plateau") & (no("running_at_limit") | no("running_plateau"))

COMPUTE_BOUND: Final = Verdict(
    "compute_bound",
    "Compute bound",
    requires=lasting_queue,
    unless=(yes("kv_full") & ~room_for_queue, yes("running_at_limit") & unsure("limit_is_observed")),
    rows=(
        Row("prefill, GPU not saturated", yes("prefill_dominates") & no("gpu_saturated"), GUESS),
        Row("prefill saturates the GPU", yes("prefill_dominates") & yes("gpu_saturated") & no("kv_near_full"), STRONG),
        Row("prefill", yes("prefill_dominates"), DOUBTFUL),
        Row("GPU saturated, cache nearly full", yes("gpu_saturated") & maybe("kv_near_full"), GUESS),
        Row("GPU works hard", yes("gpu_saturated") & yes("gpu_works") & _below_limits, LIKELY),
        Row("GPU utilization high", yes("gpu_saturated") & _below_limits, DOUBTFUL),
    ),
    lower=(
        Lower(
            yes("running_plateau") & (no("running_at_limit") | yes("limit_is_observed")),
            at_most=DOUBTFUL,
            against=("running_plateau",),
        ),
        Lower(may_not_fit, at_most=DOUBTFUL, against=("any_prompt_fits",)),
        Lower(unknown("queue_short"), at_most=DOUBTFUL),
        Lower(queue_unsorted, at_most=DOUBTFUL, missing=_UNSORTED),
    ),
    supports=_all_yes(
        "prefill_dominates", "gpu_saturated", "queue_present", "kv_free_beside_queue", *_HARM, "clients_give_up"
    ),
    against=_all_yes("kv_near_full"),
    missing=(_KV, _GPU, _LIMIT),
    when=("a queue lasts below max_num_seqs with free KV cache, and prefill dominates or the GPU is saturated"),
)

# --- healthy, and nothing of all this ---------------------------------------------------------------------------------

users_may_suffer = (
    yes("clients_give_up")
    | yes("latency_multiplied")
    | yes("throughput_fell")
    | yes("steps_slower")
    | yes("cpu_throttled_mostly")
    | (yes("api_server_saturated") & maybe("outside_engine_time"))
)

_well = (
    no("no_progress")
    & ~unknown("kv_full")
    & ~(yes("kv_full") & (yes("preempting") | yes("waited_recently")))
    & ~users_may_suffer
)

HEALTHY: Final = Verdict(
    "healthy",
    "Tokens flow",
    requires=yes("tokens_flow"),
    unless=(lasting_queue,),
    rows=(
        Row(
            "prefill starves decoding",
            (yes("prefill_dominates") & (yes("tokens_trickle") | (yes("throughput_fell") & yes("kv_rising"))))
            | (yes("prefill_hidden") & yes("tokens_trickle")),
            DOUBTFUL,
            verdict="compute_bound",
        ),
        Row(
            "hardly any tokens",
            yes("tokens_trickle"),
            GUESS,
            "why running requests hardly get tokens although nobody waits",
            verdict="unknown",
        ),
        Row(
            "latency up, throughput down",
            yes("latency_multiplied") & yes("throughput_fell"),
            GUESS,
            "why requests are slow although nobody waits",
            verdict="unknown",
        ),
        Row("slow", yes("answers_slow"), GUESS, "why answers are slow although nobody waits", verdict="unknown"),
        Row(
            "first token long, reuse unknown",
            _prefill_only & yes("few_cache_hits") & yes("cache_turns_over") & unknown("prefill_repeated"),
            GUESS,
            _IF_EVICTED,
            verdict="unknown",
        ),
        Row(
            "requests unknown",
            unknown("queue_present") & unknown("something_runs"),
            GUESS,
            "running requests",
            verdict="unknown",
        ),
        Row("nobody waits", _well & no("waited_recently"), STRONG),
        Row("few wait, and briefly", _well & no("many_waited_recently"), LIKELY),
        Row("users may be affected", users_may_suffer, DOUBTFUL, "why requests are slow although nobody waits"),
        Row("no queue lasts", ALWAYS, DOUBTFUL),
    ),
    lower=(
        _FAILING,
        Lower(yes("something_runs") & no("tokens_recently"), at_most=DOUBTFUL),  # before no_progress says why
        Lower(yes("answers_suspect"), at_most=DOUBTFUL),
    ),
    supports=(
        yes("tokens_flow"),
        yes("queue_short"),
        no("queue_present"),
        yes("prefill_dominates"),
        yes("kv_rising"),
        yes("prefill_hidden"),
    ),
    against=_all_yes(
        "kv_full",
        "kv_near_full",
        "waited_recently",
        "preempting",
        "prefix_cache_collapsed",
        "prefill_repeated",
        "clients_give_up",
        "tokens_trickle",
        "steps_slower",
        "latency_multiplied",
        "throughput_fell",
        "api_server_saturated",
        "cpu_throttled",
        *TRANSFER_SIGNS,
        "drafts_rejected",
    ),
    missing=(_QUEUE, _KV),
    when=(
        "tokens flow and no queue lasts. `compute_bound` where prefill starves decoding, `unknown` where "
        "running requests hardly get tokens"
    ),
    confident="KV usage is known, few or none waited, and nothing says that users suffer",
)

UNDECIDED: Final = Verdict(
    "unknown",
    "Undecided",
    rows=(
        Row("queue of unknown cause", queue_unsorted, GUESS, _UNSORTED),
        Row(
            "another limit than the one read",
            lasting_queue
            & yes("running_plateau")
            & no("running_at_limit")
            & no("kv_near_full")
            & ~may_not_fit
            & unsure("prefill_dominates"),
            DOUBTFUL,
            "what limits the batch: it comes back to one maximum below {max_num_seqs} and the KV cache is not full, so"
            " the arguments may be outdated",
            verdict="concurrency_limited",
        ),
        Row("first scrape", yes("first_reading"), GUESS, "rates, which need a second scrape"),
        Row("no rule applies", ALWAYS, GUESS),
    ),
    supports=_all_yes("queue_present", "work_present", "kv_near_full", "kv_free_beside_queue"),
    missing=(_TOKENS, _WORK, _KV, _GPU, _THROTTLED, _LIMIT),
    when="no table above applies",
)

SYNTHETIC: Final = frozenset(
    {
        "Reuse lost: evicted and computed again",
        "Host bound: CPU short, GPU waits",
        "Host bound: CPU short",
        "Host bound: CPU full, GPU waits",
        "Host bound: API server",
        "KV pressure: full, preempted are back",
        "Compute bound: prefill saturates the GPU",
        "Compute bound: GPU works hard",
    }
)
"""Rows that no recording of a real server and no public incident has shown yet: capped at doubtful."""


def _capped(table: Verdict) -> Verdict:
    rows = tuple(
        replace(row, grade=min(row.grade, DOUBTFUL)) if f"{table.title}: {row.name}" in SYNTHETIC else row
        for row in table.rows
    )
    return replace(table, rows=rows)


DEFERRED_HOST: Final = 8  # place of the host's table where every waiting request is deferred: a short CPU explains it
DESIGNED: Final = (
    NO_SCRAPE,
    ASLEEP,
    REFUSING,
    LONG_PREFILL,
    TRANSFER_BOUND,
    NO_PROGRESS,
    NOBODY_ANSWERED,
    IDLE,
    replace(HOST_BOUND, requires=deferred),
    DEFERRED,
    KV_PRESSURE,
    REUSE_LOST,
    STEP_BUDGET,
    CONCURRENCY_LIMITED,
    HOST_BOUND,
    COMPUTE_BOUND,
    HEALTHY,
    UNDECIDED,
)
TABLES: Final = tuple(_capped(table) for table in DESIGNED)
