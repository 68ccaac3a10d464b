"""The same settings as for every other test."""

from tests.conftest import pytest_collection_finish, pytest_collection_modifyitems

__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems"]
