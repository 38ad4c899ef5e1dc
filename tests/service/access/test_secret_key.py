"""Where the secret key comes from, which one a database accepts, and what it is good for."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from rankwatch_service.access.agents import AgentSecrets
from rankwatch_service.access.secret_key import SecretKey, SecretKeyError, load_secret_key
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.models import Setting
from tests.support.clock import FakeClock
from tests.support.store.database import new_database, rows_of
from tests.support.trials.selection import in_ci

KEY = "0123456789abcdef" * 4


def configured(folder: Path, **more) -> Settings:
    return Settings(data_dir=folder, **more)


def test_a_text_comes_back_and_shows_in_no_encrypted_form():
    key = SecretKey(b"k" * 32)
    one, other = key.encrypt("whsec_héllo"), key.encrypt("whsec_héllo")
    assert one != other
    assert "whsec" not in one + other
    assert key.decrypt(one) == key.decrypt(other) == "whsec_héllo"


def test_another_key_or_a_changed_text_decrypts_nothing():
    key = SecretKey(b"k" * 32)
    text = key.encrypt("secret")
    with pytest.raises(ValueError, match="cannot be decrypted"):
        SecretKey(b"l" * 32).decrypt(text)
    with pytest.raises(ValueError, match="cannot be decrypted"):
        key.decrypt(text[:-6] + "AAAA==")
    with pytest.raises(ValueError, match="cannot be decrypted"):
        key.decrypt("not encrypted")


def test_each_purpose_has_a_key_of_its_own():
    key = SecretKey(b"k" * 32)
    derived = [key.derive("cursors"), key.derive("check"), SecretKey(b"l" * 32).derive("cursors")]
    assert len(set(derived)) == 3
    assert {len(one) for one in derived} == {32}
    assert key.derive("cursors") == derived[0]


def test_another_key_gives_agents_other_secrets():
    one, two = (AgentSecrets(SecretKey(key * 32)) for key in (b"1", b"2"))
    reported = ("gpt", "node-1", "00112233445566aa")
    assert one(*reported) == one(*reported)
    assert (
        len({one(*reported), two(*reported), one("gpt2", *reported[1:]), one(reported[0], "node-2", reported[2])}) == 4
    )


def test_a_new_database_gets_a_key_in_a_file_that_only_its_owner_may_read(engine, tmp_path):
    settings = configured(tmp_path / "new" / "folder")
    key = load_secret_key(settings, engine, FakeClock())
    file = settings.secret_key_file
    assert file == tmp_path / "new" / "folder" / "secret.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(bytes.fromhex(file.read_text())) == 32
    assert list(file.parent.iterdir()) == [file]
    assert load_secret_key(settings, engine, FakeClock()).derive("x") == key.derive("x")


def test_a_key_in_the_environment_is_the_same_as_in_a_file(engine, tmp_path):
    settings = configured(tmp_path / "one")
    key = load_secret_key(settings, engine, FakeClock())
    named = configured(tmp_path / "other", secret_key=settings.secret_key_file.read_text().strip())
    assert load_secret_key(named, engine, FakeClock()).derive("x") == key.derive("x")
    assert not named.secret_key_file.exists()


def test_what_the_database_keeps_does_not_reveal_the_key(engine, tmp_path):
    settings = configured(tmp_path, secret_key=KEY)
    key = load_secret_key(settings, engine, FakeClock())
    stored = str(rows_of(engine, select(Setting.__table__)))
    assert "check" in stored
    assert KEY not in stored
    assert key.derive("cursors").hex() not in stored
    assert key.derive("encryption").hex() not in stored


def test_another_key_than_the_one_of_the_database_is_refused(engine, tmp_path):
    load_secret_key(configured(tmp_path / "one"), engine, FakeClock())
    with pytest.raises(SecretKeyError, match=r"RANKWATCH_SECRET_KEY is not the one of this database.*copy secret\.key"):
        load_secret_key(configured(tmp_path, secret_key=KEY), engine, FakeClock())
    other = configured(tmp_path / "other")
    with pytest.raises(SecretKeyError, match=r"is missing.*or set RANKWATCH_SECRET_KEY"):
        load_secret_key(other, engine, FakeClock())
    assert not other.secret_key_file.exists(), "a new key would only hide the one that is missing"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(tmp_path, mode):
    engine, settings = new_database(tmp_path), configured(tmp_path)
    settings.secret_key_file.write_text(KEY)
    settings.secret_key_file.chmod(mode)
    with pytest.raises(SecretKeyError, match=f"mode 0{mode:o}.*chmod 600 {settings.secret_key_file}"):
        load_secret_key(settings, engine, FakeClock())
    settings.secret_key_file.chmod(0o600)
    load_secret_key(settings, engine, FakeClock())
    engine.dispose()


def test_a_key_that_is_too_short_or_no_text_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="secret_key"):
        configured(tmp_path, secret_key="short")
    engine, settings = new_database(tmp_path), configured(tmp_path)
    settings.secret_key_file.touch(0o600)
    for content, reported in ((b"short\n", "less than 32 characters"), (b"\xff" * 64, "cannot be read")):
        settings.secret_key_file.write_bytes(content)
        with pytest.raises(SecretKeyError, match=reported):
            load_secret_key(settings, engine, FakeClock())
    engine.dispose()


def test_roles_that_start_at_once_agree_on_one_key(database_url, tmp_path):
    def load(_: int) -> bytes:
        engine = open_engine(database_url)
        key = load_secret_key(configured(tmp_path / "shared"), engine, FakeClock()).derive("x")
        engine.dispose()
        return key

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(load, range(8)))) == 1


@pytest.mark.integration
@pytest.mark.parametrize("role", ["api", *in_ci(["stream", "notify", "up"])])
def test_a_role_with_another_key_ends_and_says_what_to_do(tmp_path, role):
    engine = new_database(tmp_path)
    load_secret_key(configured(tmp_path), engine, FakeClock())
    engine.dispose()
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-m", "rankwatch_service", role, "--data", str(tmp_path)],
        env=os.environ | {"RANKWATCH_SECRET_KEY": KEY, "RANKWATCH_PORT": "0", "XDG_CONFIG_HOME": str(tmp_path / "c")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    reason = json.loads(done.stderr.splitlines()[-1])["reason"]
    assert reason.startswith(
        "rankwatch has not started: the secret key in RANKWATCH_SECRET_KEY is not the one of this database"
    )
    assert KEY not in done.stderr + done.stdout
