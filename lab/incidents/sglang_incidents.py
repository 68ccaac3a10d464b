"""Public SGLang incidents with the numbers quoted in their threads, labelled before any rule judged them."""

from __future__ import annotations

from dataclasses import replace

from lab.incidents.sglang_model import NEW, OLD, RANKS, Incident, frozen, gauge, rate, steps

LAUNCH = ["python3", "-m", "sglang.launch_server"]

FULL_POOL = Incident(
    id="SG01A",
    source="sgl-project/sglang#26248",
    kind="KV_PRESSURE",
    version="~0.5.11 (2026-05)",
    gpu="n/a",
    configuration="hybrid sliding-window model, four requests that fill 2.6 M tokens",
    signals=(
        "before: run 4, queue 3, full usage 1.00 (2642688 tokens), swa usage 0.06, 429 tok/s; then one retraction: "
        "run 3, queue 3-2, usage 0.87-0.88, prefill 8192 tokens a step at 21.8 k-19.5 k tok/s, 583214 tokens pending; "
        "later 20-38 tok/s, not recovering"
    ),
    log=(
        "Decode batch, #running-req: 4, #full token: 2642688, full token usage: 1.00, #swa token: 14592, "
        "swa token usage: 0.06, cuda graph: True, gen throughput (token/s): 429.34, #queue-req: 3"
    ),
    cause=(
        "the pool is full; a retracted request computes its long prompt again in chunks, between which decode waits"
    ),
    labels=NEW,
    seconds=600,
    args=LAUNCH,
    assumed=(
        "five minutes of the quoted state before the retraction; one retraction; usage returns to 1.00 "
        "in 20 s at the quoted prefill rate, and the queue stays at 2"
    ),
    series=[
        gauge("num_running_reqs", (0, 4), (299, 4), (300, 3)),
        gauge("num_queue_reqs", (0, 3), (305, 3), (310, 2)),
        gauge("token_usage", (0, 1.0), (299, 1.0), (300, 0.87), (320, 1.0)),
        gauge("swa_token_usage", (0, 0.06), (299, 0.06), (300, 0.1)),
        gauge("gen_throughput", (0, 429.5), (299, 429.5), (305, 30.0), noise=0.02),
        gauge("max_total_num_tokens", (0, 2642688)),
        rate("realtime_tokens_total", (0, 429.5), (300, 29.0), mode="decode"),
        rate("realtime_tokens_total", (0, 0.0), (300, 20500.0), (330, 0.0), mode="prefill_compute"),
        rate("num_retracted_requests_total", (0, 0.0), (300, 0.2), (305, 0.0), noise=0.0),
    ],
    verdicts="kv_pressure",
    strict="kv_pressure",
    forbidden="idle|stalled|host_bound|concurrency_limited|compute_bound|healthy",
    page="ticket",
    grade="A",
    window=(60, 295),
    trap="four running requests look like light load; decode runs at its normal speed while the pool is full",
)

