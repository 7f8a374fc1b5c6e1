"""The real command: its exact text, its JSON against the schemas, its exit codes, and what an interrupt leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from test_engine import ROLE_PATHS, SWITCH, dynspec, snapshot

from patcher import __version__, engine

SCHEMAS = Path(engine.__file__).parent / "schemas"
FILES = [*ROLE_PATHS.values(), SWITCH]
Release = Callable[[str], Path]


def valid(name: str, text: str) -> dict[str, object]:
    value: dict[str, object] = json.loads(text)
    jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.schema.json").read_text()))
    return value


def lines(outcome: str) -> list[str]:
    return [f"  {outcome.ljust(11)} {path}" for path in FILES]


def test_what_a_person_reads(release_tree: Release) -> None:
    root = release_tree("0.5.9") / "sglang"
    head = f"sglang 0.5.9 at {root}"

    def said(*args: str) -> tuple[int, list[str], str]:
        run = dynspec(*args, "--sglang-root", str(root))
        return run.returncode, run.stdout.splitlines(), run.stderr

    patched = "patched; ask `dynspec verify` whether the switch is active, and restart running servers"
    assert said("patch", "--check") == (
        1,
        [
            head,
            *lines("would_apply"),
            "patch: would_apply: nothing is written; run `dynspec patch` without --dry-run or --check to apply",
        ],
        "",
    )
    assert said("patch") == (0, [head, *lines("applied"), f"patch: applied: {patched}"], "")
    already = "already: patched: every byte is what this dynspec writes"
    assert said("patch") == (0, [head, *lines("already"), f"patch: {already}"], "")
    assert said("status") == (0, [head, *lines("already"), f"status: {already}"], "")
    assert said("revert") == (
        0,
        [head, *lines("reverted"), "revert: reverted: the original bytes are back"],
        "",
    )


def test_no_colour_without_a_terminal(release_tree: Release) -> None:
    run = dynspec("status", "--sglang-root", str(release_tree("0.5.9")))
    assert "\x1b" not in run.stdout + run.stderr


def test_two_options_that_mean_two_sglangs(release_tree: Release, tmp_path: Path) -> None:
    one, two = release_tree("0.5.9"), release_tree("0.5.12")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={two} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    before = snapshot(one), snapshot(two)
    run = dynspec("patch", "--sglang-root", str(one), "--python", str(script), "--json")
    assert run.returncode == 2
    assert str(one / "sglang") in run.stderr
    assert str(two / "sglang") in run.stderr
    assert valid("patch", run.stdout)["outcome"] == "error"
    assert (snapshot(one), snapshot(two)) == before
    agree = dynspec("status", "--sglang-root", str(two), "--python", str(script), "--json")
    assert valid("patch", agree.stdout)["sglang_version"] == "0.5.12"


@pytest.mark.parametrize("command", ["patch", "revert", "status", "verify"])
@pytest.mark.parametrize("option", ["--sglang-root", "--python"])
def test_an_error_is_one_object_of_the_commands_own_schema(command: str, option: str, tmp_path: Path) -> None:
    run = dynspec(command, option, str(tmp_path / "nosuch"), "--json")
    assert run.returncode == 4
    value = valid("verify" if command == "verify" else "patch", run.stdout)
    assert value["exit_code"] == 4
    assert str(tmp_path / "nosuch") in str(value["detail"])
    assert run.stderr.startswith(f"dynspec {command}: expected ")


def test_pins_speak_json() -> None:
    run = dynspec("pins", "list", "--json")
    releases = valid("pins", run.stdout)["releases"]
    assert isinstance(releases, list)
    assert [r["version"] for r in releases] == ["0.5.9", "0.5.12"]
    run = dynspec("pins", "fetch", "0.0.0", "--json")
    assert (run.returncode, valid("pins", run.stdout)["exit_code"]) == (2, 2)
    run = dynspec("pins", "fetch", "0.5.9", "--json")
    assert run.returncode == 0
    wheels = valid("pins", run.stdout)["wheels"]
    assert isinstance(wheels, list)
    assert Path(wheels[0]).name == "sglang-0.5.9-py3-none-any.whl"


@pytest.mark.parametrize(
    "args",
    [["patch", "--nosuch"], ["patch", "--only"], ["patch", "x", "--json"], ["pins", "fetch"], ["nosuch"]],
)
def test_usage_errors(args: list[str]) -> None:
    run = dynspec(*args)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr


def test_nothing_to_export_writes_no_file(release_tree: Release, tmp_path: Path) -> None:
    root, file = str(release_tree("0.5.9")), tmp_path / "x.patch"
    dynspec("patch", "--sglang-root", root)
    run = dynspec("patch", "--sglang-root", root, "--export", str(file))
    assert run.returncode == 0
    assert "nothing to export" in run.stderr
    assert not file.exists()


@pytest.mark.parametrize("after", [0.1, 0.2, 0.3, 0.4, 0.6])
def test_interrupted(after: float, release_tree: Release) -> None:
    site = release_tree("0.5.12")
    before = snapshot(site)
    with subprocess.Popen(
        [sys.executable, "-m", "patcher", "patch", "--sglang-root", str(site)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        time.sleep(after)
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=60)
    if run.returncode == 0:  # done before the signal came
        assert dynspec("status", "--sglang-root", str(site)).returncode == 0
    else:
        if snapshot(site) != before:  # the signal came when all was written: then all is there
            assert dynspec("patch", "--check", "--sglang-root", str(site)).returncode == 0
        # before main() runs, Python itself ends on the signal
        assert (run.returncode, stderr) == (130, "interrupted; nothing is left half done\n") or (
            run.returncode == -signal.SIGINT
        )


def test_an_interrupt_is_said_in_json(release_tree: Release) -> None:
    code = (
        "import sys; from patcher import engine\n"
        "def stop(*a, **k): raise KeyboardInterrupt\n"
        "engine.status = stop; sys.argv[1:] = ['status', '--json', '--sglang-root', sys.argv[1]]\n"
        "from patcher.__main__ import main; main()"
    )
    site = str(release_tree("0.5.9"))
    run = subprocess.run([sys.executable, "-c", code, site], capture_output=True, text=True, env=os.environ)
    assert (run.returncode, run.stderr) == (130, "interrupted; nothing is left half done\n")
    assert valid("patch", run.stdout)["exit_code"] == 130


def test_versions_are_printed_raw_and_normalised(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    (metadata,) = site.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 0.5.9", "Version: v0.5.9-POST1+CU126", 1))
    run = dynspec("patch", "--check", "--sglang-root", str(site))
    both = "v0.5.9-POST1+CU126 (normalised: 0.5.9.post1+cu126)"
    assert run.stdout.startswith(f"sglang {both} at ")
    assert f"note: sglang {both} is not a pinned release; its content decides" in run.stdout
    assert run.returncode == 1
    as_json = dynspec("status", "--json", "--sglang-root", str(site))
    assert valid("patch", as_json.stdout)["sglang_version"] == "v0.5.9-POST1+CU126"


def test_patching_twice_needs_no_libcst(release_tree: Release) -> None:
    """`already` of a pinned release is proven by digests of ours, in a fraction of the time."""
    site = release_tree("0.5.12")
    engine.patch(engine_tree(site))
    code = (
        "import sys; from pathlib import Path; from patcher import engine, locate\n"
        "result = engine.patch(locate.find_root(Path(sys.argv[1])), check=True).result\n"
        "print(result.outcome.value, 'libcst' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(site)], capture_output=True, text=True, check=True)
    assert run.stdout == "already False\n"


def engine_tree(site: Path) -> engine.SglangTree:
    from patcher import locate

    return locate.find_root(site)


def test_version() -> None:
    assert dynspec("--version").stdout == f"dynspec {__version__}\n"
