"""The one error for what a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """Something a user can mend: the message is one line, says what is wrong, and what to do."""


class Diverged(UserError):
    """The loss of a step is inf or NaN."""


class Elsewhere(UserError):
    """Why a run ended that another of its processes has said already."""
