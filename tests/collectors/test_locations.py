"""Where a checkpoint is, and below which folder, without looking at any disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.locations import (
    LOCATION_CHARACTERS_MAX,
    ROOTS_MAX,
    checkpoint_root,
    folder_of,
    folders,
    is_below,
    roots_with,
)


@pytest.mark.parametrize(
    ("location", "roots"),
    [
        ("/ckpt/step-5.pt", ["/ckpt"]),
        ("/ckpt//./step-5.pt", ["/ckpt"]),
        ("/ckpt", ["/ckpt"]),
        ("runs/1/step-5", ["runs"]),
        ("step-5.pt", ["."]),
        ("s3://bucket/run/step-5", ["s3://bucket/run"]),
        ("S3://bucket/run/step-5", ["s3://bucket"]),
        ("", []),
    ],
)
def test_what_is_below_a_root_may_be_loaded(location, roots):
    assert is_below(location, roots)


@pytest.mark.parametrize(
    ("location", "roots"),
    [
        ("/evil/x.pt", ["/ckpt"]),
        ("/ckpt-other/x.pt", ["/ckpt"]),
        ("ckpt/x.pt", ["/ckpt"]),
        ("/ckpt/x.pt", ["."]),
        ("/ckpt/x.pt", ["ckpt"]),
        ("s3://bucket-2/run/x", ["s3://bucket/run"]),
        ("s3://bucket/runs/x", ["s3://bucket/run"]),
        ("gs://bucket/run/x", ["s3://bucket/run"]),
        ("http://ckpt/x", ["/ckpt", "ckpt", "."]),
        ("/ckpt/x.pt", []),
    ],
)
def test_what_is_below_none_may_not(location, roots):
    assert not is_below(location, roots)


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("/ckpt/../evil.pt", "a .. in it"),
        ("../evil.pt", "a .. in it"),
        ("s3://bucket/run/../../other", "a .. in it"),
        ("s3://bucket/run/%2e%2e/other", "a .. in it"),
        ("/ckpt/%2e%2e%2fevil.pt", "a .. in it"),
        ("/ckpt/x\n.pt", "cannot be printed"),
        ("/ckpt/x\0.pt", "cannot be printed"),
        ("/ckpt/\u202ext.pt", "cannot be printed"),
        ("/ckpt/" + "x" * LOCATION_CHARACTERS_MAX, "longer than"),
    ],
)
def test_what_climbs_or_hides_is_not_valid(location, why):
    with pytest.raises(ValueError, match=why):
        is_below(location, ["/ckpt", "s3://bucket/run", "."])


@pytest.mark.parametrize("text", ["", "/", "//", "/.", "file:///", "file://localhost/", "/a/../b"])
def test_a_root_that_holds_everything_is_none(text):
    with pytest.raises(ValueError, match=r"it (holds every file|is empty|has a \.\. in it)"):
        checkpoint_root(text)


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("/ckpt/5.pt", "/ckpt"),
        ("/5.pt", "/5.pt"),
        ("5.pt", "."),
        ("s3://b/5", "s3://b"),
        ("file:///5.pt", "file:///5.pt"),
    ],
)
def test_the_folder_of_a_location_is_never_the_whole_file_system(location, folder):
    assert folder_of(location) == folder


@pytest.mark.parametrize(
    ("saved", "roots"),
    [
        (["/ckpt/5.pt", "/ckpt/10.pt"], ("/ckpt",)),
        (["/ckpt/step-5/0.pt", "/ckpt/step-10/0.pt"], ("/ckpt",)),
        (["/ckpt/e1/s5/x", "/ckpt/e1/s9/x", "/ckpt/e2/s12/x", "/ckpt/e2/s15/x"], ("/ckpt",)),
        (["/a/5.pt", "/b/10.pt"], ("/a", "/b")),
        (["/nvme/ckpt/5.pt", "s3://b/run/5"], ("/nvme/ckpt", "s3://b/run")),
        (["ckpt/5.pt", "/ckpt/5.pt"], ("ckpt", "/ckpt")),
        (["s3://a/5", "s3://b/5"], ("s3://a", "s3://b")),
    ],
)
def test_roots_follow_from_what_was_saved(saved, roots):
    found: tuple[str, ...] = ()
    for location in saved:
        found = roots_with(found, location)
        assert is_below(location, found)
    assert found == roots


locations = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(lambda names: "/" + "/".join(names))


@given(st.lists(locations, max_size=60))
def test_roots_stay_few_hold_the_newest_save_and_never_everything(saved):
    roots: tuple[str, ...] = ()
    for location in saved:
        roots = roots_with(roots, location)
        assert is_below(location, roots)
        assert len(roots) <= ROOTS_MAX
        assert "/" not in roots


@given(st.text(max_size=40))
def test_any_text_is_a_location_or_not_valid(text):
    try:
        found = folders(text)
    except ValueError:
        return
    assert folders(found[0]) == found, "the plain form is its own plain form"
