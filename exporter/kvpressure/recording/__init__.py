"""Recordings: what was read, kept as JSON lines, so that an incident can be judged again by newer code."""
