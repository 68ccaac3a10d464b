"""The syntax of ``--engine.target``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.errors import InputError
from kvpressure.model.pools import EnginePool
from kvpressure.sources.scrape.targets import KEYS, Target, parse_target


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("10.0.0.5", "http://10.0.0.5:8000/metrics"),
        ("vllm-0.vllm.prod.svc", "http://vllm-0.vllm.prod.svc:8000/metrics"),
        ("LocalHost:9000", "http://localhost:9000/metrics"),
        ("localhost:9000/", "http://localhost:9000/metrics"),
        ("localhost/custom", "http://localhost:8000/custom"),
        ("http://router", "http://router:80/metrics"),
        ("https://router", "https://router:443/metrics"),
        ("https://router:8443/v1/metrics", "https://router:8443/v1/metrics"),
        ("http://h:1/metrics?name[]=a&b=c", "http://h:1/metrics?name[]=a&b=c"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
        ("[fd00::5]", "http://[fd00::5]:8000/metrics"),
    ],
)
def test_addresses(text, name):
    target = parse_target(text)
    assert target.name == name
    assert parse_target(target.name) == target  # a name from a recording or a metric works as an option
    assert target.pod == target.address  # stands in, so that two targets never share an identity
    assert (target.namespace, target.container, target.gpus, target.args, target.verify) == ("", "", (), (), True)


def test_everything_at_once():
    target = parse_target(
        "prod/chat-0=http://10.0.0.5:8000; container=vllm ;args=--model 'a; b' --max-num-seqs 64; gpus=GPU-1, GPU-2"
    )
    assert target == Target(
        "10.0.0.5",
        namespace="prod",
        pod="chat-0",
        container="vllm",
        gpus=("GPU-1", "GPU-2"),
        args=("--model", "a; b", "--max-num-seqs", "64"),
        pool=EnginePool("chat"),
    )
    assert parse_target("10.0.0.5;namespace=prod;pod=chat-0") == parse_target("prod/chat-0=10.0.0.5")


def test_the_pool_of_an_engine_named_by_hand_is_what_its_name_and_arguments_tell():
    pools = {
        "prod/chat-d-5d8b7c6f9-q7r8s=h": EnginePool("chat-d"),
        "prod/decode-1=h": EnginePool("decode", "decode", "name"),
        "prod/whisper-encoder-decoder-0=h": EnginePool("whisper-encoder-decoder"),
        "h:81;args=--disaggregation-mode decode": EnginePool("h:81", "decode", "args", pair="h:81"),
    }
    assert {text: parse_target(text).pool for text in pools} == pools


def test_tls_policy_is_explicit(tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    assert parse_target("https://h").verify is True
    assert parse_target("https://h;tls=insecure").verify is False
    assert parse_target(f"https://h;ca={ca}").ca == str(ca)


@pytest.mark.parametrize(
    ("text", "what", "allowed"),
    [
        ("", "host", "HOST"),
        ("http://", "host", "HOST"),
        ("ftp://h", "scheme", "http"),
        ("h:0", "port", "HOST"),
        ("h:x", "address", "HOST"),
        ("a b", "blanks", "HOST"),
        ("h/../etc", "path", ".."),
        ("h/\N{NO-BREAK SPACE}a", "blanks", "HOST"),
        ("h/" + "x" * 600, "path", "512"),
        ("h#frag", "path", "#"),
        ("h\r\nX: y", "control", "HOST"),
        ("h;nonsense", "nonsense", "namespace, pod"),
        ("h;pod=a;pod=b", "pod twice", "once"),
        ("h;pod=a/b", "pod 'a/b'", "name"),
        ("h;namespace=" + "x" * 300, "namespace", "name"),
        ("h;gpus=a,,b", "gpus", "commas"),
        ("https://h;tls=maybe", "tls=maybe", "tls=insecure"),
        ("h;tls=verify", "https", "https"),
        ("https://h;ca=/nowhere/ca.pem", "/nowhere/ca.pem", "file"),
        ("h;args='open", "args", "quotes"),
        ("h;args=--max-num-sqs 64", "--max-num-sqs is not an option of vLLM (did you mean --max-num-seqs?)", "vLLM"),
        ("h;args=--max-num-seqs", "--max-num-seqs has no value", "--max-num-seqs VALUE"),
        ("h;args=--max-num-seqs abc", "the value 'abc' of --max-num-seqs cannot be read", "such as 8192"),
        ("h;args=--gpu-memory-utilization 90;pod=x", "the value '90' of --gpu-memory-utilization", "such as 0.9"),
        ("h;args=--model 'a;model-config=x", "could not split", "quotes"),
        ("h;args=--max-num-seqs 4;args=--max-num-seqs 8", "args twice", "once"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, what, allowed):
    with pytest.raises(InputError) as caught:
        parse_target(text)
    assert what in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_that_a_release_may_have_are_taken():
    seqs = ("--max-num-seqs $SEQS", "--max-num-seqs=64", "python -m sglang.launch_server --max-running-requests 64")
    lengths = ("--max-model-len auto --max-num-batched-tokens 8k", "--max-model-len -1")
    for args in (*seqs, *lengths, "--an-option-of-a-later-release 3", "--no-enable-prefix-caching --enforce-eager"):
        assert " ".join(parse_target(f"h;args={args}").args) == args


def test_no_target_can_be_made_that_would_break_a_request():
    hosts = [{"host": host} for host in ("h\r\nX: y", "", "h/x")]
    paths = [{"path": path} for path in ("/a b", "/\r\n", "metrics")]
    for fields in (*hosts, *paths, {"port": 0}, {"port": 70_000}, {"scheme": "file"}):
        with pytest.raises(InputError):
            Target(**{"host": "h", **fields})


@pytest.mark.parametrize("user", ["user:secret", "secret", "us%3Asecret", "user:sec ret;secret", "user:/secret#"])
@pytest.mark.parametrize(
    "before", ["http://", "", " http://", "http:/", "http:///", "//", "a/b=http://", "A/B=http://", "http://g:1/;"]
)
def test_credentials_are_refused_and_not_repeated(before, user):
    for after in ("h", "h:x", "h;bogus", "h:1/..;pod=a b"):
        with pytest.raises(InputError) as caught:
            parse_target(f"{before}{user}@{after}")
        assert "credentials" in str(caught.value)
        assert "secret" not in str(caught.value)


PARTS = [*["http://", "https://", "h", ":", "/", "=", ";", "[", "]", "::1", "@", "?", "#", "a/b=", "'"], " ", *KEYS]


@given(st.text() | st.lists(st.sampled_from(PARTS)).map("".join))
def test_any_text_is_a_target_or_one_clear_error(text):
    try:
        target = parse_target(text)
    except InputError:
        return
    assert parse_target(target.name).name == target.name
    assert target.pod
    assert target.path.isascii()
