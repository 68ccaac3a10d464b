"""Arguments of vLLM from command lines, scripts and logged lines; defaults by version and GPU."""

from __future__ import annotations

import shlex
import time
import tracemalloc
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.engines.command import CUT, Command, bounded
from kvpressure.engines.vllm.arguments import from_log
from kvpressure.engines.vllm.command_line import read
from kvpressure.engines.vllm.limits import default_limits, limits_in_force
from kvpressure.model.arguments import GIB, human_int
from tests.engines.vllm.crafted import OPENINGS, UNITS, repeated, superlinear, within

H100 = ("NVIDIA H100 80GB HBM3", 79.6 * GIB)
A100 = ("NVIDIA A100-SXM4-80GB", 79.3 * GIB)
L40S = ("NVIDIA L40S", 44.4 * GIB)
B200 = ("NVIDIA B200", 178.4 * GIB)
GB10 = ("NVIDIA GB10", 119.7 * GIB)


def test_integers_as_vllm_reads_them() -> None:
    read = {"8192": 8192, "8k": 8000, "8K": 8192, "25.6k": 25600, "1m": 10**6, "1M": 2**20, "2g": 2 * 10**9, "0": 0}
    read |= {"2G": 2 * 2**30, "1t": 10**12, "1T": 2**40, " 16 ": 16}
    assert {text: human_int(text) for text in read} == read
    for text in ("1.5K", "1.5", "-1", "auto", "", "8kb", "k", None, "9" * 40, "1e3"):
        assert human_int(text) is None


SAME = {"model": "org/m", "max_num_seqs": "64", "gpu_memory_utilization": "0.9"}
LIMITS = "--max-num-seqs 64 --gpu-memory-utilization 0.9"
WAYS = [
    f"vllm serve org/m {LIMITS}",
    "vllm serve org/m --max-num-seqs=64 --gpu-memory-utilization=0.9",
    "vllm serve org/m --max_num_seqs 64 --gpu_memory_utilization=0.9",
    f"vllm serve {LIMITS} --model org/m",
    f"vllm serve org/m --max-num-seqs 8 {LIMITS}",
    f"python3 -m vllm.entrypoints.openai.api_server --model org/m {LIMITS}",
    f"--model org/m {LIMITS}",
    f"org/m {LIMITS}",
    f"serve org/m {LIMITS}",
    f"numactl -N0 /opt/venv/bin/vllm serve org/m {LIMITS}",
    f"/bin/sh -c 'vllm serve org/m {LIMITS}'",
    f"bash -lc 'set -e; export A=1\npip install x && exec vllm serve org/m \\\n  {LIMITS} 2>&1 | tee log'",
    f"/usr/bin/tini -- sh -c 'exec vllm serve \"$@\"' -- org/m {LIMITS}",
    f"bash -c -- 'vllm serve org/m {LIMITS}'",
    f"bash -c -x -o pipefail -- 'vllm serve org/m {LIMITS}'",
    f"bash -lc -- 'exec vllm serve \"$@\"' x org/m {LIMITS}",
    f'sh -c \'A=1\nif true; then eval "vllm serve \\\n  org/m --served-model-name "name" {LIMITS}"; fi\'',
    "sh -c '# start\nSEQS=64\nexec python3 -m vllm.entrypoints.openai.api_server --model org/m --max-num-seqs $SEQS "
    '--gpu-memory-utilization "${UTIL:-0.9}"\'',
]


@pytest.mark.parametrize("command", WAYS)
def test_every_way_to_write_the_same_command(command: str) -> None:
    found = read(shlex.split(command)).args
    assert {name: found.values.get(name) for name in SAME} == SAME
    assert found.explicit >= SAME.keys()
    assert (found.max_num_seqs, found.gpu_memory_utilization, found.model) == (64, 0.9, "org/m")
    assert found.complete
    assert found.is_explicit("max_num_seqs") is True
    assert found.is_explicit("max_num_batched_tokens") is False


