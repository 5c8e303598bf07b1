"""The error that ends a command."""


class CalibrationError(Exception):
    """Something that was asked for cannot be measured. One line: what, and what to do."""
