"""The wheel that an installation packs of itself is the one that was built, however it was installed."""

import subprocess
import sys
import zipfile
from hashlib import sha256
from io import BytesIO

import pytest

from rankwatch_service import own_wheel as module
from rankwatch_service.own_wheel import WheelError, own_wheel


@pytest.fixture(autouse=True)
def packed_anew():
    own_wheel.cache_clear()
    yield
    own_wheel.cache_clear()


def names() -> list[str]:
    return zipfile.ZipFile(BytesIO(own_wheel().content)).namelist()


def test_equal_files_give_equal_bytes():
    first = own_wheel()
    own_wheel.cache_clear()
    assert own_wheel().content == first.content
    assert own_wheel().sha256 == sha256(first.content).hexdigest()


def test_it_has_code_pages_and_migrations_and_nothing_about_this_machine():
    found = names()
    assert {"rankwatch/__init__.py", "rankwatch/py.typed", "rankwatch_service/dashboard/static/page.html"} <= set(found)
    assert any(name.startswith("rankwatch_service/migrations/versions/") for name in found)
    assert not [name for name in found if name.endswith((".pyc", ".pth")) or "direct_url" in name]
    assert len(found) == len(set(found))


def test_what_begins_with_a_dot_is_left_out(monkeypatch, tmp_path):
    (tmp_path / "rankwatch").mkdir()
    (tmp_path / "rankwatch" / "code.py").write_text("")
    (tmp_path / "rankwatch" / ".env").write_text("secret")
    real = module._package_folder
    monkeypatch.setattr(module, "_package_folder", lambda name: tmp_path / name if name == "rankwatch" else real(name))
    assert [name for name in names() if name.startswith("rankwatch/")] == ["rankwatch/code.py"]


def test_an_installation_that_is_too_large_is_not_packed(monkeypatch):
    monkeypatch.setattr(module, "WHEEL_BYTES_MAX", 1000)
    with pytest.raises(WheelError, match="more than 1000"):
        own_wheel()


def test_pip_installs_it_and_it_packs_the_same_again(tmp_path):
    file, target = tmp_path / own_wheel().name, tmp_path / "installed"
    file.write_bytes(own_wheel().content)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(file)], check=True, timeout=120)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "from rankwatch_service import own_wheel\n"
        "assert own_wheel.__file__.startswith(sys.path[0])\n"
        "print(own_wheel.own_wheel().sha256)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == own_wheel().sha256
