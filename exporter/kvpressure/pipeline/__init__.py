"""Snapshots in, published state out: the pure path that live, demo and replay share."""
