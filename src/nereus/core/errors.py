"""Errors that Nereus raises on purpose, by who can mend them."""

from __future__ import annotations


class UserError(ValueError):
    """Something that a user got wrong and can put right; the message is one line and carries the bad value.

    The command line prints the message alone and exits with code 2.
    """


class PlanError(UserError):
    """A plan that this model, batch or pool cannot run."""


class StateError(RuntimeError):
    """Logical state that is not what it must be: a region nobody holds, or replicas that differ."""


class Aborted(RuntimeError):
    """A wait was ended by the controller, because a peer died or the work was called off. Nothing was applied."""


class PeerTimeout(RuntimeError):
    """A peer did not answer within the communicator's timeout."""


class OutOfMemory(RuntimeError):
    """A device would hold more than its capacity. Nothing was applied; the device goes on."""
