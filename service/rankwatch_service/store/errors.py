"""What can be wrong with the database. Every message is one line for a person and holds no password."""

from __future__ import annotations


class StoreError(Exception):
    """The database cannot be used as things are."""


class StoreAddressError(StoreError):
    """This can never work: the URL is wrong, or the driver is not installed."""


class StoreBusyError(StoreError):
    """Not now: locked by others for too long, away, or restarting. Trying again later may help.

    What was under way may have been done all the same if the connection broke while it was committed; writes that must
    not happen twice carry an id.
    """


class SchemaError(StoreError):
    """The database's tables are not those of this version; the message says what to do."""
