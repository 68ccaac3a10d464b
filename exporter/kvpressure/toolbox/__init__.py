"""What the commands ``diagnose``, ``audit``, ``mitigate`` and ``probe`` share: where answers come from (live pages,
recordings, an exporter, Prometheus, kubectl), and what is made of them (triage, plan, checklist, measurements).

Everything ends in the document of ``publish.diagnosis_json``, because that is what an exporter elsewhere answers too;
``view`` reads it. Nothing here runs inside ``serve``.
"""
