"""The version of carpool, in a file of its own so that any module can read it."""

__version__ = "0.9.0"
