"""Errors of usage or input: one line with what was wrong, where, and what is allowed."""


class InputError(ValueError):
    """Wrong usage or input. The text is one line; commands print it and exit with status 2."""


def refused_file(where: str, error: Exception, give: str) -> str:
    """The line for a file or directory that the system refuses: where it was named, why, and what to give instead."""
    return f"{where}: {getattr(error, 'strerror', None) or error}; give {give}"
