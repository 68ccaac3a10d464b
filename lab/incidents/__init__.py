"""Recordings of published incidents, rebuilt from their quoted numbers: see ``lab/incidents/build.py``."""
