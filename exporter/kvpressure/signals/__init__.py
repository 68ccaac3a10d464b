"""Signals: pure functions over windows of readings. No I/O here, and time comes from the readings."""