INCIDENTS = [
    FULL_POOL,
    replace(
        FULL_POOL,
        id="SG01B",
        verdicts="kv_pressure|compute_bound",
        forbidden="idle|stalled|host_bound|concurrency_limited|healthy",
        page="yes",
        grade="B",
        window=(330, 590),
        trap="one retraction only, but the collapse outlasts it: a counter of retractions is silent again at once",
    ),
    Incident(
        id="SG02",
        source="sgl-project/sglang#7133",
        kind="CAP",
        version="~0.4.7 (2025-06)",
        gpu="MI300X",
        configuration=(
            "Qwen3-32B, TP 8, 1024 prompts of 2048 tokens with 8192 output tokens, radix cache off, "
            "--max-running-requests 8192, --schedule-conservativeness 0.1"
        ),
        signals="run 370 -> about 399 and no further, queue 646 and hundreds remain, usage 0.19",
        log=(
            "Prefill batch. #new-seq: 8, #new-token: 16384, #cached-token: 0, token usage: 0.19, #running-req: 370, "
            "#queue-req: 646"
        ),
        cause="not settled; admission reserves room for the output that running requests are expected to write",
        trap="a queue of hundreds with four fifths of the pool free and the limit (8192) far away",
        verdicts="unknown|compute_bound|concurrency_limited|healthy",
        strict="unknown",
        forbidden="kv_pressure|idle|stalled|host_bound",
        page="no",
        grade="C",
        window=(120, 590),
        seconds=600,
        labels=OLD,
        args=[
            *LAUNCH,
            "--tp-size",
            "8",
            "--max-running-requests",
            "8192",
            "--context-length",
            "16384",
            "--schedule-conservativeness",
            "0.1",
            "--disable-radix-cache",
            "--chunked-prefill-size",
            "-1",
        ],
        assumed=(
            "a minute of prefill before; usage 0.21 at 399 requests; the queue holds the other 625 prompts; "
            "an offline engine written with a server's metrics"
        ),
        series=[
            gauge("num_running_reqs", (0, 0), (50, 370), (60, 399)),
            gauge("num_queue_reqs", (0, 1024), (50, 646), (60, 625)),
            gauge("token_usage", (0, 0.0), (50, 0.19), (60, 0.21)),
        ],
    ),
    Incident(
        id="SG03",
        source="sgl-project/sglang#2746",
        kind="KV_PRESSURE",
        version="0.4.1 (2025-01)",
        gpu="8 GPUs",
        configuration="DeepSeek-V3, TP 8, benchmark with runaway outputs",
        signals=(
            "run 2, queue 0, usage 1.00 (307481 -> 307801 tokens in 30 s), 10.92 tok/s; then one retraction, "
            "ratio 0.0980 -> 0.9446"
        ),
        log="Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.0980 -> 0.9446",
        cause="two requests never end and fill the pool alone",
        trap=(
            "two running and nobody waiting: nothing but usage and one log line tells; this release has no metric "
            "of retractions"
        ),
        verdicts="kv_pressure|unknown",
        strict="kv_pressure",
        forbidden="idle|stalled|host_bound|concurrency_limited|compute_bound",
        page="ticket",
        grade="B",
        window=(200, 310),
        seconds=330,
        labels={},
        args=[*LAUNCH, "--tp", "8"],
        assumed="the quoted growth of 10.9 tokens/s also for the five minutes before",
        lines=[
            (
                300,
                (
                    "[2025-01-06 02:58:44 TP0] Decode out of memory happened. #retracted_reqs: 1, "
                    "#new_token_ratio: 0.0980 -> 0.9446"
                ),
            )
        ],
        series=[
            gauge("num_running_reqs", (0, 2), (300, 2), (301, 1)),
            gauge("num_queue_reqs", (0, 0), (300, 0), (301, 1)),
            gauge("token_usage", (0, 0.989), (270, 0.999), (300, 1.0)),
            gauge("num_used_tokens", (0, 304530), (300, 307801)),
            gauge("gen_throughput", (0, 10.92), (300, 10.93), noise=0.002),
        ],
    ),
    Incident(
        id="SG04",
        source="sgl-project/sglang#6778",
        kind="KV_PRESSURE",
        version="~0.4.6 (2025-05)",
        gpu="n/a",
        configuration="long-running server, retrieval workload at high concurrency",
        signals=(
            "run 36 -> 35 while a request ends, tokens 958017 -> 959430, usage 0.96, later near 1.0 and no progress"
        ),
        log="Decode batch. #running-req: 36, #token: 958017, token usage: 0.96",
        cause=(
            "reporter suspects that finished requests keep their tokens; a maintainer points to the radix cache, "
            "whose tokens are evictable and not part of the usage"
        ),
        trap="a leak would show at zero running requests; here 35 run",
        verdicts="kv_pressure|stalled|unknown",
        strict="kv_pressure",
        forbidden="idle|host_bound|concurrency_limited|compute_bound",
        page="yes",
        grade="C",
        window=(120, 590),
        seconds=600,
        labels=OLD,
        args=LAUNCH,
        forbidden_conditions="memory_leak_idle",
        assumed="usage from 0.90 to 0.96 in the five minutes before and to 0.99 in the five after",
        series=[
            gauge("num_running_reqs", (0, 36), (300, 36), (305, 35)),
            gauge("token_usage", (0, 0.90), (300, 0.96), (600, 0.99)),
            gauge("num_used_tokens", (0, 898000), (300, 958017), (305, 959430), (600, 988000)),
        ],
    ),
    Incident(
        id="SG05",
        source="sgl-project/sglang#2741",
        kind="HANG",
        version="0.4.1 (2025-01)",
        gpu="n/a",
        configuration="DeepSeek-V3, at most 100 running requests",
        signals=(
            "run 99, usage 0.32, about one finished request a second of 217 prompt tokens, then nothing; "
            "util 100 % with low power"
        ),
        log=(
            "Prefill batch. #new-seq: 1, #new-token: 105, #cached-token: 112, cache hit rate: 12.33%, token usage:"
            " 0.32, #running-req: 99"
        ),
        cause="not settled; the scheduler spins",
        trap="util 100 % looks like compute; 99 of 100 looks like the limit",
        verdicts="stalled|unknown",
        strict="stalled",
        forbidden="kv_pressure|compute_bound|concurrency_limited|healthy|idle",
        page="yes",
        grade="B",
        window=(420, 890),
        seconds=900,
        labels={},
        args=[*LAUNCH, "--max-running-requests", "100"],
        assumed="five minutes of the quoted load; metrics stand still while the server answers",
        utilization=steps([(0, 1.0)]),
        memory_total=None,
        series=[
            gauge("num_running_reqs", (0, 99), until=300),
            gauge("token_usage", (0, 0.32), until=300, noise=0.0),
            rate("num_requests_total", (0, 1.0), (300, 0.0), noise=0.0),
            rate("prompt_tokens_total", (0, 217.0), (300, 0.0)),
        ],
    ),
    Incident(
        id="SG06",
        source="sgl-project/sglang#23177",
        kind="PREFILL",
        version="~0.5.10 (2026-04)",
        gpu="n/a",
        configuration="GLM 5.1 FP8, TP 4, many multiple-choice prompts with max_tokens=1",
        signals=(
            "run 116 -> 122, queue 238, usage 0.01, prefill 15360 tokens a step at 25.8 k tok/s, 595000 tokens pending"
        ),
        log=(
            "Prefill batch, #new-seq: 6, #new-token: 15360, #cached-token: 0, token usage: 0.01, #running-req: 116, "
            "#queue-req: 238, #pending-token: 595000, cuda graph: False, input throughput (token/s): 25774.75"
        ),
        cause="demand for prefill above what the cards compute; the crash later is not settled",
        trap="no decode at all: output tokens stand still although the server works at its limit",
        verdicts="compute_bound|unknown|healthy",
        strict="compute_bound",
        forbidden="kv_pressure|idle|stalled|host_bound",
        page="ticket",
        grade="B",
        window=(120, 590),
        seconds=600,
        labels=NEW,
        args=[*LAUNCH, "--tp", "4"],
        assumed="the quoted state lasts ten minutes",
        series=[
            gauge("num_running_reqs", (0, 116), (5, 122), (10, 116), (15, 122)),
            gauge("num_queue_reqs", (0, 238)),
            gauge("token_usage", (0, 0.01)),
            gauge("gen_throughput", (0, 0.0)),
            rate("realtime_tokens_total", (0, 25785.0), mode="prefill_compute"),
            rate("realtime_tokens_total", (0, 0.0), mode="decode"),
        ],
    ),
    Incident(
        id="SG07",
        source="sgl-project/sglang#33858",
        kind="TELEMETRY",
        version="0.5.16",
        gpu="n/a",
        configuration=(
            "--max-running-requests 128 --max-queued-requests 96 --tokenizer-worker-num 2, 3000 requests a minute"
        ),
        signals=(
            "1309 of 4096 done, then run 0, queue 0; clients keep waiting, /health 200, new requests work; "
            "with one tokenizer worker all 4096 done in 118 s"
        ),
        log="",
        cause="rejections of one tokenizer worker are lost; the engine itself has nothing to do",
        trap="users hang while every engine metric says idle",
        verdicts="idle|unknown",
        strict="idle",
        forbidden="kv_pressure|compute_bound|concurrency_limited|host_bound|stalled",
        page="no",
        grade="A",
        window=(180, 590),
        seconds=600,
        labels=NEW,
        args=[
            *LAUNCH,
            "--max-running-requests",
            "128",
            "--max-queued-requests",
            "96",
            "--tokenizer-worker-num",
            "2",
        ],
        assumed="the load takes 40 s at the quoted rate of the good run (35 requests/s) and reaches both limits",
        series=[
            gauge("num_running_reqs", (0, 0), (60, 0), (65, 128), (95, 128), (100, 0)),
            gauge("num_queue_reqs", (0, 0), (60, 0), (65, 96), (90, 96), (95, 0)),
            rate("num_requests_total", (0, 0.0), (60, 32.7), (100, 0.0), noise=0.0),
        ],
    ),
    Incident(
        id="SG08",
        source="sgl-project/sglang#22518",
        kind="HANG",
        version="~0.5.10 (2026-04)",
        gpu="n/a",
        configuration="Qwen3-Embedding-0.6B, --is-embedding --max-running-requests 2, three inputs at once",
        signals="two inputs computed, the third waits for ever; the scheduler lives and never schedules again",
        log="",
        cause="the flag that the batch is full is never reset for models without decode (fix proposed in #22539)",
        trap="nothing runs and the pool is empty, but somebody waits",
        verdicts="stalled|unknown",
        strict="stalled",
        forbidden="kv_pressure|concurrency_limited|idle|healthy|compute_bound|host_bound",
        page="yes",
        grade="A",
        window=(240, 890),
        seconds=900,
        labels=NEW,
        args=[
            "sglang",
            "serve",
            "--model-path",
            "Qwen/Qwen3-Embedding-0.6B",
            "--is-embedding",
            "--max-running-requests",
            "2",
        ],
        assumed="a minute of idle before; the gauges of the last prefill (0 running, 1 waiting) stay",
        series=[
            *frozen(60, ("num_queue_reqs", 1.0)),
            gauge("num_running_reqs", (0, 0)),
            gauge("token_usage", (0, 0.0)),
            rate("num_requests_total", (0, 0.0), (60, 0.4), (65, 0.0), noise=0.0),
            rate("realtime_tokens_total", (0, 0.0), mode="decode"),
            rate("realtime_tokens_total", (0, 0.0), (60, 2.0), (65, 0.0), noise=0.0, mode="prefill_compute"),
        ],
    ),
    Incident(
        id="SG09",
        source="sgl-project/sglang#14972",
        kind="KV_PRESSURE",
        version="~0.5.6 (2025-12)",
        gpu="n/a",
        configuration="small pool, overlap schedule, retraction",
        signals="run 6, queue 5, 1920 tokens, usage 0.94, 441-446 tok/s; then retraction and an allocation failure",
        log=(
            "Decode batch, #running-req: 6, #token: 1920, token usage: 0.94, cuda graph: True, "
            "gen throughput (token/s): 446.45, #queue-req: 5,"
        ),
        cause="the pool holds six of eleven requests; retraction beside the overlap schedule fails to allocate",
        trap="usage stops at 0.94, not at 1.00",
        verdicts="kv_pressure",
        strict="kv_pressure",
        forbidden="idle|stalled|host_bound|concurrency_limited|compute_bound|healthy",
        page="yes",
        grade="A",
        window=(120, 295),
        seconds=420,
        labels=RANKS,
        args=LAUNCH,
        assumed="a pool of 2048 tokens (1920 / 0.94); five minutes of the quoted state; the process ends",
        dead_from=300,
        series=[
            gauge("num_running_reqs", (0, 6)),
            gauge("num_queue_reqs", (0, 5)),
            gauge("token_usage", (0, 0.9375)),
            gauge("num_used_tokens", (0, 1920)),
            gauge("max_total_num_tokens", (0, 2048)),
            gauge("gen_throughput", (0, 444.4), noise=0.005),
            rate("inter_token_latency_seconds_sum", (0, 6.0), noise=0.005),
            rate("inter_token_latency_seconds_count", (0, 444.4), noise=0.005),
        ],
    ),
    Incident(
        id="SG10",
        source="sgl-project/sglang#10408",
        kind="OTHER",
        version="~0.5.2 (2025-09)",
        gpu="4 x L4",
        configuration="Qwen 7B FP8",
        signals="run 4, 9071 tokens, usage 0.01, then the scheduler ends: one request slot free, two needed",
        log=(
            "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for"
            " `--max-running-requests`. self.req_to_token_pool.available_size()=1, num_reqs=2,"
        ),
        cause="request slots, not memory: the table of running requests is full",
        trap="'runs out of memory' with 99 % of the pool free: neither KV pressure nor a lack of GPU memory",
        verdicts="unknown|stalled",
        strict="unknown",
        forbidden="kv_pressure|idle|healthy|concurrency_limited|compute_bound",
        page="yes",
        grade="B",
        window=(360, 590),
        seconds=600,
        labels=RANKS,
        args=LAUNCH,
        forbidden_conditions="gpu_out_of_memory",
        assumed="five minutes of the quoted state before; the process does not come back",
        dead_from=300,
        lines=[
            (
                300,
                (
                    "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
                    "`--max-running-requests`. self.req_to_token_pool.available_size()=1, num_reqs=2, "
                ),
            )
        ],
        series=[
            gauge("num_running_reqs", (0, 4)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.01)),
            gauge("num_used_tokens", (0, 9071), noise=0.01),
        ],
    ),
    Incident(
        id="SG11",
        source="sgl-project/sglang#23393",
        kind="CPU",
        version="~0.5.10 (2026-04)",
        gpu="n/a",
        configuration="data-parallel attention, slow tokenizer, batch 1024",
        signals="ITL p50 180 ms at the client, 39 ms with --skip-tokenizer-init; no gap at batch 128",
        log="UserWarning: Using a slow tokenizer. This might cause a significant slowdown.",
        cause="the tokenizer and detokenizer processes, not the engine",
        trap="the scheduler's own throughput is fine: the gap shows only between its metrics and the latencies",
        verdicts="host_bound|healthy|unknown",
        strict="host_bound",
        forbidden="kv_pressure|stalled|idle|concurrency_limited",
        page="ticket",
        grade="A",
        window=(120, 590),
        seconds=600,
        labels=NEW,
        args=[*LAUNCH, "--enable-dp-attention"],
        assumed="the scheduler decodes 1024 requests at 39 ms a step; one scheduler's metrics for all ranks; queue 0",
        series=[
            gauge("num_running_reqs", (0, 1024)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("gen_throughput", (0, 26256.0), noise=0.02),
            rate("inter_token_latency_seconds_sum", (0, 1024.0)),
            rate("inter_token_latency_seconds_count", (0, 5689.0)),
        ],
    ),
    Incident(
        id="SG12",
        source="sgl-project/sglang#22877",
        kind="HANG",
        version="~0.5.9 (2026-04)",
        gpu="n/a",
        configuration="prefill instance of a large prefill/decode deployment, newly started",
        signals=(
            "prealloc queue 18, 22, 27, 28, 35 within 3 s and rising for ever; run 0, queue 0, usage 0.00, inflight 1, "
            "1.00-5.19 tok/s"
        ),
        log=(
            "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00, #running-req: 0,"
            " #queue-req: 0, #prealloc-req: 35, #inflight-req: 1, cuda graph: False, input throughput (token/s): 1.00"
        ),
        cause="not settled; new requests wait for the decode side and never leave the queue",
        trap="running and waiting are 0: only the prefill/decode queues show that requests are stuck",
        verdicts="stalled|unknown",
        strict="stalled",
        forbidden="idle|healthy|kv_pressure|compute_bound|concurrency_limited",
        page="yes",
        grade="B",
        window=(120, 290),
        seconds=300,
        labels={**NEW, "engine_type": "prefill"},
        args=[*LAUNCH, "--disaggregation-mode", "prefill"],
        assumed="the quoted slope for five minutes",
        series=[
            gauge("num_running_reqs", (0, 0)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.0)),
            gauge("num_prefill_prealloc_queue_reqs", (0, 18), (300, 1718)),
            gauge("num_prefill_inflight_queue_reqs", (0, 1)),
            rate("realtime_tokens_total", (0, 1.0), noise=0.0, mode="prefill_compute"),
            rate("realtime_tokens_total", (0, 0.0), mode="decode"),
        ],
    ),
    Incident(
        id="SG13",
        source="sgl-project/sglang#5636",
        kind="CPU",
        version="~0.4.5 (2025-04)",
        gpu="n/a",
        configuration="xgrammar with an EBNF grammar",
        signals="60 tok/s without the grammar, 1-3 tok/s with it",
        log="",
        cause="not settled; the grammar is worked through on the CPU between the steps",
        trap="the engine makes progress, slowly; nothing waits and the pool is nearly empty",
        verdicts="host_bound|unknown|healthy",
        strict="host_bound",
        forbidden="kv_pressure|stalled|idle|concurrency_limited",
        page="ticket",
        grade="C",
        window=(360, 590),
        seconds=600,
        labels=OLD,
        args=LAUNCH,
        assumed="one request at a time, so that its latency per token is the reciprocal of its throughput",
        series=[
            gauge("num_running_reqs", (0, 1)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("gen_throughput", (0, 60.0), (300, 60.0), (305, 2.0), noise=0.02),
            rate("inter_token_latency_seconds_sum", (0, 1.0)),
            rate("inter_token_latency_seconds_count", (0, 60.0), (305, 2.0)),
        ],
    ),
    Incident(
        id="SG14",
        source="sgl-project/sglang#30160",
        kind="CAP",
        version="~0.5.13 (2026-07)",
        gpu="NVIDIA H100 80GB",
        configuration=(
            "Qwen3.6-35B-A3B-FP8, TP 1, --max-running-requests 128, --context-length 32768, short outputs, "
            "prefixes cached"
        ),
        signals="limit reduced from 128 to 50 at start; 1956160 KV tokens; requests queue that would be cheap to admit",
        log="max_running_requests was reduced from requested 128 to 50",
        cause="slots for the state of the hybrid model, worst-case lengths and margins leave 50 requests",
        trap="the argument says 128, the server does 50: the start-up log is right, the command line is not",
        verdicts="concurrency_limited|unknown",
        strict="concurrency_limited",
        forbidden="kv_pressure|stalled|idle|compute_bound",
        page="ticket",
        grade="A",
        window=(120, 590),
        seconds=600,
        labels=NEW,
        args=[*LAUNCH, "--max-running-requests", "128", "--context-length", "32768"],
        assumed=(
            "50 running, 20 waiting; usage 0.30, as short requests are far from 32768 tokens; 25 tokens/s a request"
        ),
        lines=[(0, "max_running_requests was reduced from requested 128 to 50")],
        series=[
            gauge("num_running_reqs", (0, 50)),
            gauge("num_queue_reqs", (0, 20)),
            gauge("token_usage", (0, 0.30), noise=0.02),
            gauge("max_total_num_tokens", (0, 1956160)),
            gauge("gen_throughput", (0, 1250.0), noise=0.02),
            rate("realtime_tokens_total", (0, 1250.0), mode="decode"),
            rate("inter_token_latency_seconds_sum", (0, 50.0)),
            rate("inter_token_latency_seconds_count", (0, 1250.0)),
        ],
    ),
    Incident(
        id="SG15",
        source="sgl-project/sglang#3909",
        kind="HEALTHY",
        version="~0.4.3 (2025-02)",
        gpu="n/a",
        configuration="eight long generations",
        signals="run 8, queue 0, usage 0.12 -> 0.13 (62531 -> 65411 tokens in 16 s), 186.99 -> 184.38 tok/s",
        log=(
            "Decode batch. #running-req: 8, #token: 62531, token usage: 0.12, gen throughput (token/s): 186.64,"
            " #queue-req: 0"
        ),
        cause="attention over a growing context; throughput falls slowly, as it must",
        trap="throughput falls for minutes without any fault",
        verdicts="healthy|compute_bound|unknown",
        strict="healthy",
        forbidden="kv_pressure|stalled|concurrency_limited|host_bound|idle",
        page="no",
        grade="A",
        window=(60, 290),
        seconds=300,
        labels=OLD,
        args=LAUNCH,
        assumed="the quoted slopes for five minutes",
        series=[
            gauge("num_running_reqs", (0, 8)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.12), (300, 0.22)),
            gauge("num_used_tokens", (0, 62531), (300, 116500)),
            gauge("gen_throughput", (0, 187.0), (300, 160.0), noise=0.005),
        ],
    ),
    Incident(
        id="SG16",
        source="sgl-project/sglang#13023",
        kind="HEALTHY",
        version="~0.5.5 (2025-11)",
        gpu="NVIDIA L40S",
        configuration="two requests",
        signals="run 2, queue 0, usage 0.04 (7171 -> 7811 tokens in 8 s), 86.14 -> 85.79 tok/s",
        log=(
            "Decode batch, #running-req: 2, #token: 7171, token usage: 0.04, cuda graph: True, "
            "gen throughput (token/s): 86.14, #queue-req: 0,"
        ),
        cause="none: light load",
        trap="",
        verdicts="healthy|unknown",
        strict="healthy",
        forbidden="kv_pressure|stalled|concurrency_limited|host_bound|idle|compute_bound",
        page="no",
        grade="A",
        window=(60, 290),
        seconds=300,
        labels=RANKS,
        args=LAUNCH,
        assumed="the quoted slopes for five minutes",
        series=[
            gauge("num_running_reqs", (0, 2)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.04), (300, 0.17)),
            gauge("num_used_tokens", (0, 7171), (300, 32900)),
            gauge("gen_throughput", (0, 86.1), (300, 85.0), noise=0.002),
            rate("inter_token_latency_seconds_sum", (0, 2.0)),
            rate("inter_token_latency_seconds_count", (0, 86.0)),
        ],
    ),
    Incident(
        id="SG17",
        source="sgl-project/sglang-jax#622",
        kind="KV_PRESSURE",
        version="sglang-jax 2026-01",
        gpu="TPU",
        configuration="short outputs, chunked prefill of 1024 tokens",
        signals=(
            "run 167, queue 88, usage 0.98, then 'Decode out of memory' with 3200 tokens free and 168 wanted; the"
            " process ends"
        ),
        log="Decode out of memory. Try to lower your batch size.",
        cause="the pool is full; why 168 tokens are not found among 3200 is not settled",
        trap="usage never reads 1.00",
        verdicts="kv_pressure",
        strict="kv_pressure",
        forbidden="idle|stalled|host_bound|concurrency_limited|compute_bound|healthy",
        page="yes",
        grade="B",
        window=(120, 295),
        seconds=420,
        labels=RANKS,
        args=["python3", "-m", "sgl_jax.launch_server"],
        assumed="five minutes of the quoted state; written with SGLang's names, as the scheduler is the same",
        dead_from=300,
        lines=[(295, "[2026-01-05 06:12:41] Decode out of memory. Try to lower your batch size.")],
        series=[
            gauge("num_running_reqs", (0, 167), noise=0.01),
            gauge("num_queue_reqs", (0, 88), noise=0.02),
            gauge("token_usage", (0, 0.98)),
        ],
    ),
    Incident(
        id="SG18",
        source="sgl-project/sglang#3424",
        kind="HEALTHY",
        version="~0.4.2 (2025-02)",
        gpu="2 x 8 H100",
        configuration="DeepSeek-R1 on two nodes",
        signals="run 2 -> 1 -> 0, usage 0.01 (3698 -> 3938 tokens in 4 s), 50.4 tok/s, then no request for 52 minutes",
        log=(
            "Decode batch. #running-req: 2, #token: 3698, token usage: 0.01, gen throughput (token/s): 50.46,"
            " #queue-req: 0"
        ),
        cause="none: nobody asks",
        trap="gen_throughput keeps its last value for up to 30 s after the last request",
        verdicts="idle|unknown",
        strict="idle",
        forbidden="kv_pressure|stalled|concurrency_limited|host_bound|compute_bound",
        page="no",
        grade="A",
        window=(240, 890),
        seconds=900,
        labels={},
        args=[*LAUNCH, "--tp", "16", "--nnodes", "2"],
        assumed="two minutes of the quoted load before; throughput reads its last value for 30 s",
        series=[
            gauge("num_running_reqs", (0, 2), (120, 2), (121, 1), (125, 0)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.01), (125, 0.01), (126, 0.0)),
            gauge("gen_throughput", (0, 50.4), (154, 50.4), (155, 0.0)),
        ],
    ),
    Incident(
        id="SG19",
        source="sgl-project/sglang#30047",
        kind="HEALTHY",
        version="~0.5.13 (2026-07)",
        gpu="NPU",
        configuration="hybrid Qwen, speculative decoding",
        signals=(
            "run 68 -> 45 in 3 s, queue 0, full usage 0.49 -> 0.33, mamba usage 0.54 -> 0.36, 2500 -> 2071 tok/s, "
            "accept length 2.99 -> 2.84"
        ),
        log=(
            "Decode batch, #running-req: 68, #full token: 321920, full token usage: 0.49, mamba num: 66, mamba usage:"
            " 0.54, accept len: 2.99, accept rate: 0.66, npu graph: True, gen throughput (token/s): 2499.67,"
            " #queue-req: 0"
        ),
        cause="none: the end of an evaluation",
        trap="token_usage is the larger of two pools, here the one of states, not of tokens",
        verdicts="healthy|unknown|compute_bound",
        strict="healthy",
        forbidden="kv_pressure|stalled|concurrency_limited|host_bound|idle",
        page="no",
        grade="A",
        window=(60, 290),
        seconds=300,
        labels=NEW,
        args=LAUNCH,
        assumed="five minutes at the first quoted state, then the quoted fall",
        series=[
            gauge("num_running_reqs", (0, 68), (290, 68), (295, 45), noise=0.01),
            gauge("num_queue_reqs", (0, 0)),
            gauge("token_usage", (0, 0.54), (290, 0.54), (295, 0.36), noise=0.01),
            gauge("gen_throughput", (0, 2499.7), (290, 2499.7), (295, 2070.7), noise=0.01),
            rate("realtime_tokens_total", (0, 2499.7), mode="decode"),
            rate("inter_token_latency_seconds_sum", (0, 68.0)),
            rate("inter_token_latency_seconds_count", (0, 2499.7)),
        ],
    ),
    Incident(
        id="SG20",
        source="sgl-project/sglang#30393",
        kind="HEALTHY",
        version="~0.5.16 (2026-08)",
        gpu="n/a",
        configuration="decode instance, speculative decoding, hierarchical cache",
        signals="run 3, queue 0, usage 0.43 -> 0.54, pre-allocated 0.22 -> 0.33, transfer queue 1 -> 3, 180-186 tok/s",
        log=(
            "Decode batch, #running-req: 3, #token: 266624, token usage: 0.43, accept len: 1.67, accept rate: 0.13, "
            "pre-allocated usage: 0.22, #prealloc-req: 0, #transfer-req: 1, #retracted-req: 0, cuda graph: True, "
            "gen throughput (token/s): 183.10, #queue-req: 0"
        ),
        cause="none: KV of the next requests is on its way",
        trap="more than half of the used tokens belong to requests that do not run yet",
        verdicts="healthy|unknown",
        strict="healthy",
        forbidden="kv_pressure|stalled|concurrency_limited|host_bound|idle",
        page="no",
        grade="B",
        window=(60, 290),
        seconds=300,
        labels={**NEW, "engine_type": "decode"},
        args=[*LAUNCH, "--disaggregation-mode", "decode"],
        assumed="five minutes, usage and transfer queue to and fro between the quoted values",
        series=[
            gauge("num_running_reqs", (0, 3)),
            gauge("num_queue_reqs", (0, 0)),
            gauge("num_decode_prealloc_queue_reqs", (0, 0)),
            gauge("num_decode_transfer_queue_reqs", (0, 1), (60, 3), (120, 1), (180, 3), (240, 1)),
            gauge("token_usage", (0, 0.43), (60, 0.54), (120, 0.43), (180, 0.54), (240, 0.43)),
            gauge("gen_throughput", (0, 183.1), noise=0.015),
            rate("realtime_tokens_total", (0, 183.1), mode="decode"),
        ],
    ),
]
