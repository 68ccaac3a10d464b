"""Flags, environment, configuration file and thresholds."""
