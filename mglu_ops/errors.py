"""The error that `python -m mglu_ops` reports without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A problem that the user of the command line can fix.

    `python -m mglu_ops` prints the message on one line of standard error and exits with code 2. The message says what
    happened, the value, and what to do.
    """
