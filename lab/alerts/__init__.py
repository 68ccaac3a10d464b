"""Are healthy servers silent, and does harm page? The real rules, evaluated by Prometheus's own engine on what the
exporter publishes.

``python -m lab.alerts`` (``make alert-proof``) plays two weeks of production traffic on a simulated server, the
recordings of healthy servers and the reconstructed incidents, and writes ``docs/reports/alert-proof.md``.
"""
