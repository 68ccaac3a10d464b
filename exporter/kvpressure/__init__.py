"""kvpressure: KV-cache pressure in vLLM on Kubernetes, as metrics, verdicts, alerts and dashboards."""

__version__ = "0.1.0"
