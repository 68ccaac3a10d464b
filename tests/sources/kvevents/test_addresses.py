"""Where KV events are published, by a target's option or an engine's arguments."""

from __future__ import annotations

import pytest

from kvpressure.engines.registry import default
from kvpressure.errors import InputError
from kvpressure.sources.kvevents.addresses import EventsEndpoint, endpoint_of
from kvpressure.sources.scrape.targets import parse_target

ON = '"enable_kv_cache_events": true'


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        (["--kv-events-config", f"{{{ON}}}"], EventsEndpoint(("", 5557))),
        (
            ["--kv-events-config", f'{{{ON}, "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100"}}'],
            EventsEndpoint(("", 6000), ("", 6100)),
        ),
        (
            ["--kv-events-config.enable_kv_cache_events", "True", "--kv-events-config.endpoint=tcp://0.0.0.0:6000"],
            EventsEndpoint(("", 6000)),
        ),
        (["--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://[::]:6000"}'], EventsEndpoint(("", 6000))),
        (["--kv-events-config", f'{{{ON}, "replay_endpoint": "tcp://10.0.0.9:1"}}'], EventsEndpoint(("", 5557))),
        (["--kv-events-config", "{}"], None),
        (["--kv-events-config", f'{{{ON}, "publisher": "null"}}'], None),
        (["--kv-events-config", '{"enable_kv_cache_events": false, "publisher": "zmq"}'], None),
        (["--kv-events-config", f'{{{ON}, "endpoint": "tcp://router:5557"}}'], None),  # it connects outwards
        (["--kv-events-config", f'{{{ON}, "endpoint": "ipc:///tmp/events"}}'], None),
        (["--kv-events-config", f'{{{ON}, "endpoint": "tcp://*:0"}}'], None),
        (["--kv-events-config", "[" * 5000], None),
        (["--kv-events-config", '{"publisher": ["zmq"], "endpoint": 5}'], None),
        ([], None),
    ],
)
def test_the_arguments_of_an_engine_name_its_endpoint(words, endpoint):
    assert endpoint_of(default().read_command(["vllm", "serve", "m", *words]).args) == endpoint


def test_a_target_names_its_endpoint_before_its_arguments_do():
    target = 'http://h:1;kv-events=tcp://h:5557,tcp://10.0.0.9:5600;args=--kv-events-config \'{"publisher": "zmq"}\''
    assert parse_target(target).kv_events == EventsEndpoint(("h", 5557), ("10.0.0.9", 5600))
    assert parse_target(target.replace("kv-events=tcp://h:5557,tcp://10.0.0.9:5600;", "")).kv_events is not None
    for wrong in ("h:5557", "tcp://h", "tcp://h:0", "tcp://h:99999", "tcp://h:1,", "tcp://h:1,udp://h:2", ""):
        with pytest.raises(InputError, match=r"kv-events.*; allowed: tcp://HOST:PORT"):
            parse_target(f"http://h:1;kv-events={wrong}")


def test_each_data_parallel_rank_has_its_own_ports():
    endpoint = EventsEndpoint(("", 5557), ("", 5600))
    assert endpoint.of_rank(3, "10.0.0.5") == (("10.0.0.5", 5560), ("10.0.0.5", 5603))
    assert EventsEndpoint(("h", 5557)).of_rank(0, "10.0.0.5") == (("h", 5557), None)
    assert endpoint.of_rank(60_000, "h") is None
