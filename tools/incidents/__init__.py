"""Recordings of published incidents, rebuilt from their quoted numbers: see ``tools/incidents/build.py``."""
