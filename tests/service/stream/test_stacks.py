"""The stream ends the command that requested the stacks of a hang, in the transaction that stores them."""

from sqlalchemy import select

from rankwatch_service.incidents.hang import HangEvidence, StacksReceived
from rankwatch_service.orders import commands
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from tests.support.service.stream import Service
from tests.support.store.database import new_database


def test_stacks_that_have_come_end_the_command_that_requested_them(tmp_path, monkeypatch):
    service = Service(new_database(tmp_path))
    stream = service.started()
    service.send()
    stream.step()
    asked = {"job": "gpt", "attempt": "l.0", "action": "stacks", "params": {}, "reason": "", "requested_by": "stream"}
    with write(service.engine) as connection:
        commands.add(connection, CommandRequest(id="s", requested_unix_ns=service.clock.unix_ns(), **asked))

    def due(evidence, *_):
        evidence.received = [StacksReceived("s", 2, 2)]
        return []

    monkeypatch.setattr(HangEvidence, "due", due)
    service.clock.advance(1.5)
    stream.step()
    assert service.column(select(models.Command.state)) == ["applied"]
    service.engine.dispose()
