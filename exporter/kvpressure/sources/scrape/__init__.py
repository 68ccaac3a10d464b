"""Metrics endpoints of inference servers: bounded fetching and a scanner for both exposition formats."""