def test_kubernetes_variables_come_from_the_environment() -> None:
    found = read(
        ["vllm", "serve", "$(MODEL)", "--max-num-seqs=$(SEQS)", "--port", "$$(PORT)", "--seed", "$(GONE)"],
        {"MODEL": "org/m", "SEQS": "32", "VLLM_USE_V1": "0", "HF_TOKEN": "secret"},
    ).args
    assert found.model == "org/m"
    assert found.max_num_seqs == 32
    assert found.values["port"] == "$(PORT)"
    assert found.values["seed"] == "$(GONE)"
    assert found.env == {"VLLM_USE_V1": "0"}


def test_what_a_hidden_variable_brings_is_not_guessed() -> None:
    found = read(["sh", "-c", "vllm serve $MODEL --max-num-seqs $SEQS --tensor-parallel-size $(nproc)"]).args
    assert found.values == {"model": None, "max_num_seqs": None, "tensor_parallel_size": None}
    assert found.is_explicit("max_num_seqs") is True
    assert found.max_num_seqs is None
    hidden = read(["sh", "-c", "vllm serve org/m $EXTRA_ARGS"]).args
    assert hidden.is_explicit("max_num_seqs") is None


@pytest.mark.parametrize(
    "script",
    [
        'ARGS=(--port 5 $(cat more)); vllm serve org/m "${ARGS[@]}"',
        '[ -n "$X" ] && ARGS=(--max-num-seqs 5); vllm serve org/m "${ARGS[@]}"',
        "vllm serve org/m ${ARGS[*]}",
        "vllm serve org/m $A$B",
        'vllm serve "${ARGS[@]}" --port 1',
        "vllm serve $ARGS",
        "vllm serve org/m ${X:+--max-num-seqs 5}",
        "vllm serve org/m ${X%%y}",
        "vllm serve org/m --port 1 pre$X",
        "vllm serve org/m --$NAME 5",
        "vllm serve org/m $1 $2",
        "vllm serve org/m $(cat $(ls x))",
        "vllm serve org/m $(",
        "vllm serve org/m ${X",
        'eval "vllm serve org/m --port 1 $X $@"',
    ],
)
def test_what_may_bring_options_leaves_open_what_was_set(script: str) -> None:
    found = read(["bash", "-c", script]).args
    assert found.is_explicit("max_num_seqs") is None
    assert found.max_num_seqs is None


def test_a_reference_that_kubernetes_could_not_resolve_brings_no_option_where_a_value_stands() -> None:
    found = read(["vllm", "serve", "$(MODEL)", "--api-key", "$(KEY)", "--served-model-name", "a", "b"]).args
    assert found.is_explicit("max_num_seqs") is False


def test_an_unseen_command_line_leaves_open_what_was_set() -> None:
    lines = ("", "/entrypoint.sh", "/start.sh --max-num-seqs 4", "ray start --head")
    for line in (*lines, "vllm serve m --config /etc/vllm.yaml", "vllm serve org/m $(EXTRA)"):
        assert read(line.split()).args.is_explicit("max_num_batched_tokens") is None, line


def test_short_names_lists_and_json() -> None:
    found = read(
        shlex.split(
            "vllm serve m -tp 4 -dp=2 --served-model-name a b --compilation-config '{\"level\": 3}' "
            "--compilation-config.mode 3 --kv-cache-dtype fp8 --max-model-len 8K --kv-cache-memory-bytes 2G "
            "--block-size 16 --num-gpu-blocks-override 100 --watermark 0.1 --port 8001"
        )
    ).args
    assert (found.tensor_parallel_size, found.data_parallel_size, found.served_model_name) == (4, 2, "a")
    assert found.values["compilation_config"] == '{"level": 3}'
    assert (found.kv_cache_dtype, found.max_model_len, found.kv_cache_memory_bytes) == ("fp8", 8192, 2**31)
    assert (found.block_size, found.integer("num_gpu_blocks_override")) == (16, 100)
    assert (found.watermark, found.port, found.pipeline_parallel_size) == (0.1, 8001, None)


