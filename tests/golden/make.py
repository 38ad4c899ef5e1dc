"""Makes the golden file of the wire: `python -m tests.golden.make`, after a change of the schema that is meant.

`wire.msgpack` has one message for each part of the schema, by name, as an agent of this version sends it.
"""

from pathlib import Path

import msgspec

from rankwatch import wire
from tests.support.values.batches import batch, column, progress, ranks, table

FILE = Path(__file__).parent / "wire.msgpack"


def messages() -> dict[str, wire.Batch | wire.View]:
    """One message for each part of the schema, with every field given."""
    narrow = {
        "step": wire.Column("u1", bytes([0, 0, 1, 1]), 5_000),
        "rank": wire.Column("u1", bytes([0, 1, 0, 1])),
        "kind": wire.Column("u1", bytes([0, 0, 1, 1])),
        "tokens": column([4096, 4000, 4096, 4000], "u4"),
        "loss": wire.Column("f4", bytes.fromhex("0000803f0000c07f0000807f00000000"), 0, b"\x07"),
        "busy_s": column([0.25, 0.26, 0.24, None]),
        "fingerprint": wire.Column("i8", (2**62 + 1).to_bytes(8, "little") * 4, 7, b"\x05"),
        "phase.forward": wire.Column("u2", bytes.fromhex("0100020003000400"), 10),
    }
    info = wire.RankInfo(1, 2, 1, "node-1", "GPU-1", 77, 1, 2, 3, 4, 5, ("a.weight", "b.bias"), True, ("pause", "stop"))
    answered = progress(
        1,
        12,
        phase="backward",
        phase_age_s=0.5,
        step_age_s=0.75,
        collective_seq=99,
        state="held",
        order="ord_1",
        answer="done",
        answer_step=12,
        answer_k=1,
        answer_fingerprint=-5,
        os_state="S",
        cpu_s=3.5,
        answer_detail="/checkpoints/12",
    )
    device = wire.DeviceSample("GPU-1", 5, 1, 61.0, 300.5, 1.9e9, 0.97, 10**10, 8 * 10**10, 4, 0, 79, {"pcie": 1.5})
    event = wire.Event("process_exit", 9, 1, 12, {"code": None, "signal": 9, "left": False, "how": "pidfd"})
    return {
        "header": batch(seq=3),
        "outside": batch(progress=(progress(1, 12, outside_s=3.5, doing="own"),)),
        "ranks": batch(ranks=(*ranks(2, chosen=[0]), info)),
        "watched": batch(ranks=(wire.RankInfo(0, 1, optimizers=2, watched="watching Net and Critic"),)),
        "steps": batch(steps=wire.Table(4, narrow)),
        "values": batch(values=table([4], [1], loss=[2.5], grad_norm=[float("inf")])),
        "progress": batch(progress=(answered, progress(0, -1))),
        "devices": batch(devices=(device, wire.DeviceSample("GPU-0", 6))),
        "events": batch(events=(event, wire.Event("note", 10, fields={"text": "größer ∞"}))),
        "view": wire.View("gpt", "l.0", "node-1", "b1", 11, (answered,)),
    }


def main() -> None:
    FILE.write_bytes(msgspec.msgpack.encode({name: wire.encode(message) for name, message in messages().items()}))


if __name__ == "__main__":
    main()
