"""What people have set (policy, receivers, silences) as of one position of the control log. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rankwatch_service.policy.control_records import ControlRecord, PolicySet, ReceiverRoute, ReceiversSet, SilenceSet
from rankwatch_service.policy.policy import Policy, policy_of, policy_record

SILENCES_MAX: Final = 1_000
"""Silences kept; beyond, the one that ends first is dropped. People set a few dozen."""


class SettingsInForce:
    """The settings that decide who is notified of what, and what is done."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.receivers: tuple[ReceiverRoute, ...] = ()
        self.silences: dict[str, SilenceSet] = {}

    def take(self, record: ControlRecord) -> None:
        """Apply a control record; those about single jobs change nothing."""
        match record:
            case PolicySet():
                self.policy = policy_of(record)
            case ReceiversSet():
                self.receivers = record.receivers
            case SilenceSet():
                # A new dict, since the copies for single jobs share the old one.
                silences = {**self.silences, record.id: record}
                if len(silences) > SILENCES_MAX:
                    del silences[min(silences, key=lambda silence: silences[silence].ends_unix_ns)]
                self.silences = silences
            case _:
                pass

    def copy(self) -> SettingsInForce:
        """A copy for one job, which changes alone while that job's past is replayed."""
        settings = SettingsInForce()
        settings.policy, settings.receivers, settings.silences = self.policy, self.receivers, self.silences
        return settings

    def state(self) -> dict[str, Any]:
        """The settings for a snapshot, as JSON types."""
        return {
            "policy": msgspec.to_builtins(policy_record(self.policy)),
            "receivers": [msgspec.structs.asdict(receiver) for receiver in self.receivers],
            "silences": [msgspec.structs.asdict(silence) for silence in self.silences.values()],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> SettingsInForce:
        """The settings of which `state` returned this."""
        settings = cls()
        settings.policy = policy_of(msgspec.convert(state["policy"], PolicySet))
        settings.receivers = tuple(msgspec.convert(state["receivers"], list[ReceiverRoute]))
        settings.silences = {silence["id"]: SilenceSet(**silence) for silence in state["silences"]}
        return settings