def test_bad_values_are_not_known_yet_explicit() -> None:
    bad = {"max_num_seqs": "many", "gpu_memory_utilization": "1.5", "max_model_len": "auto", "port": "70000"}
    for attribute, value in (*bad.items(), ("max_num_seqs", "0"), ("watermark", "inf")):
        found = read(["vllm", "serve", "m", f"--{attribute}", value]).args
        assert (getattr(found, attribute), found.is_explicit(attribute)) == (None, True), attribute


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "$(A)" * 10_000],
        ["sh", "-c", "vllm serve " + "$A" * 30_000],
        ["sh", "-c", "vllm serve ${B}"],
        ["sh", "-c", "vllm serve " + "$@" * 30_000, "--", "x" * 100_000],
        ["sh", "-c", "`" * 60_000],
        ["sh", "-c", "$(" * 30_000],
        ["sh", "-c", "$((" * 20_000],
        ["sh", "-c", "$((" + "(a)" * 20_000],
        ["sh", "-c", "${" * 30_000],
        ["sh", "-c", "${A[" * 16_000],
        ["sh", "-c", "${A[@]" * 10_000],
        ["sh", "-c", "vllm serve 'x " + "a" * 60_000],
        ["sh", "-c", "A=$A;" * 12_000],
        ["sh", "-c", "\\\n" * 30_000],
        ["sh", "-c", "eval eval 'eval';" * 4_000],
        ["sh", "-c", "eval 'vllm " + "a " * 30_000 + "'"],
        ["--a" + "-a" * 30_000] * 20,
    ],
)
def test_hostile_command_lines_cost_little(argv: list[str]) -> None:
    tracemalloc.start()
    began = time.process_time()
    read(argv, {"A": "y" * 1_000_000, "B": "$B$B$B$B " * 1000})
    assert time.process_time() - began < 2.0
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()


def read_script(text: str) -> Command:
    return read(["sh", "-c", text], {"a": "b c"})


@pytest.mark.slow
@pytest.mark.attack("1 MB of arguments; 20 KB of every sign of a shell", "cut first, then linear")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(UNITS), min_size=1, max_size=6).map("".join), st.sampled_from(OPENINGS))
def test_no_mixture_of_a_shells_signs_costs_more_than_it_is_long(unit: str, opening: str) -> None:
    grown = superlinear(read_script, partial(repeated, opening, unit), 4000)
    assert grown is None, (opening, unit, grown)


