"""Names in the bodies of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from rankwatch_service.names import is_name


def _is_name(text: str) -> str:
    if text and not is_name(text):
        raise ValueError("this is not a valid name")
    return text


NameOrNone = Annotated[str, AfterValidator(_is_name)]
"""A name, or an empty text."""
