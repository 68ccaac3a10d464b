"""What the commands ``diagnose``, ``audit``, ``mitigate``, ``probe`` and ``discover`` share.

Where answers come from: live endpoints, recordings, an exporter, Prometheus, kubectl. What is made of them: triage,
plan, checklist, measurements.

Everything ends in the document of ``publish.diagnosis_json``, because that is what an exporter elsewhere answers too;
``view`` reads it. Nothing here runs inside ``serve``.
"""
