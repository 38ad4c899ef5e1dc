"""What can be wrong with the database. Every message is one line for a person and holds no password."""

from __future__ import annotations


class StoreError(Exception):
    """The database cannot be used."""


class StoreAddressError(StoreError):
    """Trying again cannot help: the URL is wrong, or the driver is not installed."""


class StoreBusyError(StoreError):
    """The database is locked for too long, unavailable or restarting. Trying again later may help.

    If the connection broke during a commit, the write may have happened nevertheless; writes that must not happen twice
    carry an id.
    """


class SchemaError(StoreError):
    """The database's tables are not those of this version; the message says what to do."""
