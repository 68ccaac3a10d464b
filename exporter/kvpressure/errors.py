"""Errors of usage or input: one line with what was wrong, where, and what is allowed."""


class InputError(ValueError):
    """Wrong usage or input. The text is one line; commands print it and exit with status 2."""
