"""What the commands ``diagnose``, ``audit``, ``mitigate``, ``probe`` and ``discover`` share.

Inputs: live endpoints, recordings, an exporter, Prometheus, kubectl. Outputs: triage, plan, checklist, measurements.
All inputs become the objects of ``engine_view``, a running exporter's document included (``exporter_document``).
Nothing here runs inside ``serve``.
"""
