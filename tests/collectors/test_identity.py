import os
import subprocess
import sys

import pytest

from rankwatch.identity import identify, mixed_launches, this_start

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_LOCALID": "3"}


def found(env: dict[str, str], **arguments: object):
    return identify(
        env, start=lambda leads: "my-start" if leads else "my-parents-start", **({"job": "gpt"} | arguments)
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("single", 0, 1, 0, "my-start")),
        (
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_RESTART_COUNT": "2"},
            ("torchrun", 5, 8, 1, "r1-2"),
        ),
        ({**TORCHRUN, "RANKWATCH_LAUNCH": "mine"}, ("environment", 5, 8, 1, "mine")),
        ({**TORCHRUN, "MASTER_ADDR": "localhost"}, ("environment", 5, 8, 1, "my-parents-start")),
        (SLURM, ("slurm", 3, 16, 3, "slurm-77-0-0")),
        (
            {**SLURM, "SLURM_STEP_ID": "4", "SLURM_RESTART_COUNT": "1", "SLURM_ARRAY_JOB_ID": "70",
             "SLURM_ARRAY_TASK_ID": "9"},
            ("slurm", 3, 16, 3, "slurm-70_9-4-1"),
        ),
        ({"SLURM_JOB_ID": "77"}, ("single", 0, 1, 0, "my-start")),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "PMIX_NAMESPACE": "prterun-h-9@1"},
            ("mpi", 2, 4, 0, "prterun-h-9@1"),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "4", "RANKWATCH_LAUNCH": "m"},
            ("mpi", 2, 4, 0, "m"),
        ),
        (
            {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
            ("mpi", 2, 4, 2, "my-parents-start"),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("mpi", 1, 2, 0, "my-parents-start"),
        ),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "1"}, ("slurm", 3, 4, 3, "slurm-77-1-0")),
        (
            {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2", "JOB_UID": "u-1"},
            ("kubernetes", 1, 2, 0, "u-1"),
        ),
    ],
)  # fmt: skip
def test_each_launcher_is_understood(env, expected):
    identity = found(env)
    assert (identity.source, identity.rank, identity.world_size, identity.local_rank, identity.launch) == expected


def test_torchrun_beats_slurm_beats_mpi_and_arguments_beat_all():
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n"}
    run = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "r"}
    assert found({**mpi, **SLURM, **run}).source == "torchrun"
    assert found({**mpi, **SLURM}).source == "slurm"
    reported = found({**mpi, **SLURM, **run}, rank=1, world_size=2, local_rank=0, host="h", launch="l")
    assert reported[:6] == ("gpt", "l", 1, 2, 0, "h")
    assert reported.source == "arguments"


