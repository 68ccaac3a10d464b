#!/opt/kvpressure/bin/python
"""What the image of the tests calls ``vllm``: ``vllm serve MODEL ...`` serves a simulated page and writes its log.

It runs inside the image, with the exporter's package alone. A file ``/tmp/fill`` makes it take memory until the kernel
ends it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from lab.demo.node import SimulatedNode
from lab.demo.scenario import CHAT_LOAD, PODS
from lab.demo.server import PodServer


def main(words: list[str]) -> None:
    """Serve until the end of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--requests-per-second", type=float, default=CHAT_LOAD.requests_per_second)
    args, _ = parser.parse_known_args(words)
    engine = replace(PODS[0].engine, served_name=args.model, max_num_seqs=args.max_num_seqs)
    load = replace(CHAT_LOAD, requests_per_second=args.requests_per_second)
    pod = replace(PODS[0], engine=replace(engine, max_model_len=args.max_model_len), load=load)
    node = SimulatedNode((pod,), time.time)
    PodServer(node, pod.name, ("0.0.0.0", args.port)).start()
    taken = []
    while True:
        for line in node.logs():
            print(line.line, flush=True)
        if Path("/tmp/fill").exists():
            taken.append(b"x" * (8 << 20))
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
