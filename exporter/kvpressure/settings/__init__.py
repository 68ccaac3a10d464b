"""Flags, environment, configuration file and thresholds, each with its source and range."""
