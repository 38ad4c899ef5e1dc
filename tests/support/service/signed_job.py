"""A job whose agents sign what they send, in a real partition: two hosts with two ranks each."""

from collections.abc import Callable
from typing import Any

from rankwatch import wire
from rankwatch.signed import Purpose, sign
from rankwatch_detectors.base import Occurrence
from tests.support.service.partition import Listener, PlayedPartition
from tests.support.values.batches import batch, progress, ranks, table

ONE, TWO, THIEF = "0" * 15 + "1", "0" * 15 + "2", "f" * 16


def secret_of(job: str, host: str, agent: str) -> bytes:
    return f"{job}/{host}/{agent}".encode()


class World(PlayedPartition):
    """A partition whose agents sign what they send."""

    one: Callable[..., bytes]
    """Messages of the agents of `job_of_two_hosts`."""
    two: Callable[..., bytes]

    def __init__(self) -> None:
        self.heard: list[Any] = []
        super().__init__(lambda: [Listener(self.heard)], secret_of=secret_of)
        self.now_s = 1_000.0
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, with a tick every second, as the stream does."""
        until_s = self.now_s + seconds
        while True:
            self.now_s = min(self.now_s + 1.0, until_s)
            self.tick_at(self.now_s)
            if self.now_s >= until_s:
                break

    def send(self, *messages: bytes) -> None:
        """Append messages to the log; the stream takes them together."""
        self.records(messages)

    @property
    def attempt(self) -> str | None:
        return self.partition.jobs["gpt"]._assembler.attempt

    def forged(self) -> list[str]:
        return [o.fields["what"] for o in self.heard if isinstance(o, Occurrence) and o.kind == "forged"]

    def refused(self) -> list[str]:
        return [f"{one.reason}: {one.detail}" for one in self.effects.refused]


def host(number: int, agent: str, attempt: str = "l.0", world_size: int = 4) -> Callable[..., bytes]:
    """The messages of the agent on host `number`, which has two ranks there."""
    mine = [2 * number, 2 * number + 1]
    name, seq = f"node-{number}", iter(range(1_000))

    def message(*steps: int, of: list[int] | None = None, signed_by: str | None = None, **fields: Any) -> bytes:
        about = mine if of is None else of
        sequence = next(seq)
        if steps:
            fields["steps"] = table(
                [step for step in steps for _ in about], about * len(steps), loss=[1.0] * len(about) * len(steps)
            )
        if sequence == 0:
            fields.setdefault("ranks", ranks(world_size, name, about))
        fields.setdefault("progress", tuple(progress(rank, max(steps, default=0)) for rank in about))
        body = wire.encode(batch(sequence, host=name, boot=f"b-{agent}-{attempt}", attempt=attempt, **fields))
        by = agent if signed_by is None else signed_by
        return sign(Purpose.BATCH, by, secret_of("gpt", name, by), body) if by else body

    return message


def job_of_two_hosts() -> World:
    """Whose agents have enrolled, and train step 1."""
    world = World()
    world.one, world.two = host(0, ONE), host(1, TWO)
    world.send(world.one(), world.two())
    world.send(world.one(1), world.two(1))
    assert world.attempt == "l.0"
    assert not world.refused()
    return world
