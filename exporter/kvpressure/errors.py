"""Errors that are answers: the input was wrong, and one line says what, where and what is allowed."""


class InputError(ValueError):
    """Wrong usage or input. The text is one line; commands print it and exit with status 2."""
