"""The scripted gateway of the command line's tests."""

from tests.weft.cli.conftest import gateway

__all__ = ["gateway"]