@pytest.mark.parametrize(
    "words",
    [["sh"] + ["-c"] * 5000, ["env"] * 5000, ["--a"] * 5000, ["$(A)"] * 5000, ["vllm", "serv"] * 3000, ["A=1"] * 5000],
    ids=lambda words: words[-1],
)
def test_many_words_cost_little(words: list[str]) -> None:
    for action in (
        lambda: read(words, {"A": "y" * 100_000}).args,
        lambda: read(words).starts_server,
        lambda: read(words),
    ):
        assert within(0.05, action)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('X=${X:-"a b"}\nvllm serve m --port 1', {"model": "m", "port": "1"}),
        ('export X="${X:-"RoCE v2"}"; exec vllm serve m --port ${PORT:-"81"}', {"model": "m", "port": "81"}),
        (
            'X=${X:-${Y:-"a } b"}} && vllm serve m --served-model-name "$X"',
            {"model": "m", "served_model_name": "a } b"},
        ),
        (
            "A='x;y'; vllm serve m --served-model-name \"$A\" # it's the name\n",
            {"model": "m", "served_model_name": "x;y"},
        ),
        ('echo "it\'s"; vllm serve m --port 1 > >(tee log) 2>&1 &\nwait', {"model": "m", "port": "1"}),
        ("P=1; P+=2; (vllm serve m --port $P)", {"model": "m", "port": "12"}),
        ("A='--port 1 --seed 2'\nvllm serve m $A", {"model": "m", "port": "1", "seed": "2"}),
        ("vllm serve m --port $( (echo 1) ) --seed $((1 + (2)))", {"model": "m", "port": None, "seed": None}),
        ("if a; then P=1; else P=2; fi\nvllm serve m --port $P", {"model": "m", "port": None}),
        ('[ -n "$X" ] && P=1\nvllm serve m --port $P', {"model": "m", "port": None}),
        ("cat > run.sh <<'EOF'\nset -e\nvllm serve m --port 1\nEOF\nbash run.sh", {"model": "m", "port": "1"}),
        ("exec bash -c 'vllm serve \"$0\" --port 1' m", {"model": None, "port": "1"}),
        ("vllm serve m --url http://h/#a --port 1", {"model": "m", "url": "http://h/#a", "port": "1"}),
        ("case $0x in a) P=2;; b|*) P=1;; esac; vllm serve m --port $P", {"model": "m", "port": None}),
        (
            'A=(--port 1 # first\n --seed \'2 3\')\nA+=(--host "4")\nvllm serve m "${A[@]:-}"',
            {"model": "m", "port": "1", "seed": "2 3", "host": "4"},
        ),
        ('A=(); vllm serve "${A[@]}" m --port 1', "1"),
        ('CMD=(vllm serve m)\nCMD+=(--port 1)\nexec "${CMD[@]}"', "1"),
        ("P=1; case b in serve) P=2;; b|c) P=1;; *) P=1 ;; esac; vllm serve m --port $P", {"model": "m", "port": None}),
        ("P=1; echo x | P=2; P=3 & P=4 ./x; bash -c P=5\nP=$P bash -c 'vllm serve m --port $P'", "1"),
        ("P=1; case b in a|b) P=2;; esac; f() { P=3; vllm serve m --port $P; }; f", {"model": "m", "port": "3"}),
        ("small() { P=1; }; big() { P=2; }; small; vllm serve m --port $P", {"model": "m", "port": None}),
        ("go() { P=2; }; function no { P=3; }; P=1; go; vllm serve m --port $P", {"model": "m", "port": None}),
        ("P=1; M=b; ((P++)); [[ $M == *b ]] || M=a; vllm serve $M --port $P", {"model": None, "port": None}),
        ('set -- --port 2 "$@"; eval set -- \'serve m --port 1\'; vllm "$@"', "1"),
        (": ${P:=2}; vllm serve m --port ${P:-1}", {"model": "m", "port": None}),
        ("R=2; if [ $R -gt 3 ]; then P=3; elif [ $R -ge 2 ]; then P=1; else P=2; fi; vllm serve m --port $P", "1"),
        ("[ a = b ] && exec vllm serve n --port 2 || exec vllm serve m --port 1", "1"),
        ("false && { A=1; vllm serve n; } || { vllm serve m --port 1; }", "1"),
        ("if ! [ a = b ]; then if true; then exec vllm serve m --port 1; fi; fi; vllm serve n --port 2", "1"),
        ("cd /x && P=1 && vllm serve m --port $P || exit 1", "1"),
        ("until false; do vllm serve m --port 1; sleep 1; done", "1"),
        ("if grep -q x y; then vllm serve m --port 1; else vllm serve n --port 1; fi", {"model": None, "port": "1"}),
    ],
)
def test_what_a_shell_would_start(script: str, expected: dict[str, str | None] | str) -> None:
    if isinstance(expected, str):
        expected = {"model": "m", "port": expected}
    assert read(["bash", "-c", script]).starts_server
    assert read(["bash", "-c", script]).args.values == expected


