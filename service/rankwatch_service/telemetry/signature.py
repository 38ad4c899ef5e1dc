"""The agent that signed a batch, and what a batch may say of its ranks because of it. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rankwatch.signed import Purpose, split
from rankwatch_service.telemetry.envelope import BadBatchError, Envelope, Reason, decode_envelope

SecretOf = Callable[[str, str, str], bytes]
"""(job, host, agent) -> the agent's secret."""


def no_secrets(job: str, host: str, agent: str) -> bytes:  # noqa: ARG001 - a `SecretOf`
    """For a stream without a key, which takes unsigned batches alone.

    Raises:
        BadBatchError: always.
    """
    raise BadBatchError(Reason.FORGED, "a signed batch, and this stream has no key to verify it with")


def read_envelope(body: bytes, secret_of: SecretOf) -> Envelope:
    """Decode one body of the log, signed or not, and check everything in it but its tables.

    `Envelope.agent` and `RankInfo.agent` are the agent that signed it, and empty in an unsigned one.

    Raises:
        BadBatchError: the batch can never be accepted, or it is not from the agent that it names.
    """
    signed = split(body)
    envelope = decode_envelope(signed.message if signed else body)
    agent = signed.agent if signed else ""
    if signed and not signed.is_by(secret_of(envelope.job, envelope.host, agent), Purpose.BATCH):
        raise BadBatchError(Reason.FORGED, f"the signature is not that of agent {agent} on host {envelope.host!r}")
    if agent and any(info.host != envelope.host for info in envelope.ranks):
        raise BadBatchError(Reason.FORGED, f"agent {agent} of host {envelope.host!r} introduces a rank of another host")
    ranks = tuple(msgspec.structs.replace(info, agent=agent) for info in envelope.ranks)
    return msgspec.structs.replace(envelope, agent=agent, ranks=ranks)
