"""`rankwatch run -- COMMAND`: watches the training processes of a command whose script nobody may change."""

from typing import Final

RUN_VARIABLE: Final = "RANKWATCH_RUN"
"""Set in all processes of the command; `site/sitecustomize.py` does nothing without it."""
