"""A simulated node: vLLM engines by their measured step times, the GPUs under them, and incidents to watch.

``simulator`` models one engine, ``page`` renders what it serves, ``gpus`` what its GPU shows, ``node`` puts several
pods on one machine, ``scenario`` says what happens to them, and ``runner`` runs all of it next to the real exporter.
"""
