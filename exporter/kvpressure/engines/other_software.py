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
    """``title`` with its article; ``advice``: what to do instead. ``begins``: prefixes of series names; ``contains``:
    texts anywhere.
    """

    title: str
    advice: str
    begins: tuple[bytes, ...] = ()
    contains: tuple[bytes, ...] = ()

    def wrote(self, lines: bytes) -> bool:
        """Whether metrics are this software's; ``lines`` starts with a line feed."""
        return any(b"\n" + name in lines or b"\n# TYPE " + name in lines for name in self.begins) or any(
            word in lines for word in self.contains
        )


_UNSUPPORTED: Final = "not supported; point at vLLM, SGLang or NIM servers"
SOFTWARE: Final[Mapping[str, Software]] = {  # the more specific first
    "production_stack_router": Software(
        "the router of vLLM's production stack",
        "point at the engine pods that its label server names",
        (b"vllm:healthy_pods_total", b"vllm:current_qps"),
    ),
    "vllm_router": Software("vllm-router", "point at its workers", (b"vllm_router_",)),
    "sglang_router": Software("SGLang's router", "point at its workers", (b"smg_", b"sgl_router_")),
    "tensorrt_llm": Software(
        "TensorRT-LLM", _UNSUPPORTED, (b"trtllm_", b"nv_trt_llm_"), (b'"iterLatencyMS"', b'"kvCacheStats"')
    ),
    "tgi": Software("Hugging Face text-generation-inference", _UNSUPPORTED, (b"tgi_",)),
    "llama_cpp": Software("llama.cpp", _UNSUPPORTED, (b"llamacpp:",)),
    "lmdeploy": Software("LMDeploy", _UNSUPPORTED, (b"lmdeploy:",)),
    "dynamo": Software(
        "an NVIDIA Dynamo component without an engine",
        "point at the system port of the workers (DYN_SYSTEM_PORT)",
        (b"dynamo_frontend_", b"dynamo_component_", b"dynamo_planner_"),
    ),
    "triton": Software("NVIDIA Triton without an LLM engine", _UNSUPPORTED, (b"nv_inference_", b"nv_gpu_")),
    "litellm": Software("the LiteLLM proxy", "point at the servers that its label api_base names", (b"litellm_",)),
    "endpoint_picker": Software(
        "the endpoint picker of the Gateway API inference extension (llm-d)",
        "point at the model server pods",
        (b"inference_pool_", b"inference_extension_", b"inference_model_", b"inference_objective_"),
    ),
    "queue_proxy": Software(
        "the queue proxy of Knative or KServe", "point at the model server's own port", (b"revision_",)
    ),
    "dcgm_exporter": Software(
        "the DCGM exporter", "point at the model servers; GPUs are read without it", (b"DCGM_FI_", b"DCGM_EXP_")
    ),
    "node_exporter": Software(
        "the node exporter", "point at the model servers", (b"node_exporter_", b"node_cpu_seconds", b"node_memory_")
    ),
    "kvpressure": Software("a kvpressure exporter", "point at the model servers", (b"kvpressure_",)),
    "service_mesh": Software(
        "a service mesh proxy (Envoy or Istio)", "point at the model server's own port", (b"envoy_", b"istio_")
    ),
    "ray": Software(
        "Ray without an LLM engine on this node", "point at the Ray pods with GPUs that run the replicas", (b"ray_",)
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