def test_what_is_certain_of_a_script() -> None:
    scripts = {  # whether it certainly starts a server, and how many others
        "vllm serve m": (True, 0),
        "pip install x && vllm serve m": (True, 0),
        "[ -n $X ] && vllm serve m": (False, 0),
        "test -e x || vllm serve m": (False, 0),
        "launch 'vllm serve m'": (False, 0),
        "ray symmetric-run --address x:1 -- vllm serve m": (False, 0),
        "vllm serve m & vllm serve n --port 2 & wait": (True, 1),
        "exec vllm serve m; vllm serve n": (True, 0),
        "(exec vllm serve m) & (exec vllm serve n)": (True, 1),
    }
    for script, expected in scripts.items():
        found = read(["bash", "-c", script])
        assert (found.starts_server, found.certain, len(found.others)) == (True, *expected), script


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-c", "vllm serve 'm"],
        ["bash", "-c", "python3 - <<EOF\nprint('it''s')\nx = \"\nEOF\nvllm serve m --port 1"],
        ["bash", "-c", "echo 'a\nvllm  serve m"],
        ["bash", "-c", 'run() { echo "; }\nvllm serve m'],
        ["python3", "-c", "os.system('vllm serve m')"],
        ["bash", "-c", "# " + "x" * 40_000 + "\nvllm serve m"],
        ["bash", "-c", "a; " * 9000 + "vllm serve m"],
        ["bash", "-c", "launch --run 'python -m vllm.entrypoints.openai.api_server'"],
        ["bash", "-c", "$(echo vllm serve m)"],
        ["bash", "-c", 'start() { vllm serve m "$@"; }; start --max-num-seqs 8'],
    ],
)
def test_a_server_named_in_what_is_not_understood_is_one(argv: list[str]) -> None:
    assert read(argv).starts_server
    assert read(argv).args.is_explicit("max_num_seqs") is None


def test_a_server_that_is_only_spoken_of_is_not_certain() -> None:
    spoken = ("until pgrep -f 'vllm serve'; do sleep 1; done", "echo 'vllm serve m'", "sleep 1 # vllm serve m")
    for script in (*spoken, "my-vllm-serve x", "xvllm serve m"):
        assert not read(["sh", "-c", script]).certain, script


@settings(max_examples=25)
@given(
    st.lists(st.text(max_size=40) | st.sampled_from([*UNITS, "x " * 20_000, "y" * 40_000]), max_size=8),
    st.integers(0, 40_000),
)
def test_what_is_cut_is_cut_once(argv: list[str], characters: int) -> None:
    once = bounded(argv, characters)
    assert bounded(once) == once
    assert sum(map(len, once)) <= characters + len(CUT)
    assert once == argv or any(CUT in word for word in once)


def test_logged_arguments() -> None:
    line = (
        "(APIServer pid=2709) INFO 11-21 05:37:48 [api_utils.py:273] non-default args: {'model_tag': './small', 'port':"
        " 18007, 'max_model_len': 2048, 'served_model_name': ['tiny', 'b'], 'gpu_memory_utilization': 0.85,"
        " 'kv_transfer_config': KVTransferConfig(kv_connector='X', extra={'max_num_seqs': 1}), 'max_num_seqs': 64,"
        " 'chat_template': 'it\\'s, {odd', 'seed': None}"
    )
    found = from_log(line)
    assert (found.max_num_seqs, found.max_model_len, found.gpu_memory_utilization) == (64, 2048, 0.85)
    assert (found.model, found.served_model_name) == ("./small", "tiny")
    assert found.is_explicit("max_num_batched_tokens") is False
    assert "seed" in found.explicit
    assert from_log("non-default args missing") is None


def test_the_older_logged_form_prints_defaults_and_proves_nothing_explicit() -> None:
    found = from_log("args: Namespace(model='m', max_num_seqs=256, max_model_len=None, lora_modules=None)")
    assert found.max_num_seqs == 256
    assert found.max_model_len is None
    assert found.is_explicit("max_num_seqs") is None


def test_logged_arguments_win_over_the_command_line() -> None:
    logged = from_log("non-default args: {'max_num_seqs': 16, 'gpu_memory_utilization': 0.8}")
    assert logged is not None
    both = read(["vllm", "serve", "m", "--config", "f.yaml", "--max-num-seqs", "64"]).args.merged(logged)
    assert (both.max_num_seqs, both.gpu_memory_utilization, both.model) == (16, 0.8, "m")
    assert both.is_explicit("max_num_batched_tokens") is False