@pytest.mark.parametrize(
    ("env", "arguments", "switch"),
    [
        ({}, {}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "s0.s4.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}, {}, "s4"),
        ({"SLURM_TOPOLOGY_ADDR": f"{201 * 's'}.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, {}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, {}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "s4.node7"}, {}, ""),
        ({"SLURM_TOPOLOGY_ADDR": "s4.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
          "RANKWATCH_SWITCH": "leaf-2"}, {}, "leaf-2"),
        ({"RANKWATCH_SWITCH": "leaf-2"}, {"switch": "rack-9"}, "rack-9"),
    ],
)  # fmt: skip
def test_the_switch_is_named_by_argument_then_variable_then_slurm(env, arguments, switch):
    assert found(env, **arguments).switch == switch


def test_torchruns_default_run_id_names_no_start():
    env = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3", "LOCAL_WORLD_SIZE": "8"}
    assert found(env).launch == "my-parents-start-3"
    with pytest.raises(ValueError, match="--rdzv-id"):
        found({**env, "LOCAL_WORLD_SIZE": "4"})


def test_the_job_is_named_by_argument_then_variable_then_scheduler():
    env = {**SLURM, "SLURM_JOB_NAME": "train.sh", "RANKWATCH_JOB": "gpt-7b"}
    assert found(env, job="mine").job == "mine"
    assert found(env, job=None).job == "gpt-7b"
    del env["RANKWATCH_JOB"]
    assert found(env, job=None).job == "train.sh"
    with pytest.raises(ValueError, match="RANKWATCH_JOB"):
        found({}, job=None)


@pytest.mark.parametrize(
    ("env", "arguments", "complaint"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK should be a whole number, not 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "rank 2 is not one of 2 ranks"),
        ({}, {"rank": -1}, "rank -1"),
        ({}, {"job": "a\nb"}, "printable"),
        ({}, {"launch": "l" * 201}, "launch must be at most 200"),
        ({}, {"topology": {"xx": 1}}, "dp, tp, pp, cp, ep"),
        ({}, {"topology": {"tp": -1}}, "places from 0"),
        (TORCHRUN, {}, "RANKWATCH_LAUNCH"),
    ],
)
def test_what_makes_no_sense_is_a_clear_error(env, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        found(env, **arguments)


def test_without_a_topology_every_rank_is_a_replica():
    axes = ("dp", "tp", "pp", "cp", "ep")
    run = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "r"}
    assert [getattr(found(run), axis) for axis in axes] == [5, 0, 0, 0, 0]
    reported = found(run, topology={"dp": 1, "tp": 3})
    assert [getattr(reported, axis) for axis in axes] == [1, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("devices", "expected"), [("0,1", ""), ("GPU-a,GPU-b", "GPU-b"), ("MIG-c", "MIG-c"), ("", ""), ("GPU-a,1", "")]
)
def test_a_device_that_the_launcher_names_by_uuid_is_known(devices, expected):
    run = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "r", "CUDA_VISIBLE_DEVICES": devices}
    assert found(run).device_uuid == expected


def test_one_start_has_one_name_on_this_host_and_parent_and_child_differ():
    assert this_start(False) == this_start(False)
    assert this_start(True) != this_start(False)


LIGHTNING = {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}


@pytest.mark.parametrize(
    ("env", "group", "expected"),
    [
        # Lightning's first process starts the others: its own start is the parent's of all others.
        (LIGHTNING, (0, 2), ("torch", 0, 2, 0, "my-start")),
        ({**LIGHTNING, "LOCAL_RANK": "1"}, (1, 2), ("torch", 1, 2, 1, "my-parents-start")),
        # torch.multiprocessing.spawn starts all of them, and sets nothing.
        ({}, (0, 2), ("torch", 0, 2, 0, "my-parents-start")),
        ({"MASTER_ADDR": "localhost"}, (3, 4), ("torch", 3, 4, 3, "my-parents-start")),
        # A launcher that leaves variables is believed before torch.
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "r1"}, (0, 2), ("torchrun", 5, 8, 1, "r1-0")),
    ],
)
def test_ranks_that_no_launcher_numbers_are_numbered_by_torchs_process_group(env, group, expected):
    identity = found(env, process_group=group)
    assert (identity.source, identity.rank, identity.world_size, identity.local_rank, identity.launch) == expected


def test_a_process_group_over_several_hosts_needs_a_name_for_its_start():
    with pytest.raises(ValueError, match="RANKWATCH_LAUNCH"):
        found({"MASTER_ADDR": "node-7"}, process_group=(1, 2))


RESTARTED = {"TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, ""),
        (RESTARTED, ""),
        ({**RESTARTED, "GROUP_WORLD_SIZE": "1"}, ""),
        ({**RESTARTED, "GROUP_WORLD_SIZE": "2"}, "on each host for itself"),
        ({**RESTARTED, "RANKWATCH_LAUNCH": "mine"}, "RANKWATCH_LAUNCH stays the same"),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "2", "RANKWATCH_LAUNCH": "mine"}, ""),
    ],
)
def test_restarts_of_torchrun_that_get_no_launch_of_their_own_are_known(env, said):
    assert said in mixed_launches(env)
    assert bool(said) == bool(mixed_launches(env))


def test_rank_0_says_so_in_the_training_output(tmp_path):
    env = {**os.environ, **RESTARTED, "RANKWATCH_DIR": str(tmp_path), "RANKWATCH_LAUNCH": "mine", "WORLD_SIZE": "2"}
    for rank, times in ((0, 1), (1, 0)):
        code = "import rankwatch; rankwatch.start('gpt', agent=False)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**env, "RANK": str(rank)}, capture_output=True, text=True, check=True
        )
        assert done.stderr.count("RANKWATCH_LAUNCH stays the same") == times
