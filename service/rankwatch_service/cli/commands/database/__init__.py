"""Commands that open the database themselves, on the machine of the service."""
