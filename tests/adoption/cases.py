"""What is tried: each script with the faults that apply to it, and what has to be said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Fault:
    """A fault and the incident that reports it."""

    name: str
    kind: str
    names_rank: bool = True
    """After a collective all ranks hold the same, and of two replicas that differ nobody can know which is right."""
    shows: str = ""
    """Stands in what is said."""
    step: int = 0
    """In which it comes, if not in that of the case."""


HANG = Fault("stop", "hang")
KILLED = Fault("kill", "rank_lost", shows="SIGKILL")
FAILED = Fault("fail", "rank_lost", shows="ZeroDivisionError: a bug of the script")
LEFT = Fault("leave", "rank_lost", shows="exit code 3")
SLOW = Fault("slow", "straggler")
NAN = Fault("nan", "nonfinite", shows="first in ")
NAN_FOR_GOOD = Fault("nan_for_good", "nonfinite", shows="first in ")
FLIP = Fault("flip", "corruption", names_rank=False)
SPIKE = Fault("spike", "loss_spike", names_rank=False, step=300)

ENDS = (HANG, KILLED, FAILED, LEFT)
UNDER_DDP = (*ENDS, SLOW, NAN, FLIP)


@dataclass(frozen=True)
class Case:
    """One script, and how it is started."""

    name: str
    faults: Sequence[Fault] = UNDER_DDP
    ranks: int = 2
    step: int = 50
    """In which the fault comes."""
    launcher: Sequence[str] = field(default=())
    """Options of torchrun."""
    torchrun: bool = True
    """Else the script is run as a program, and starts its ranks itself."""
    of: str = ""
    """The script, where it is another case's."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    untouched: bool = False
    """The script has no line for rankwatch: `rankwatch run` starts it."""
    loss_falls: bool = True
    """Else what the script minimizes lies around zero, and is no loss that is judged."""
    in_test: Sequence[Fault | None] = (None,)
    """Tests try these; None: the script as it is, when nothing may be reported."""

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.of or self.name}.py"


NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun's restarted ranks find the addresses of the killed ones in its store, and gloo never connects."""


def variant(name: str, faults: Sequence[Fault] = UNDER_DDP, of: str = "ddp_loop", **how: Any) -> Case:
    """A case of a script that has several, selected by `VARIANT`."""
    environment = {"VARIANT": name} | how.pop("environment", {})
    return Case(name, faults, of=of, environment=environment, **how)


CASES = (
    Case("ddp_accumulation", in_test=(SLOW,)),
    Case("fsdp2", (*ENDS, SLOW, NAN), in_test=(NAN,)),
    Case("hf_trainer", in_test=(NAN,)),
    Case("lightning_trainer", in_test=(NAN,)),
    Case("fabric_loop", in_test=(NAN,)),
    Case("accelerate_loop", in_test=(NAN,)),
    Case("deepspeed_loop", (*ENDS, SLOW, NAN), in_test=(NAN,)),
    Case("megatron_loop", (*ENDS, SLOW, NAN), ranks=4, step=40, in_test=(NAN,)),
    Case("torchtitan_loop", (*ENDS, SLOW, NAN)),
    variant("compiled", in_test=(FAILED,)),
    Case("loader_workers", in_test=(HANG,)),
    Case("for_batch", in_test=(KILLED,)),
    Case("gan", in_test=(FLIP,)),
    variant("grad_scaler", (*ENDS, SLOW, NAN_FOR_GOOD, FLIP), in_test=(NAN_FOR_GOOD,)),
    Case("pp_dp", (*ENDS, NAN, FLIP), ranks=4, step=40),
    Case("tp_dp", (*ENDS, SLOW, NAN, FLIP), ranks=4, step=40, in_test=(NAN,)),
    Case("rollouts", (*ENDS, NAN), step=20),
    variant("elastic", launcher=("--max-restarts=2",), environment=NEW_STORE, in_test=(LEFT,)),
    variant("ctrl_c", ENDS),
    variant("odd_ends", ENDS),
    Case("untouched_gpt", (*UNDER_DDP, SPIKE), untouched=True, in_test=(SPIKE,)),
    Case("untouched_hf", (*UNDER_DDP, SPIKE), untouched=True, in_test=(NAN,)),
    Case("lightning_alone", (HANG, KILLED), torchrun=False, of="lightning_trainer", in_test=(HANG,)),
    variant("trl_sft", of="trl_trainers", in_test=(NAN,)),
    variant("trl_grpo", of="trl_trainers", loss_falls=False),
)
"""`make ci` tries each case and each fault at least once, and `make adoption` every case with every fault."""
