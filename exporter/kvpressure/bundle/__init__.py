"""The generated bundle: rules, Alertmanager example, dashboards, runbooks and reference pages.

Everything comes from three places: ``kvpressure.settings.thresholds`` (every number), ``kvpressure.publish.metrics``
(every metric name) and the templates beside this file (every expression and sentence). ``render.render`` is the one
entry.
"""
