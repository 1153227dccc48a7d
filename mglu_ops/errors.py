"""The error that a command reports in one line."""

from __future__ import annotations


class UserError(Exception):
    """Something that the person at the command line can put right.

    `python -m mglu_ops` prints the message in one line on standard error and exits with code 2. The message says what
    happened, the value, and what to do.
    """
