"""Errors that a user can act on.

Anything raised from here is a mistake in the input, not a fault of peagle: the message names the
value given, what was expected and what to do. Commands print it and exit with status 2.
"""


class UserError(ValueError):
    """Input that peagle cannot work with: an option, a file, a prompt, a request."""


class CheckpointError(UserError):
    """A model or draft-head folder that is missing, incomplete, misshapen or of another target."""
