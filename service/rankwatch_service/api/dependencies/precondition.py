"""`ETag` and `If-Match`: what somebody else has changed since it was read is not overwritten unseen."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Final, TypeVar

from fastapi import Depends, Header, Response
from pydantic import BaseModel

from rankwatch_service.api.http.problem import ProblemError

IF_MATCH_CHARS_MAX: Final = 1_000
TAG_CHARS: Final = 32

Content = TypeVar("Content", bound=BaseModel)


def entity_tag(content: BaseModel) -> str:
    """The ETag of what a reader is shown: equal for equal content."""
    return f'"{sha256(content.model_dump_json().encode()).hexdigest()[:TAG_CHARS]}"'


class Precondition:
    """Gives readers the ETag, and refuses a write that was made for another one."""

    def __init__(
        self,
        response: Response,
        if_match: Annotated[
            str | None,
            Header(max_length=IF_MATCH_CHARS_MAX, description="ETag of what was read"),
        ] = None,
    ) -> None:
        self._response = response
        self._wanted = None if if_match is None else {one.strip() for one in if_match.split(",")}

    def show(self, content: Content, editable: BaseModel | None = None) -> Content:
        """The content, after the ETag has been added to the response.

        Args:
            content: what the reader is shown.
            editable: the part of it that people edit, which the ETag is about; None: all of it.
        """
        self._response.headers["ETag"] = entity_tag(editable or content)
        return content

    def check(self, current: BaseModel) -> None:
        """Call it in the transaction of the write, before it.

        Raises:
            ProblemError: 412, the client has read something else.
        """
        if self._wanted is not None and not self._wanted & {"*", entity_tag(current)}:
            raise ProblemError(412, "somebody has changed it since it was read; read it again, then repeat the change")


PreconditionDep = Annotated[Precondition, Depends()]
