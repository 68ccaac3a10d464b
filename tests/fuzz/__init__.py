"""Fuzzing: cases that nobody would have thought of, for every parser and for the whole path, each against a property.

``python -m tests.fuzz`` (``make fuzz``) runs as long as it is told; ``test_fuzz.py`` runs a little of it and all cases
that once failed, which are kept in ``tests/fixtures/fuzz``.
"""
