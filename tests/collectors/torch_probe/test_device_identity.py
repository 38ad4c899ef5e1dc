"""What a rank says of its device: always the type, and a UUID where anything knows one. Nothing raises."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankwatch.identity import RankIdentity
from rankwatch.reader import RingReader
from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.device import describe_device
from rankwatch.torch_probe.watched_model import Handed, WatchedModels
from rankwatch.watch import Watch
from tests.support.ranks.device import FakeDevice
from tests.support.ranks.recorders import Rank, a_recorder

UUID = "5e0d4f3c-9d7e-1f07-2a55-b83e8f6e9a10"


@pytest.fixture
def driver(monkeypatch) -> SimpleNamespace:
    """Answers as torch does, and counts how often it was asked."""
    answers = SimpleNamespace(properties=SimpleNamespace(uuid=UUID), asked=[])

    def get_device_properties(device: torch.device) -> SimpleNamespace:
        answers.asked.append(device)
        if isinstance(answers.properties, Exception):
            raise answers.properties
        return answers.properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    return answers


def described(home: str = "cuda:1", known: str = "", visible: str | None = None) -> dict[str, str]:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    failures: list[Exception] = []
    told = describe_device(torch.device(home), known, env, failures.append)
    return told | ({"failed": str(failures[0])} if failures else {})


def test_the_uuid_is_written_as_nvml_writes_it(driver):
    assert described() == {"device_type": "cuda", "device_uuid": f"GPU-{UUID}"}
    assert driver.asked == [torch.device("cuda:1")]
    driver.properties.uuid = f"GPU-{UUID}"
    assert described()["device_uuid"] == f"GPU-{UUID}"


@pytest.mark.parametrize("home", ["cpu", "mps", "xpu:0"])
def test_where_parameters_lie_elsewhere_cuda_is_not_asked(driver, home):
    assert described(home) == {"device_type": home.partition(":")[0]}
    assert driver.asked == []


def test_what_the_script_or_the_launcher_said_stays(driver):
    assert described(known="MIG-a") == {"device_type": "cuda"}
    assert driver.asked == []


def test_a_listed_instance_of_a_divided_device_is_the_identity(driver):
    assert described(visible="MIG-a, MIG-b")["device_uuid"] == "MIG-b"
    assert driver.asked == []
    for others in ("MIG-a", "0,1", "", "MIG-a,2"):
        assert described(visible=others)["device_uuid"] == f"GPU-{UUID}"


@pytest.mark.parametrize("uuid", [None, "", "00000000-0000-0000-0000-000000000000"])
def test_a_device_without_a_uuid_has_its_type(driver, uuid):
    driver.properties.uuid = uuid
    assert described() == {"device_type": "cuda"}
    driver.properties = SimpleNamespace()
    assert described() == {"device_type": "cuda"}


def test_on_rocm_the_id_is_what_torch_gives(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    driver.properties.uuid = "61343533-6639-6533-6362-323038336635"
    assert described()["device_uuid"] == "61343533-6639-6533-6362-323038336635"


def test_a_driver_that_fails_costs_the_uuid_and_is_counted(driver):
    driver.properties = RuntimeError("CUDA driver is gone")
    assert described() == {"device_type": "cuda", "failed": "CUDA driver is gone"}


def test_without_cuda_asking_fails_and_nothing_raises():
    assert described().keys() == {"device_type", "failed"}


def home_of(model: nn.Module) -> torch.device:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return WatchedModels([Handed.of(model, optimizer, None, None)], placed=True).home


def test_a_model_without_memory_lies_nowhere_yet():
    assert home_of(nn.Linear(2, 2, device="meta")).type == "cpu"


def test_a_probe_declares_the_device_of_its_parameters(sink, model, optimizer):
    TorchProbe(sink, model, optimizer)
    assert sink.declared["device_type"] == "cpu"
    assert "device_uuid" not in sink.declared


def test_the_watch_tells_the_probe_which_uuid_is_known(tmp_path, model, optimizer, monkeypatch):
    known, device = [], FakeDevice()
    monkeypatch.setattr(device, "describe", lambda uuid, _failed: known.append(uuid) or {})
    Watch(RankIdentity("gpt", "l", device_uuid="GPU-7"), a_recorder(tmp_path)).torch(model, optimizer, device=device)
    assert known == ["GPU-7"]


def test_what_is_declared_reaches_the_service_with_the_ranks_next_introduction(tmp_path, model, optimizer):
    rank = Rank(tmp_path)
    reader = RingReader(rank.recorder.path)
    before = reader.identity_number
    rank.watch.torch(model, optimizer)
    assert reader.identity_number > before
    assert reader.header.identity["device_type"] == "cpu"
    reader.close()
