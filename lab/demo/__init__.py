"""A simulated node: vLLM engines by their measured step times, the GPUs under them, and incidents to watch.

``simulator`` models one engine, ``page`` renders its metrics, ``gpus`` its GPU's readings; ``node`` puts several pods
on one machine, ``scenario`` defines incidents, and ``runner`` runs all beside the real exporter.
"""
