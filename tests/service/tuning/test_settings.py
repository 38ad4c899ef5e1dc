"""The settings that people may change, their ranges and the profiles."""

import json

import pytest
from typer.testing import CliRunner

from rankwatch_detectors.base import Finding
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.tuning import SETTINGS, Profile, checked, config_of
from rankwatch_service.cli.app import app
from rankwatch_service.replay.configure import read_config
from rankwatch_service.simulate import faults
from rankwatch_service.simulate.files import write_job
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.stream.saved import pack
from rankwatch_service.tuning import TUNINGS_MAX, Tuning, TuningSet, read_tunings


@pytest.mark.parametrize("name", SETTINGS)
def test_quiet_and_sensitive_lie_on_both_sides_of_the_default_and_within_the_range(name):
    setting = SETTINGS[name]
    low, high = sorted((setting.quiet, setting.sensitive))
    assert setting.low <= low < setting.default < high <= setting.high
    assert [setting.checked(setting.of(profile)) for profile in Profile] == [setting.of(profile) for profile in Profile]


def test_standard_is_the_catalogue_as_it_is():
    assert config_of(Profile.STANDARD, {}) == CatalogueConfig()
    assert config_of(Profile.QUIET, {name: one.default for name, one in SETTINGS.items()}) == CatalogueConfig()


def test_a_setting_of_its_own_is_put_before_the_profile():
    config = config_of(Profile.QUIET, checked({"hang.steps": 4, "slowdown.ratio_min": 1.2}))
    assert (config.hang.steps, config.slowdown.ratio_min) == (4.0, 1.2)
    assert (config.straggler.wall.ratio_min, config.straggler.wall.ratios) == (1.05, (1.03, 1.05, 1.1, 1.3))


@pytest.fixture(scope="module")
def observations():
    job = Job(world_size=4, steps=150, seed=3).inject(
        faults.Throttle(3, 5, 1.1),
        faults.Slow(2, 60, 1.5, until_step=90),
        faults.SlowJob(95, 1.4, until_step=110),
        faults.LocalGradient(1, 70, 2.0),
        faults.NormSpike(80, 40.0, 3),
        faults.LossSpike(85, 4.0, 3),
        faults.Hang(1, 118, 20.0),
        faults.NonFinite(3, 130),
    )
    return list(generate(job))


@pytest.mark.parametrize("name", SETTINGS)
def test_another_value_goes_on_from_what_was_learned(name, observations):
    middle = len(observations) * 2 // 3
    bank = detectors()
    for observation in observations[:middle]:
        for one in bank:
            one.observe(observation)
    learned = {one.name: one.snapshot() for one in bank}
    assert any(state["episodes"] for state in learned.values())
    for value in (SETTINGS[name].low, SETTINGS[name].high):
        other = detectors(config_of(Profile.STANDARD, {name: value}))
        for one in other:
            one.restore(learned[one.name])
        assert pack({one.name: one.snapshot() for one in other}) == pack(learned)
        found = [finding for seen in observations[middle:] for one in other for finding in one.observe(seen)]
        assert all(isinstance(finding, Finding) for finding in found)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "tunings must be a list"),
        ([7], "a tuning is an object with jobs, profile, settings, not 7"),
        ([{"job": "a"}], "a tuning is an object with jobs, profile, settings"),
        ([{"jobs": ""}], "jobs must be a pattern of 1 to 200 characters"),
        ([{"profile": "loud"}], "there is no profile 'loud'; there are quiet, standard, sensitive"),
        ([{"settings": [1]}], "settings must be an object of numbers by name"),
        ([{"settings": {"stragler.budget": 1}}], "no setting 'stragler.budget'; the detectors with settings are strag"),
        ([{"settings": {"hang.step": 1}}], "no setting 'hang.step'; hang has hang.steps, hang.floor_s"),
        ([{"settings": {"hang.steps": 0.5}}], "hang.steps must be a number from 1 to 1000 (usual steps), not 0.5"),
        ([{"settings": {"hang.steps": float("nan")}}], "hang.steps must be a number from 1 to 1000"),
        ([{"settings": {"hang.steps": True}}], "hang.steps must be a number from 1 to 1000"),
        ([{"settings": {"hang.steps": "4"}}], "not '4'"),
        ([{}] * (TUNINGS_MAX + 1), "there may be 100 tunings, not 101"),
    ],
)
def test_what_is_no_tuning_is_said_with_what_is_allowed(document, said):
    with pytest.raises(ValueError, match=r"\S") as caught:
        read_tunings(document)
    assert said in str(caught.value)


def test_the_first_tuning_that_matches_a_job_holds():
    tunings = TuningSet(3, read_tunings([{"jobs": "gpt-?", "profile": "quiet"}, {"jobs": "gpt*", "settings": {}}]))
    assert [tunings.of(job).profile for job in ("gpt-1", "gpt-12", "GPT-1")] == ["quiet", "standard", "standard"]
    assert (tunings.of("gpt-12").jobs, tunings.of("bert")) == ("gpt*", Tuning())


def test_replay_reads_profiles_and_tunings(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"tunings": [{"jobs": "b*", "profile": "quiet"}]}))
    assert read_config("quiet") == read_config(str(path), "bert") == config_of(Profile.QUIET, {})
    assert read_config("standard") == read_config(str(path), "gpt") == CatalogueConfig()
    (tmp_path / "one.toml").write_text('profile = "sensitive"\n[settings]\n"hang.steps" = 9\n')
    assert read_config(str(tmp_path / "one.toml")).hang.steps == 9.0
    (tmp_path / "bad.toml").write_text("[settings]\nsteps = 9\n")
    with pytest.raises(ValueError, match=r"bad.toml: there is no setting 'steps'"):
        read_config(str(tmp_path / "bad.toml"))


def test_replay_compares_two_tunings(tmp_path):
    write_job(Job(world_size=8, steps=260, seed=5).inject(faults.Slow(3, 100, 1.3)), tmp_path / "job.parquet")
    (tmp_path / "quiet.json").write_text('{"settings": {"straggler.wall.ratio_min": 1.5}}')
    both = ("--tuning", "standard", "--compare", str(tmp_path / "quiet.json"))
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "job.parquet"), *both, "--json"])
    reported = [json.loads(line) for line in result.output.splitlines()]
    assert [(one["kind"], one["found"]) for one in reported[:-1]] == [("straggler", "only with standard")]
