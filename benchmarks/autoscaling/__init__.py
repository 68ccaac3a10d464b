"""Autoscaling on what the exporter knows, simulated against scaling on the queue and on KV cache usage."""
