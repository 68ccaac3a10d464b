"""The error of this package."""

from kvpressure.errors import InputError


class CapacityError(InputError):
    """The question cannot be answered as asked; one line with what is wrong, where, and what is allowed."""
