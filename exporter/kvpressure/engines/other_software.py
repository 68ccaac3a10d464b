"""Software that is no supported engine but often configured as a target: how its metrics are recognised, and what to
scrape instead.

Names are from the software's documentation or releases; see ``tests/fixtures/engine-pages``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import PageText
from kvpressure.model.reasons import OTHER_SOFTWARE

LOOKED_AT: Final = 256 * 1024  # bytes searched


@frozen
class Software:
    """``title`` with its article; ``instead``: what to scrape; ``note``: what to know before. ``begins``: prefixes of
    series names; ``contains``: texts anywhere.
    """

    title: str
    instead: str
    begins: tuple[bytes, ...] = ()
    contains: tuple[bytes, ...] = ()
    note: str = ""

    @property
    def advice(self) -> str:
        """What to do, as a clause."""
        return f"{self.note}; point at {self.instead}" if self.note else f"point at {self.instead}"

    def wrote(self, lines: bytes) -> bool:
        """Whether metrics are this software's; ``lines`` starts with a line feed."""
        return any(b"\n" + name in lines or b"\n# TYPE " + name in lines for name in self.begins) or any(
            word in lines for word in self.contains
        )


_ENGINES: Final = "vLLM, SGLang or NIM servers"
_UNSUPPORTED: Final = "not supported"
SOFTWARE: Final[Mapping[str, Software]] = {  # the more specific first
    "production_stack_router": Software(
        "the router of vLLM's production stack",
        "the engine pods that its label server names",
        (b"vllm:healthy_pods_total", b"vllm:current_qps"),
    ),
    "vllm_router": Software("vllm-router", "the router's workers", (b"vllm_router_",)),
    "sglang_router": Software("SGLang's router", "the router's workers", (b"smg_", b"sgl_router_")),
    "tensorrt_llm": Software(
        "TensorRT-LLM", _ENGINES, (b"trtllm_", b"nv_trt_llm_"), (b'"iterLatencyMS"', b'"kvCacheStats"'), _UNSUPPORTED
    ),
    "tgi": Software("Hugging Face text-generation-inference", _ENGINES, (b"tgi_",), note=_UNSUPPORTED),
    "llama_cpp": Software("llama.cpp", _ENGINES, (b"llamacpp:",), note=_UNSUPPORTED),
    "lmdeploy": Software("LMDeploy", _ENGINES, (b"lmdeploy:",), note=_UNSUPPORTED),
    "dynamo": Software(
        "an NVIDIA Dynamo component without an engine",
        "the system port of the workers (DYN_SYSTEM_PORT)",
        (b"dynamo_frontend_", b"dynamo_component_", b"dynamo_planner_"),
    ),
    "triton": Software(
        "NVIDIA Triton without an LLM engine", _ENGINES, (b"nv_inference_", b"nv_gpu_"), note=_UNSUPPORTED
    ),
    "litellm": Software("the LiteLLM proxy", "the servers that its label api_base names", (b"litellm_",)),
    "endpoint_picker": Software(
        "the endpoint picker of the Gateway API inference extension (llm-d)",
        "the model server pods",
        (b"inference_pool_", b"inference_extension_", b"inference_model_", b"inference_objective_"),
    ),
    "queue_proxy": Software("the queue proxy of Knative or KServe", "the model server's own port", (b"revision_",)),
    "dcgm_exporter": Software(
        "the DCGM exporter", "the model servers", (b"DCGM_FI_", b"DCGM_EXP_"), note="GPUs are read without it"
    ),
    "node_exporter": Software(
        "the node exporter", "the model servers", (b"node_exporter_", b"node_cpu_seconds", b"node_memory_")
    ),
    "kvpressure": Software("a kvpressure exporter", "the model servers", (b"kvpressure_",)),
    "service_mesh": Software(
        "a service mesh proxy (Envoy or Istio)", "the model server's own port", (b"envoy_", b"istio_")
    ),
    "ray": Software(
        "Ray without an LLM engine on this node", "the Ray pods with GPUs that run the replicas", (b"ray_",)
    ),
}


_BEGINS: Final = re.compile(
    rb"\n(?:# TYPE )?(?:" + b"|".join(re.escape(name) for one in SOFTWARE.values() for name in one.begins) + rb")"
)
_CONTAINS: Final = tuple(word for one in SOFTWARE.values() for word in one.contains)


def name_of_page(text: PageText) -> str | None:
    """Key in ``SOFTWARE`` of the software that wrote metrics without engines; ``None`` = unknown."""
    lines = b"\n" + text[:LOOKED_AT]
    if _BEGINS.search(lines) is None and not any(word in lines for word in _CONTAINS):
        return None
    return next((name for name in OTHER_SOFTWARE if SOFTWARE[name].wrote(lines)), None)
