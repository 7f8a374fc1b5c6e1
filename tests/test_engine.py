"""`patch`, `revert`, `status` on copies of the real files: what is written, and that nothing is ever half written."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest

from patcher import commit, engine, locate
from patcher.errors import DynspecError
from patcher.manifest import STATE_DIR
from patcher.outcomes import Exit, Outcome
from patcher.transforms import TRANSFORMS
from patcher.transforms.base import Block

RELEASES = ("0.5.9", "0.5.12")
ROLE_PATHS = {
    "server_args": "srt/server_args.py",
    "eagle_worker": "srt/speculative/eagle_worker.py",
    "eagle_worker_v2": "srt/speculative/eagle_worker_v2.py",
}
SWITCH = "srt/speculative/dynspec_switch.py"
SCHEMA = json.loads((Path(engine.__file__).parent / "schemas" / "patch.schema.json").read_text())
Release = Callable[[str], Path]


def snapshot(site: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below ``site`` with its mode."""
    return {
        str(p.relative_to(site)): (p.read_bytes(), p.stat().st_mode)
        for p in site.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def tree_of(site: Path) -> locate.SglangTree:
    return locate.find_root(site)


def dynspec(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patcher", *args], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def outcomes(result: engine.SetResult) -> dict[str, str]:
    return {f.role: f.outcome.value for f in result.files}


@pytest.mark.parametrize("version", RELEASES)
def test_patch_twice_then_revert(version: str, release_tree: Release) -> None:
    site = release_tree(version)
    before = snapshot(site)
    first = dynspec("patch", "--sglang-root", str(site), "--json")
    assert (first.returncode, json.loads(first.stdout)["outcome"]) == (0, "applied"), first.stderr
    jsonschema.validate(json.loads(first.stdout), SCHEMA)
    patched = snapshot(site)
    changed = {name for name in patched if patched[name] != before.get(name)}
    state = {name for name in changed if STATE_DIR in name}
    assert changed - state == {f"sglang/{p}" for p in (*ROLE_PATHS.values(), SWITCH)}
    assert all(before[n][1] == patched[n][1] for n in before)

    second = dynspec("patch", "--sglang-root", str(site), "--json")
    value = json.loads(second.stdout)
    assert second.returncode == 0
    assert {f["outcome"] for f in value["files"]} == {"already"} == {value["outcome"]}
    assert snapshot(site) == patched

    back = dynspec("revert", "--sglang-root", str(site), "--json")
    assert (back.returncode, json.loads(back.stdout)["outcome"]) == (0, "reverted")
    jsonschema.validate(json.loads(back.stdout), SCHEMA)
    assert snapshot(site) == before
    assert not (site / "sglang" / STATE_DIR).exists()
    again = dynspec("revert", "--sglang-root", str(site), "--json")
    assert (again.returncode, json.loads(again.stdout)["outcome"]) == (0, "not_needed")


@pytest.mark.parametrize("variant", ["crlf", "bom"])
@pytest.mark.parametrize("version", RELEASES)
def test_line_ends_and_bom_survive(version: str, variant: str, release_tree: Release) -> None:
    site = release_tree(version)
    for path in ROLE_PATHS.values():
        file = site / "sglang" / path
        data = file.read_bytes()
        file.write_bytes(data.replace(b"\n", b"\r\n") if variant == "crlf" else b"\xef\xbb\xbf" + data)
    before = snapshot(site)
    assert engine.patch(tree_of(site)).result.outcome is Outcome.APPLIED
    for path in ROLE_PATHS.values():
        data = (site / "sglang" / path).read_bytes()
        if variant == "crlf":
            assert data.count(b"\n") == data.count(b"\r\n")
        else:
            assert data.startswith(b"\xef\xbb\xbf")
            assert data.count(b"\xef\xbb\xbf") == 1
        compile(data, path, "exec")
    assert engine.patch(tree_of(site)).result.outcome is Outcome.ALREADY
    assert engine.revert(tree_of(site)).outcome is Outcome.REVERTED
    assert snapshot(site) == before


def test_status_and_partial(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    assert engine.status(tree_of(site)).outcome is Outcome.WOULD_APPLY
    done = engine.patch(tree_of(site), only=["server_args", "eagle_worker_v2"]).result
    assert (done.outcome, done.exit_code) == (Outcome.APPLIED, Exit.OK)
    partial = engine.status(tree_of(site))
    assert partial.outcome is Outcome.PARTIAL
    assert partial.exit_code is Exit.NOT_AS_ASKED
    assert outcomes(partial) == {
        "server_args": "already",
        "eagle_worker": "would_apply",
        "eagle_worker_v2": "already",
        "spec_switch": "already",
    }
    rest = engine.patch(tree_of(site)).result
    assert outcomes(rest)["eagle_worker"] == "applied"
    assert outcomes(rest)["server_args"] == "already"
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY


def test_unknown_role_is_a_usage_error(release_tree: Release) -> None:
    run = dynspec("patch", "--sglang-root", str(release_tree("0.5.9")), "--only", "scheduler")
    assert run.returncode == 2
    assert "eagle_worker_v2" in run.stderr


def test_dry_run_and_check_write_nothing(release_tree: Release) -> None:
    site = release_tree("0.5.12")
    before = snapshot(site)
    dry = dynspec("patch", "--sglang-root", str(site), "--dry-run")
    assert dry.returncode == 0
    assert "+++ b/sglang/srt/server_args.py" in dry.stdout
    assert "would_apply" in dry.stderr
    assert dynspec("patch", "--sglang-root", str(site), "--check").returncode == 1
    both = dynspec("patch", "--sglang-root", str(site), "--check", "--dry-run", "--json")
    assert (both.returncode, json.loads(both.stdout)["exit_code"]) == (1, 1)
    assert snapshot(site) == before
    engine.patch(tree_of(site))
    assert dynspec("patch", "--sglang-root", str(site), "--check").returncode == 0


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_export_gives_the_same_bytes(tool: str, release_tree: Release, tmp_path: Path) -> None:
    site, other = release_tree("0.5.12"), tmp_path / "other"
    shutil.copytree(site, other)
    file = tmp_path / "dynspec.patch"
    assert dynspec("patch", "--sglang-root", str(site), "--export", str(file)).returncode == 0
    assert engine.status(tree_of(site)).outcome is Outcome.WOULD_APPLY
    command = ["git", "apply", str(file)] if tool == "git" else ["patch", "-s", "-p1", "-i", str(file)]
    subprocess.run(
        command, cwd=other, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    )
    engine.patch(tree_of(site))
    for path in (*ROLE_PATHS.values(), SWITCH):
        assert (other / "sglang" / path).read_bytes() == (site / "sglang" / path).read_bytes()
    # no manifest there: `already` and `revert` rest on the bytes alone
    assert engine.status(tree_of(other)).outcome is Outcome.ALREADY
    assert engine.revert(tree_of(other)).outcome is Outcome.REVERTED
    assert engine.status(tree_of(other)).outcome is Outcome.WOULD_APPLY


def edit(site: Path, role: str, change: Callable[[str], str]) -> None:
    file = site / "sglang" / ROLE_PATHS[role]
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))


@pytest.mark.parametrize(
    ("role", "change"),
    [
        ("eagle_worker", lambda s: s.replace("def forward_batch_generation(", "def forward_batches(", 1)),
        ("eagle_worker", lambda s: s + "\n\nclass EAGLEWorker:\n    pass\n"),
        ("eagle_worker_v2", lambda s: s.replace("class EAGLEWorkerV2(", "class EAGLEWorkerTwo(", 1)),
        (
            "server_args",
            lambda s: s.replace("    speculative_num_draft_tokens:", "    speculative_num_drafts:", 1),
        ),
        ("server_args", lambda s: s + "\ndef broken(:\n"),
    ],
    ids=["moved method", "doubled class", "renamed class", "renamed field", "does not parse"],
)
def test_drift_writes_nothing(role: str, change: Callable[[str], str], release_tree: Release) -> None:
    site = release_tree("0.5.12")
    edit(site, role, change)
    before = snapshot(site)
    run = dynspec("patch", "--sglang-root", str(site), "--json")
    value = json.loads(run.stdout)
    assert (run.returncode, value["outcome"]) == (3, "drift"), run.stderr
    entry = next(f for f in value["files"] if f["role"] == role)
    assert entry["outcome"] == "drift"
    assert entry["detail"]
    assert snapshot(site) == before


def test_a_missing_worker_file_is_unsupported(release_tree: Release) -> None:
    site = release_tree("0.5.12")
    (site / "sglang" / ROLE_PATHS["eagle_worker"]).unlink()
    before = snapshot(site)
    result = engine.patch(tree_of(site)).result
    assert (result.outcome, result.exit_code) == (Outcome.UNSUPPORTED, Exit.DRIFT)
    assert snapshot(site) == before


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_foreign_edit_after_ours_is_kept(where: str, release_tree: Release) -> None:
    site = release_tree("0.5.9")
    engine.patch(tree_of(site))
    if where == "inside":
        edit(
            site, "eagle_worker", lambda s: s.replace("if dynspec_switch.skips(self, batch):", "if False:", 1)
        )
    else:
        edit(
            site,
            "eagle_worker",
            lambda s: s.replace(
                "        # Parse arguments\n", "        # Parse arguments\n        pass\n", 1
            ),
        )
    before = snapshot(site)
    found = engine.status(tree_of(site))
    assert (found.outcome, outcomes(found)["eagle_worker"]) == (Outcome.FOREIGN, "foreign")
    for command in ("patch", "revert"):
        run = dynspec(command, "--sglang-root", str(site), "--json")
        assert (run.returncode, json.loads(run.stdout)["outcome"]) == (3, "foreign")
    assert snapshot(site) == before


def test_an_edited_switch_module_is_foreign(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    engine.patch(tree_of(site))
    file = site / "sglang" / SWITCH
    file.write_text(file.read_text().replace(">= self.threshold", "> self.threshold"))
    assert engine.status(tree_of(site)).outcome is Outcome.FOREIGN
    assert engine.patch(tree_of(site)).result.exit_code is Exit.DRIFT


def test_half_of_our_lines_without_a_manifest_is_drift(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    engine.patch(tree_of(site))
    shutil.rmtree(site / "sglang" / STATE_DIR)
    edit(
        site,
        "eagle_worker",
        lambda s: s.replace(
            "        if dynspec_switch.skips(self, batch):\n            return dynspec_switch.step(self, batch)\n",
            "",
            1,
        ),
    )
    before = snapshot(site)
    assert engine.patch(tree_of(site)).result.exit_code is Exit.DRIFT
    assert engine.revert(tree_of(site)).exit_code is Exit.DRIFT
    assert snapshot(site) == before


def test_another_versions_patch_is_renewed(release_tree: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    site = release_tree("0.5.9")
    before = snapshot(site)
    monkeypatch.setattr("patcher.plan.__version__", "0.0.9")
    engine.patch(tree_of(site))
    monkeypatch.undo()
    assert outcomes(engine.status(tree_of(site)))["spec_switch"] == "foreign"
    renewed = engine.patch(tree_of(site)).result
    assert outcomes(renewed)["spec_switch"] == "applied"
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY
    engine.revert(tree_of(site))
    assert snapshot(site) == before


def test_a_damaged_manifest_is_not_trusted(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    before = snapshot(site)
    engine.patch(tree_of(site))
    state = site / "sglang" / STATE_DIR
    for original in (state / "originals").iterdir():
        original.write_bytes(b"import os; raise SystemExit\n")
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY
    (state / "manifest.json").write_text("[" * 100_000)
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY
    engine.revert(tree_of(site))
    assert snapshot(site) == before


def test_hard_links_keep_their_bytes(release_tree: Release, tmp_path: Path) -> None:
    site, twin = release_tree("0.5.9"), tmp_path / "twin"
    shutil.copytree(site, twin, copy_function=os.link)
    before = snapshot(twin)
    result = engine.patch(tree_of(site)).result
    assert any("shares its inode" in note for note in result.notes)
    assert snapshot(twin) == before


def test_stale_bytecode_is_removed(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    cache = site / "sglang" / "srt" / "__pycache__"
    cache.mkdir(exist_ok=True)
    stale, other = cache / "server_args.cpython-311.pyc", cache / "constants.cpython-311.pyc"
    stale.write_bytes(b"old")
    other.write_bytes(b"kept")
    engine.patch(tree_of(site))
    assert not stale.exists()
    assert other.exists()


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_a_symbolic_link_is_replaced_and_put_back(
    relative: bool, release_tree: Release, tmp_path: Path
) -> None:
    site = release_tree("0.5.9")
    file = site / "sglang" / ROLE_PATHS["eagle_worker"]
    store = tmp_path / "store.py"
    os.rename(file, store)
    file.symlink_to(os.path.relpath(store, file.parent) if relative else store)
    data, target = store.read_bytes(), os.readlink(file)
    result = engine.patch(tree_of(site)).result
    assert any("symbolic link" in note and str(store) in note for note in result.notes)
    assert not file.is_symlink()
    assert store.read_bytes() == data
    assert engine.patch(tree_of(site)).result.outcome is Outcome.ALREADY
    assert engine.revert(tree_of(site)).outcome is Outcome.REVERTED
    assert os.readlink(file) == target
    assert file.read_bytes() == store.read_bytes() == data

    with failing("replace", 7, OSError(errno.EIO, "x")), pytest.raises(DynspecError):
        engine.patch(tree_of(site))
    assert os.readlink(file) == target

    engine.patch(tree_of(site))
    store.write_bytes(b"other")  # the link no longer leads to the original: a file then
    engine.revert(tree_of(site))
    assert not file.is_symlink()
    assert file.read_bytes() == data


def test_an_older_dynspecs_orphan_goes_with_revert(
    release_tree: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install -U` replaces sglang's files and leaves ours: the module and the state."""
    old, new = release_tree("0.5.9"), release_tree("0.5.12")
    fresh = snapshot(new)
    monkeypatch.setattr("patcher.plan.__version__", "0.0.9")
    engine.patch(tree_of(old))
    monkeypatch.undo()
    shutil.copy(old / "sglang" / SWITCH, new / "sglang" / SWITCH)
    shutil.copytree(old / "sglang" / STATE_DIR, new / "sglang" / STATE_DIR)
    found = engine.status(tree_of(new))
    assert any("left behind" in note for note in found.notes)
    assert any("0.5.9" in note and "0.5.12" in note for note in found.notes)
    assert (
        found.detail.startswith("patched by another dynspec version") or found.outcome is not Outcome.FOREIGN
    )
    assert engine.revert(tree_of(new)).outcome is Outcome.REVERTED
    assert snapshot(new) == fresh


def test_part_of_the_set_keeps_what_is_known_of_a_foreign_file(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    engine.patch(tree_of(site))
    file = site / "sglang" / ROLE_PATHS["eagle_worker"]
    ours = file.read_bytes()
    file.write_bytes(ours + b"# theirs\n")
    server_args = site / "sglang" / ROLE_PATHS["server_args"]
    server_args.write_bytes((site / "sglang" / STATE_DIR / "originals" / "server_args").read_bytes())
    assert engine.patch(tree_of(site), only=["server_args"]).result.outcome is Outcome.APPLIED
    assert outcomes(engine.status(tree_of(site)))["eagle_worker"] == "foreign"
    file.write_bytes(ours)
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY


def _older(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch as an older dynspec: another version, and other lines in the workers."""
    from patcher.transforms.worker import WorkerTransform

    step = WorkerTransform._step

    def other(self: WorkerTransform) -> Block:
        return Block(2, step(self).text.replace(".skips(", ".skipping("))

    with monkeypatch.context() as patched:
        patched.setattr("patcher.plan.__version__", "0.0.9")
        patched.setattr(WorkerTransform, "_step", other)
        for transform in TRANSFORMS.values():  # nothing remembered of the other lines
            patched.setattr(transform, "apply", functools.partial(type(transform).apply, transform))
        assert engine.patch(tree_of(site)).result.outcome is Outcome.APPLIED


def test_an_older_dynspecs_lines_are_renewed(release_tree: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    site = release_tree("0.5.9")
    before = snapshot(site)
    _older(site, monkeypatch)
    found = engine.status(tree_of(site))
    assert found.detail.startswith("patched by another dynspec version; `dynspec patch")
    assert {f["outcome"] for f in _asdicts(engine.patch(tree_of(site)).result)} == {"applied", "already"}
    assert engine.status(tree_of(site)).outcome is Outcome.ALREADY
    engine.revert(tree_of(site))
    assert snapshot(site) == before
    _older(site, monkeypatch)
    assert engine.revert(tree_of(site)).outcome is Outcome.REVERTED
    assert snapshot(site) == before


def _asdicts(result: engine.SetResult) -> list[dict[str, str]]:
    return [{"role": f.role, "outcome": f.outcome.value} for f in result.files]


def test_a_forged_manifest_does_not_undo_somebodys_work(
    release_tree: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Original and digests in .dynspec agree, but going back would lose more lines than dynspec ever puts in."""
    site = release_tree("0.5.9")
    _older(site, monkeypatch)
    state = site / "sglang" / STATE_DIR
    original = state / "originals" / "eagle_worker"
    forged = original.read_bytes().replace(b"logger = ", b"# forged\nlogger = ", 1)
    original.write_bytes(forged)
    manifest = json.loads((state / "manifest.json").read_text())
    entry = next(f for f in manifest["files"] if f["role"] == "eagle_worker")
    entry["before_sha256"] = hashlib.sha256(forged).hexdigest()
    (state / "manifest.json").write_text(json.dumps(manifest))
    before = snapshot(site)
    for result in (engine.patch(tree_of(site)).result, engine.revert(tree_of(site))):
        assert (result.outcome, result.exit_code) == (Outcome.FOREIGN, Exit.DRIFT)
    assert snapshot(site) == before


# ------------------------------------------------------------------- faults


@pytest.mark.parametrize("then", ["patch", "revert"])
def test_killed_while_renewing(
    then: str, release_tree: Release, remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = release_tree("0.5.9")
    pristine = snapshot(site)
    engine.patch(tree_of(site))
    patched = snapshot(site)
    engine.revert(tree_of(site))
    files = {f"sglang/{p}" for p in (*ROLE_PATHS.values(), SWITCH)}
    for at in range(1, 12):
        _older(site, monkeypatch)
        pid = os.fork()
        if pid == 0:
            _die_at_rename(at)
            engine.patch(tree_of(site))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        engine.patch(tree_of(site)) if then == "patch" else engine.revert(tree_of(site))
        now = snapshot(site)
        if then == "patch":
            assert {n: now[n] for n in files} == {n: patched[n] for n in files}, at
        engine.revert(tree_of(site))
        assert snapshot(site) == pristine, at
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("never ran to the end")


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_that_can_not_be_opened(kind: str, release_tree: Release, tmp_path: Path) -> None:
    site, temporary = release_tree("0.5.9"), tmp_path / "tmp"
    temporary.mkdir()
    key = hashlib.sha256(os.fsencode(os.path.realpath(site / "sglang"))).hexdigest()[:24]
    lock = temporary / f"dynspec-{key}.lock"
    lock.mkdir() if kind == "folder" else lock.symlink_to(tmp_path / "elsewhere")
    before = snapshot(site)
    run = subprocess.run(
        [sys.executable, "-m", "patcher", "patch", "--sglang-root", str(site)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert run.returncode == 4
    assert str(lock) in run.stderr
    assert "Traceback" not in run.stderr
    assert snapshot(site) == before
    assert not (tmp_path / "elsewhere").exists()


def test_a_tree_that_is_busy(release_tree: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    site = release_tree("0.5.9")
    monkeypatch.setattr(commit, "_LOCK_WAIT_S", 0.2)
    with commit.locked(tree_of(site).package), pytest.raises(DynspecError, match="another dynspec") as caught:
        engine.patch(tree_of(site))
    assert caught.value.exit_code is Exit.ENVIRONMENT
    assert engine.status(tree_of(site)).outcome is Outcome.WOULD_APPLY


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms of bytes seen before answer from memory: these tests are about I/O and run them often."""
    for transform in TRANSFORMS.values():
        monkeypatch.setattr(transform, "apply", functools.cache(transform.apply))


_CALLS = ("open", "write", "fchmod", "fsync", "replace")


@contextmanager
def failing(call: str, at: int, error: BaseException) -> Iterator[list[int]]:
    """Make the ``at``-th os.<call> of patcher.commit fail."""
    seen, real = [0], getattr(os, call)

    class Os:
        def __getattr__(self, name: str) -> object:
            return fail if name == call else getattr(os, name)

    def fail(*args: object, **kwargs: object) -> object:
        if call == "open" and not int(args[1]) & os.O_CREAT:  # type: ignore[call-overload]
            return real(*args, **kwargs)
        seen[0] += 1
        if seen[0] == at:
            raise error
        return real(*args, **kwargs)

    original = commit.os
    commit.os = Os()  # type: ignore[assignment, misc]
    try:
        yield seen
    finally:
        commit.os = original  # type: ignore[misc]


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("command", ["patch", "revert"])
def test_each_failing_system_call_rolls_back(
    call: str, command: str, release_tree: Release, remembered: None
) -> None:
    site = release_tree("0.5.9")
    tree = tree_of(site)
    if command == "revert":
        engine.patch(tree)
    before = snapshot(site)
    tried = 0
    for at in range(1, 60):
        with failing(call, at, OSError(errno.ENOSPC, "No space left on device", "x")) as seen:
            try:
                engine.patch(tree) if command == "patch" else engine.revert(tree)
            except DynspecError:
                tried += 1
                assert snapshot(site) == before, (call, at)
            else:
                if seen[0] < at:
                    break
                assert call == "fsync"  # a folder's, which some file systems refuse: done without
                engine.revert(tree) if command == "patch" else engine.patch(tree)
                assert snapshot(site) == before
    assert tried >= 3
    assert engine.status(tree).outcome is (Outcome.ALREADY if command == "patch" else Outcome.WOULD_APPLY)


def test_an_interrupt_rolls_back(release_tree: Release, remembered: None) -> None:
    site = release_tree("0.5.9")
    before = snapshot(site)
    for at in (1, 3, 6):
        with failing("replace", at, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            engine.patch(tree_of(site))
        assert snapshot(site) == before


@pytest.mark.parametrize("start", ["patch", "revert"])
@pytest.mark.parametrize("then", ["patch", "revert"])
def test_killed_at_any_rename_the_next_command_mends(
    start: str, then: str, release_tree: Release, remembered: None
) -> None:
    site = release_tree("0.5.9")
    pristine = snapshot(site)
    engine.patch(tree_of(site))
    patched = snapshot(site)
    engine.revert(tree_of(site))
    for at in range(1, 12):
        if start == "revert":
            engine.patch(tree_of(site))
        else:
            engine.revert(tree_of(site))
        pid = os.fork()
        if pid == 0:
            _die_at_rename(at)
            engine.patch(tree_of(site)) if start == "patch" else engine.revert(tree_of(site))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        engine.patch(tree_of(site)) if then == "patch" else engine.revert(tree_of(site))
        assert snapshot(site) == (patched if then == "patch" else pristine), (at, status)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("never ran to the end")


def _die_at_rename(at: int) -> None:
    real, seen = os.replace, [0]

    def die(*args: object) -> None:
        seen[0] += 1
        if seen[0] == at:
            os._exit(9)
        real(*args)  # type: ignore[arg-type]

    os.replace = die  # type: ignore[assignment]


def test_read_only_tree(release_tree: Release) -> None:
    site = release_tree("0.5.9")
    for path in (site, *site.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    before = snapshot(site)
    assert _as_nobody(site) == (Exit.ENVIRONMENT, None)
    assert snapshot(site) == before
    engine.patch(tree_of(site))
    assert _as_nobody(site) == (Exit.OK, Outcome.ALREADY)


def _as_nobody(site: Path) -> tuple[Exit, Outcome | None]:
    """Patch with an ordinary user's rights (tests may run as root, whom modes do not stop)."""
    for path in site.rglob("*"):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    else:
        for path in [site, *site.rglob("*")]:
            path.chmod(path.stat().st_mode & ~0o222)
    try:
        result = engine.patch(tree_of(site)).result
        return result.exit_code, result.outcome
    except DynspecError as error:
        return error.exit_code, None
    finally:
        os.seteuid(was)


def test_nothing_there_and_two_candidates(tmp_path: Path, release_tree: Release) -> None:
    run = dynspec("patch", "--sglang-root", str(tmp_path / "absent"), "--json")
    assert run.returncode == 4
    assert str(tmp_path / "absent") in json.loads(run.stdout)["detail"]
    jsonschema.validate(json.loads(run.stdout), SCHEMA)
    two = tmp_path / "two"
    shutil.copytree(release_tree("0.5.9") / "sglang", two / "sglang")
    shutil.copytree(release_tree("0.5.9") / "sglang", two / "python" / "sglang")
    run = dynspec("patch", "--sglang-root", str(two))
    assert run.returncode == 4
    assert str(two / "sglang") in run.stderr
    assert str(two / "python" / "sglang") in run.stderr


def test_not_an_interpreter() -> None:
    run = dynspec("status", "--python", "/bin/true")
    assert run.returncode == 4
    assert "/bin/true" in run.stderr


def test_help_and_version() -> None:
    assert dynspec("--version").stdout.startswith("dynspec ")
    for args in (["-h"], ["patch", "-h"], ["verify", "--help"], ["pins", "list", "-h"]):
        assert dynspec(*args).returncode == 0
    assert dynspec("patch", "--no-such-option").returncode == 2
