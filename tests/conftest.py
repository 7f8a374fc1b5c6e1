"""Fixtures that fetch real releases by name and hash. What can't be had fails; nothing is skipped."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher import pins
from patcher.targets import Targets, load

gc.set_threshold(200_000)  # as the command does: LibCST's trees are many objects and no garbage

RELEASES = ("0.5.9", "0.5.12")


@pytest.fixture(scope="session")
def targets() -> Targets:
    return load()


@pytest.fixture(scope="session")
def release_dir(targets: Targets) -> Callable[[str], Path]:
    """version -> the unpacked wheel in the cache; not to be written to."""
    return lambda version: pins.unpack(version, targets)


@pytest.fixture
def release_tree(release_dir: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """version -> a fresh site-packages folder with the files that dynspec reads and writes."""
    number = itertools.count()

    def make(version: str) -> Path:
        source, site = release_dir(version), tmp_path / f"site{next(number)}"
        speculative = site / "sglang" / "srt" / "speculative"
        shutil.copytree(source / "sglang" / "srt" / "speculative", speculative)
        shutil.copy(source / "sglang" / "srt" / "server_args.py", speculative.parent)
        for name in ("__init__.py", "version.py", "_version.py"):
            shutil.copy(source / "sglang" / name, site / "sglang")
        for info in source.glob("sglang-*.dist-info"):
            shutil.copytree(info, site / info.name)
        return site

    return make
