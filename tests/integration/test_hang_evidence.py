"""Real ranks of gloo hang in a collective: where they stand is in the evidence."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch_service.demo.processes import end_all
from tests.support.agent.service import AgentService, until
from tests.support.detection.judged import judged

pytestmark = [pytest.mark.integration, pytest.mark.ci]

SCRIPT = Path(__file__).parents[1] / "support" / "ranks" / "hanging_rank.py"
RANKS = 3
HUNG_S = 12.0
"""After this the hang is usually reported: a standstill inside a step is after 5 s, if steps are short."""


@contextlib.contextmanager
def hanging_job(folder: Path, service: AgentService, mark: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANKWATCH_", "TORCH_"))}
    environment |= {"RANKWATCH_DIR": str(folder), "RANKWATCH_LAUNCH": mark, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= service.environment | {"WORLD_SIZE": str(RANKS)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, str(SCRIPT)], env=mine))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)
        end_all(mark, 0.2)


def hung_s(service: AgentService) -> float:
    """How long the rank that all wait for has been in its step."""
    blocks = [block for batch in list(service.batches) for block in batch.progress if block.rank == RANKS - 1]
    return blocks[-1].step_age_s if blocks and blocks[-1].step == 300 else 0.0


def test_where_all_ranks_of_a_hang_stand_is_told_and_no_rank_is_harmed(tmp_path: Path) -> None:
    mark = f"hangs-{uuid.uuid4().hex}"
    with AgentService() as service, hanging_job(tmp_path, service, mark) as ranks:
        until(lambda: hung_s(service) >= HUNG_S, 180)
        until(lambda: judged(list(service.batches), after_s=0.0), 120)
        service.order(stacks=(wire.StackRequest("r1", f"{mark}.0"),))
        until(lambda: len(service.events("stack_dump")) == RANKS)
        (incident,) = judged(service.batches, after_s=2.0)
        (tmp_path / "go").touch()
        assert [process.wait(120) for process in ranks] == [0] * RANKS, "they train on as if nobody had asked"
    assert (incident["kind"], incident["ranks"]) == ("hang", []), "progress alone does not show who is waited for"
    evidence = incident["evidence"]
    assert [one["ranks"] for one in evidence["stacks"]] == ["2", "0-1"]
    assert "wait_for_go" in evidence["stacks"][0]["stack"]
    assert evidence["ranks_stand"].startswith("2 of 3 ranks stand in all_reduce (distributed_c10d.py:")
    assert "; rank 2 in wait_for_go (hanging_rank.py:" in evidence["ranks_stand"]
