"""vLLM in Kubernetes: its images, and the arguments of their entry points."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from kvpressure.engines.command import Host, dynamo, host_at, port_number
from kvpressure.engines.vllm.command_line import OF_VLLM
from kvpressure.model.arguments import EngineArgs

_NOT_SERVERS: Final = ("router", "operator", "dashboard", "client", "bench")
_HOST_IMAGES: Final = ("huggingfaceserver", "ray-llm")
_NIM: Final = re.compile(r"(?:^|/)nim/")
_NO_TEXT: Final = re.compile(
    r"embed|rerank|retriev|ocr|riva|parakeet|canary|whisper|tts|flux|diffusion|clip|paddle"
    r"|audio2face|eye-contact|cosmos-(?:predict|transfer)|alphafold|openfold|boltz|msa-search"
    r"|esmfold|evo2|molmim|genmol|diffdock|proteinmpnn"
)
"""Words in the names of NVIDIA NIMs that serve no language model: embedding, reranking, extraction (NeMo Retriever),
speech (Riva), pictures and video (Cosmos), faces (Maxine, ACE), and biology (BioNeMo), by NVIDIA's documentation
(docs.nvidia.com/nim); the last line and ``cosmos-transfer`` are from general knowledge. Cosmos Reason and guard
models are language models (docs.nvidia.com/nim/llama-3-1-nemotron-safety-guard-8b/observability has the usual
metrics).
"""
RAY_AGENT: Final = "ray-llm"
"""Ray's image for Ray Serve LLM: every pod with a GPU runs engines, whose metrics Ray's agent publishes."""


def of_image(image: str) -> bool:
    """Whether an image serves vLLM; routers and operators are named after vLLM too, and a path may contain anything."""
    if is_nim(image):
        return True
    name, _, tag = image.rpartition("/")[2].partition(":")
    if name in _HOST_IMAGES:
        return True
    if name == "tritonserver":
        return "vllm" in tag
    return "vllm" in name and not any(word in name for word in _NOT_SERVERS)


def is_nim(image: str) -> bool:
    """Whether an image is an NVIDIA NIM for a language model, which publishes vLLM's gauges whatever runs inside."""
    return _NIM.search(image) is not None and not _NO_TEXT.search(image.rpartition("/")[2])


def host(image: str, argv: Sequence[str], env: Mapping[str, str], args: EngineArgs) -> Host | None:
    """The program around vLLM that publishes its metrics on its own port or path; None = vLLM itself does."""
    if is_nim(image):
        return host_at("NVIDIA NIM", port_number(env.get("NIM_SERVER_PORT", "")), 8000, path="/v1/metrics")
    name = image.rpartition("/")[2].partition(":")[0]
    if name == "huggingfaceserver" or _names(argv, "huggingfaceserver"):
        return host_at("KServe Hugging Face server", args.integer("http_port"), 8080)
    if _names(argv, "/vllm/inference_api.py"):
        return Host("KAITO", 5000)
    if (worker := dynamo(argv, env)) is not None:
        return worker
    if name == "tritonserver":
        off = args.values.get("allow_metrics") in ("False", "false", "0")
        return Host("Triton", None) if off else host_at("Triton", args.integer("metrics_port"), 8002)
    return Host("Ray Serve", 8080, every_pod=True) if name == RAY_AGENT else None


def _names(argv: Sequence[str], text: str) -> bool:
    return any(text in word for word in argv)


def takes_words(argv: Sequence[str], args: EngineArgs) -> bool:
    """Whether words for the entry point of vLLM's image are arguments of vLLM; any single word
    may look like a model.
    """
    if not argv:
        return False
    named = OF_VLLM if argv[0].startswith("-") else OF_VLLM - {"model"}
    return bool(named & args.explicit)