def test_defaults_by_version_and_gpu() -> None:
    defaults = {  # max_num_batched_tokens, max_num_seqs
        ("0.33.0", H100): (8192, 1024),
        ("0.33.0", A100): (2048, 256),
        ("0.33.0", L40S): (2048, 256),
        ("0.33.0", B200): (16384, 1024),
        ("0.29.0", B200): (16384, 1024),
        ("0.28.0", B200): (None, 1024),
        ("0.33.0", GB10): (2048, 256),
        ("0.32.0", GB10): (8192, 1024),
        ("0.8.5", A100): (8192, 1024),
        ("0.9.0", A100): (None, None),
        ("0.9.1", A100): (2048, 256),
        ("0.8.2", H100): (None, None),
        ("0.7.3", H100): (None, 256),
        ("0.33.0", ("cpu", None)): (2048, 128),
        ("0.27.0", ("cpu", None)): (None, None),
        ("0.33.0", (None, 70 * GIB)): (8192, 1024),
        ("0.33.0", (None, 70 * GIB - 1)): (2048, 256),
        ("0.33.0", (None, 160 * GIB)): (16384, 1024),
        ("0.33.0", (None, 160 * GIB - 1)): (8192, 1024),
    }
    found = {(version, gpu): default_limits(version, *gpu) for version, gpu in defaults}
    names = ("max_num_batched_tokens", "max_num_seqs")
    assert {key: tuple(map(limits.get, names)) for key, limits in found.items()} == defaults


def test_v1_as_an_option_of_old_versions_and_v0_as_one_of_newer() -> None:
    assert default_limits("0.7.3", *H100, flavour="v1")["max_num_batched_tokens"] == 8192
    share = {"gpu_memory_utilization": 0.9}
    assert default_limits("0.7.3", *L40S, flavour="v1") == share | {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 1024,
    }
    assert default_limits("0.9.2", *H100, flavour="v0") == share | {"max_num_seqs": 256}


def test_default_utilization() -> None:
    shares = {"0.19.1": 0.9, "0.20.0": 0.92, "v0.33.0+cpu": 0.92, "0.4.3": None, "main": None, None: None}
    assert {version: default_limits(version, *H100).get("gpu_memory_utilization") for version in shares} == shares


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}),
        (["--max-num-seqs", "16"], {"max_num_seqs": 16, "max_num_batched_tokens": 8192}),
        (["--max-num-seqs", "2", "--max-model-len", "1K"], {"max_num_seqs": 2, "max_num_batched_tokens": 2048}),
        (["--max-num-batched-tokens", "512"], {"max_num_seqs": 512, "max_num_batched_tokens": 512}),
        (["--performance-mode", "throughput"], {"max_num_seqs": 2048, "max_num_batched_tokens": 16384}),
        (
            ["--no-enable-chunked-prefill", "--max-model-len", "32768"],
            {"max_num_seqs": 1024, "max_num_batched_tokens": 32768},
        ),
        (["--max-num-seqs", "$(HIDDEN)"], {"max_num_batched_tokens": 8192}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5, "max_num_seqs": 1024}),
    ],
)
def test_limits_in_force(argv: list[str], expected: dict[str, float]) -> None:
    limits = limits_in_force(read(["vllm", "serve", "m", *argv]).args, default_limits("0.33.0", *H100))
    assert {name: limits[name] for name in expected} == expected
    assert ("max_num_seqs" in limits) == ("$(HIDDEN)" not in argv)


def test_context_limit_known_from_elsewhere_bounds_the_budget() -> None:
    limits = limits_in_force(
        read(["vllm", "serve", "m", "--max-num-seqs", "4"]).args, default_limits("0.33.0", *H100), 1024
    )
    assert limits["max_num_batched_tokens"] == 4096
    assert limits["max_model_len"] == 1024


def test_another_server_gives_no_model_and_nothing_complete() -> None:
    """Its limits would be called vLLM's defaults."""
    found = read(["tritonserver", "--model-repository=/m"]).args
    assert "model" not in found.values
    assert not found.complete
