"""Inference servers: one folder for each, behind the protocol of ``base``."""
