"""docker-compose.yml and the Dockerfile, as far as they can be judged without a Docker engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rankwatch_service.settings import Settings
from tests.support.trials.compose import ROOT, MissingVariableError, services

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = services({"POSTGRES_PASSWORD": "x"})
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("rankwatch")}


def compose_is_here() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "compose", "version"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not compose_is_here(), reason="no docker compose")
def test_docker_compose_takes_the_file() -> None:
    command = ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
    environment = {"PATH": "/usr/bin:/usr/local/bin", "POSTGRES_PASSWORD": "x"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_there_is_no_default_secret_and_a_missing_one_says_what_to_do() -> None:
    with pytest.raises(MissingVariableError, match="first command at the top of docker-compose"):
        services({})
    text = (ROOT / "docker-compose.yml").read_text()
    assert re.findall(r"\$\{[A-Z_]+(?!:\?)[^A-Z_}]", text) == []
    assert "openssl rand -hex 24" in text.partition("services:")[0]


def test_the_parts_of_the_distributed_form_are_all_there() -> None:
    commands = [" ".join(service["command"]) for service in OURS.values()]
    assert sorted(command for command in commands if " " not in command) == ["api", "notify", "stream", "stream"]
    assert {"kafka", "postgres", "migrate", "simulated"} <= set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_names_a_version_and_comes_back_by_itself(name: str) -> None:
    assert re.fullmatch(r"[a-z/]+:\d[\w.-]*", SERVICES[name]["image"])
    assert SERVICES[name]["restart"] in ("unless-stopped", "on-failure")


@pytest.mark.parametrize("name", OURS)
def test_a_container_of_ours_may_do_nothing_that_it_does_not_need(name: str) -> None:
    service = OURS[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "network_mode", "pid", "user"} & set(service)


def test_only_the_dashboard_can_be_reached_and_only_from_this_machine() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {"api": ["127.0.0.1:8770:8770"]}


def test_what_others_wait_for_can_say_whether_it_is_healthy() -> None:
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
            else:
                assert SERVICES[name]["restart"] == "on-failure", f"{name} has to end"


@pytest.mark.parametrize("name", OURS)
def test_every_setting_in_the_environment_exists(name: str) -> None:
    known = {f"RANKWATCH_{field.upper()}" for field in Settings.model_fields}
    assert set(OURS[name].get("environment", {})) <= known


def test_the_roles_share_one_secret_key_that_no_job_can_read() -> None:
    roles = {name for name, service in OURS.items() if service["command"][0] in ("api", "stream", "notify")}
    assert {name for name, service in OURS.items() if "key:/var/lib/rankwatch" in service.get("volumes", [])} == roles
    files = {OURS[name]["environment"]["RANKWATCH_SECRET_KEY_FILE"] for name in roles}
    assert files == {"/var/lib/rankwatch/secret.key"}
    (prepared,) = [line for line in instructions("RUN") if "install -d -o rankwatch" in line]
    assert "/var/lib/rankwatch" in prepared, "a volume takes its owner from the image's folder"


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.partition(" ")[2] for line in joined.splitlines() if line.startswith(name + " ")]


def test_the_image_runs_as_a_user_of_its_own_and_starts_our_command() -> None:
    (user,) = instructions("USER")
    assert user == "rankwatch"
    assert "useradd --uid 10001" in DOCKERFILE
    assert instructions("ENTRYPOINT") == ['["rankwatch"]']
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "rankwatch" in project["scripts"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert not re.search(r"(ENV|ARG) .*(PASSWORD|TOKEN|SECRET)", DOCKERFILE)


def test_the_image_is_built_from_what_the_ignore_file_lets_through(tmp_path: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {part for line in instructions("COPY") if not line.startswith("--from") for part in line.split()[:-1]}
    assert copied == allowed
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "-w", str(wheels), str(tmp_path)], check=True, timeout=110)
    assert len(list(wheels.glob("rankwatch-*.whl"))) == 1
