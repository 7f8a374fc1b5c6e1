"""The digests that spare LibCST: right for every pinned release, and proof of nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from test_transforms import PATHS, RELEASES, read

from patcher.transforms import TRANSFORMS
from patcher.transforms.base import Edited
from patcher.transforms.proven import PROVEN


@pytest.mark.parametrize("role", PATHS)
def test_proven_digests_are_of_the_pinned_releases_and_prove_nothing_else(
    role: str, release_dir: Callable[[str], Path]
) -> None:
    transform = TRANSFORMS[role]
    for version in RELEASES:
        source = read(release_dir, version, role)
        result = transform.apply(source)
        assert isinstance(result, Edited)
        pair = hashlib.sha256(source).hexdigest(), hashlib.sha256(result.new).hexdigest()
        assert PROVEN[role][pair[0]][0] == pair[1]
        assert transform.replay(source) == result
        assert transform.replay(source + b"#") is None
        assert transform.replay(source.replace(b"\n", b"\r\n")) is None
        assert transform.makes(source, result.new)
        assert not transform.makes(source, result.new + b"#")
        assert not transform.makes(source, source)
    assert len(PROVEN[role]) == len(RELEASES)


@pytest.mark.parametrize("role", PATHS)
def test_a_wrong_place_or_digest_is_not_replayed(
    role: str, release_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read(release_dir, "0.5.12", role)
    before = hashlib.sha256(source).hexdigest()
    digest, places = PROVEN[role][before]
    for wrong in ((digest, (places[0] + 1, *places[1:])), (digest, places[:-1]), ("0" * 64, places)):
        monkeypatch.setitem(PROVEN[role], before, wrong)
        assert TRANSFORMS[role].replay(source) is None
