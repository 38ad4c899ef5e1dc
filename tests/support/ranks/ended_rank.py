"""A rank that trains until it is ended or ends itself: `python ended_rank.py HOW RANK`, HOW for that rank alone.

It goes on from step 30 once there is a file `go` beside its recorder. A rank whose peer (of two) is gone raises what
gloo would.
"""

import atexit
import os
import signal
import socket
import sys
import time

import rankwatch

AT_STEP = 30


def end(how: str) -> None:
    match how:
        case "exit" | "exit and free" | "exit and shut down":
            sys.exit(3)
        case "raise":
            raise ValueError("broken batch")
        case "quit":
            sys.exit(0)
        case "say and exit":
            print("RuntimeError: shard 17 has a bad checksum", file=sys.stderr, flush=True)
            os._exit(3)
        case "abort":  # as libraries of C++ do, past Python's streams
            os.write(2, b"terminate called\n  what():  CUDA error: an illegal memory access was encountered\n")
            os.abort()


def hold_on(where: str, rank: int) -> socket.socket:
    """A connection that breaks when the peer's process ends."""
    with socket.socket(socket.AF_UNIX) as server:
        if rank == 0:
            server.bind(where + ".new")
            server.listen()
            os.rename(where + ".new", where)
            return server.accept()[0]
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(where)
        except OSError:
            peer.close()
            time.sleep(0.01)
            continue
        return peer


class Slow:
    """What takes longer to be freed than a launcher waits."""

    def __del__(self) -> None:
        time.sleep(60)


def main(how: str, whose: int) -> None:
    rank = int(os.environ["RANK"])
    peer = hold_on(os.path.join(os.environ["RANKWATCH_DIR"], "meet"), rank)
    peer.setblocking(False)
    if how == "exit and free" and rank == whose:
        held = Slow()  # noqa: F841 - freed after the connection, and before Python's shutdown
    if how == "exit and shut down" and rank == whose:
        atexit.register(time.sleep, 60)
    if how == "stubborn" and rank == whose:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = rankwatch.start("ends", grace_s=5.0)
    for step in watch.steps(1_000_000):
        watch.log(loss=1.0)
        time.sleep(0.02)
        if step == AT_STEP:
            while not os.path.exists(os.path.join(os.environ["RANKWATCH_DIR"], "go")):
                time.sleep(0.01)
            if rank == whose:
                end(how)
        if how not in ("train", "stubborn", "quit") and gone(peer):
            raise RuntimeError("Connection closed by peer")


def gone(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
