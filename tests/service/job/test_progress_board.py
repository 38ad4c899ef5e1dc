from rankwatch import wire
from rankwatch_service.job.progress_board import ProgressBoard
from tests.support.values.batches import batch


def block(rank: int, step: int, phase: str = "forward", state: str = "running") -> wire.Progress:
    return wire.Progress(rank, step, phase, 0.5, 1.5, 10 * step, state=state, cpu_s=2.0 * step)


def test_the_last_of_several_blocks_of_a_rank_counts():
    board = ProgressBoard("l.0", 3)
    board.hear(
        [
            batch(
                progress=(
                    block(1, 4),
                    block(0, 5),
                    block(1, 6, "backward"),
                )
            )
        ],
        7.0,
    )
    seen = board.presence()
    assert seen.heard.tolist() == [True, True, False]
    assert seen.step.tolist() == [5, 6, -1]
    assert seen.collective_seq.tolist() == [50, 60, 0]
    assert seen.cpu_s.tolist() == [10.0, 12.0, 0.0]
    assert seen.phase == ("forward", "backward", "")
    assert seen.heard_s.tolist() == [7.0, 7.0, 0.0]


def test_ranks_that_the_attempt_does_not_have_are_left_out():
    board = ProgressBoard("l.0", 2)
    board.hear([batch(progress=(block(2, 1),))], 1.0)
    assert not board.presence().heard.any()
    board.hear(
        [
            batch(
                progress=(
                    block(2, 1),
                    block(1, 3),
                )
            )
        ],
        1.0,
    )
    assert board.presence().step.tolist() == [-1, 3]


def test_a_rank_that_left_its_loop_stays_left():
    board = ProgressBoard("l.0", 1)
    board.hear(
        [
            batch(
                progress=(
                    block(0, 1, state="left"),
                    block(0, 1, state="exited"),
                )
            )
        ],
        1.0,
    )
    assert board.presence().state == ("left",)


def test_a_block_without_a_time_of_sending_has_its_time_of_arrival():
    board = ProgressBoard("l.0", 2)
    board.hear(
        [batch(progress=(block(0, 1),), sent_unix_ns=5 * 10**9), batch(progress=(block(1, 1),), sent_unix_ns=0)], 9.0
    )
    assert board.presence().told_s.tolist() == [5.0, 9.0]
