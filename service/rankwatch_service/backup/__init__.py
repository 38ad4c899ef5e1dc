"""Backup and restore: the database, the tokens' files and the secret key in one file."""
