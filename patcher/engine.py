"""``patch``, ``revert`` and ``status`` of one tree: read, plan, commit. Returns values and prints nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from . import commit as disk
from .errors import DynspecError
from .locate import SglangTree, shown
from .manifest import STATE_DIR, Manifest
from .outcomes import Exit, FileResult, Outcome, SetResult
from .plan import (
    SWITCH_PATH,
    SWITCH_ROLE,
    Found,
    Plan,
    State,
    inspect,
    plan_patch,
    plan_revert,
    sha256,
    summarize,
    switch_module,
)
from .targets import Targets, load

_EXIT = {
    Outcome.DRIFT: Exit.DRIFT,
    Outcome.FOREIGN: Exit.DRIFT,
    Outcome.UNSUPPORTED: Exit.DRIFT,
    Outcome.PARTIAL: Exit.NOT_AS_ASKED,
    Outcome.ERROR: Exit.ENVIRONMENT,
}


@dataclass(frozen=True)
class Patched:
    """What ``patch`` did or would do, with the text of it where it was asked for."""

    result: SetResult
    diff: str = ""


def switch_source() -> bytes:
    """The vendored module as this dynspec writes it."""
    return switch_module(resources.files("patcher.runtime").joinpath("dynspec_switch.py").read_bytes())


@dataclass(frozen=True)
class _Seen:
    found: tuple[Found, ...]
    manifest: Manifest | None
    notes: tuple[str, ...]


def _see(tree: SglangTree, targets: Targets | None) -> _Seen:
    targets = targets or load()
    roles = targets.roles_for(tree.version)
    files: dict[str, tuple[str, bytes | None]] = {}
    try:
        for role, path in {**roles, SWITCH_ROLE: SWITCH_PATH}.items():
            files[role] = (path, disk.read_file(tree.package / path))
        manifest, originals = disk.read_state(tree.package)
    except OSError as error:
        raise DynspecError(
            "files that can be read",
            error.strerror or str(error),
            str(error.filename),
            "run as a user who may read them",
        ) from error
    # What a patch of another sglang left behind says nothing of this one.
    bound = manifest
    if manifest is not None and manifest.sglang_version != tree.version:
        # The module that was added is not sglang's, and no reinstallation of sglang takes it away.
        bound = replace(manifest, entries=tuple(e for e in manifest.entries if e.role == SWITCH_ROLE))
    links = {role: disk.link_target(tree.package / path) for role, (path, _) in files.items()}
    found = inspect(files, switch_source(), bound, originals, {r: t for r, t in links.items() if t})
    notes = []
    if tree.version is not None and tree.version not in targets.releases:
        notes.append(f"sglang {shown(tree.version)} is not a pinned release; its content decides")
    if manifest is not None and manifest.sglang_version != tree.version:
        notes.append(
            f"{STATE_DIR} was left by a patch of sglang {shown(manifest.sglang_version)}; this is {shown(tree.version)}"
        )
    untouched = (State.PRISTINE, State.MISSING, State.DRIFT, State.NOT_NEEDED)
    pristine = all(f.state in untouched for f in found if f.role != SWITCH_ROLE)
    if pristine and (
        manifest is not None or any(f.role == SWITCH_ROLE and f.current is not None for f in found)
    ):
        notes.append(
            "files of an earlier patch are left behind (sglang was reinstalled since); `dynspec revert` removes them"
        )
    for f in found:
        file = tree.package / f.path
        if f.current is not None and f.state is State.PRISTINE:
            if f.link is not None:
                notes.append(
                    f"{f.path} is a symbolic link to {os.path.realpath(file)}; patching puts a file in its place, "
                    "reverting puts the link back"
                )
            elif file.stat().st_nlink > 1:
                notes.append(
                    f"{f.path} shares its inode with {file.stat().st_nlink - 1} other name(s); those keep their bytes"
                )
    return _Seen(found, manifest, tuple(notes))


def status(tree: SglangTree, targets: Targets | None = None) -> SetResult:
    """What of this tree is patched. Reads only."""
    seen = _see(tree, targets)
    outcome, files = summarize(seen.found)
    return SetResult(
        "status",
        str(tree.package),
        tree.version,
        outcome,
        _EXIT.get(outcome, Exit.OK),
        files,
        _status_advice(seen.found, outcome, tree),
        seen.notes,
    )


def _status_advice(found: Sequence[Found], outcome: Outcome, tree: SglangTree) -> str:
    states = {f.state for f in found}
    if outcome is Outcome.FOREIGN and State.FOREIGN not in states:
        return f"patched by another dynspec version; `dynspec patch --sglang-root {tree.package}` renews it"
    return _advice("status", outcome, tree)


def patch(
    tree: SglangTree,
    *,
    only: Sequence[str] = (),
    dry_run: bool = False,
    check: bool = False,
    want_diff: bool = False,
    targets: Targets | None = None,
) -> Patched:
    """Patch a tree: every file of the set, or none.

    Args:
        only: roles for a deliberate part; empty means all.
        dry_run: plan and report, write nothing.
        check: as ``dry_run``, and exit code 1 if anything would change.
        want_diff: also render the unified diff of what is planned.

    Raises:
        DynspecError: usage (an unknown role), or an I/O failure after which everything is as before.
    """
    targets = targets or load()
    known = {*targets.roles_for(tree.version), SWITCH_ROLE}
    unknown = [role for role in only if role not in known]
    if unknown:
        raise DynspecError(
            f"a role: {', '.join(sorted(known))}",
            ", ".join(unknown),
            "--only",
            "name one of those",
            Exit.USAGE,
        )
    if dry_run or check:
        seen = _see(tree, targets)
        plan = plan_patch(seen.found, only, tree.version)
        exit_code = _EXIT.get(plan.outcome, Exit.OK)
        if check and plan.writes:
            exit_code = Exit.NOT_AS_ASKED
        result = _set(tree, "patch", plan, exit_code, seen.notes)
        return Patched(result, unified_diff(plan) if want_diff else "")
    with disk.locked(tree.package):
        seen = _see(tree, targets)
        disk.remove_leftovers(tree.package, [f.path for f in seen.found])
        plan = plan_patch(seen.found, only, tree.version)
        if plan.writes:
            disk.commit(tree.package, plan.writes, plan.manifest, plan.originals)
            files = tuple(
                replace(f, outcome=Outcome.APPLIED) if f.outcome is Outcome.WOULD_APPLY else f
                for f in plan.files
            )
            plan = replace(plan, outcome=Outcome.APPLIED, files=files)
    notes = seen.notes
    if only:
        notes += (f"only {', '.join(only)}: a deliberate part; `dynspec patch` writes the rest",)
    return Patched(
        _set(tree, "patch", plan, _EXIT.get(plan.outcome, Exit.OK), notes),
        unified_diff(plan) if want_diff else "",
    )


def revert(tree: SglangTree, targets: Targets | None = None) -> SetResult:
    """Put the original bytes back and remove what was added. Reverting an unpatched tree is fine and said aloud.

    Raises:
        DynspecError: an I/O failure after which everything is as before.
    """
    with disk.locked(tree.package):
        seen = _see(tree, targets)
        disk.remove_leftovers(tree.package, [f.path for f in seen.found])
        plan = plan_revert(seen.found)
        state = (tree.package / STATE_DIR).is_dir()
        if plan.outcome in (Outcome.REVERTED, Outcome.NOT_NEEDED) and (plan.writes or state):
            disk.commit(tree.package, plan.writes, None, {})
    return _set(tree, "revert", plan, _EXIT.get(plan.outcome, Exit.OK), ())


def _set(tree: SglangTree, command: str, plan: Plan, exit_code: Exit, notes: tuple[str, ...]) -> SetResult:
    return SetResult(
        command,
        str(tree.package),
        tree.version,
        plan.outcome,
        exit_code,
        plan.files,
        _advice(command, plan.outcome, tree),
        notes,
    )


def _advice(command: str, outcome: Outcome, tree: SglangTree) -> str:
    root = tree.package
    if command == "status" and outcome is Outcome.WOULD_APPLY:
        return f"not patched; `dynspec patch --sglang-root {root}` would write these files"
    if command == "revert" and outcome is Outcome.NOT_NEEDED:
        return "nothing of dynspec's is here; nothing to revert"
    return {
        Outcome.APPLIED: "patched; ask `dynspec verify` whether the switch is active, and restart running servers",
        Outcome.ALREADY: "patched: every byte is what this dynspec writes",
        Outcome.WOULD_APPLY: "nothing is written; run `dynspec patch` without --dry-run or --check to apply",
        Outcome.REVERTED: "the original bytes are back",
        Outcome.PARTIAL: f"some files are patched and some are not; `dynspec patch --sglang-root {root}` completes it",
        Outcome.DRIFT: "nothing is written: this sglang is not what dynspec knows; report the anchor, or use a release of `dynspec pins list`",
        Outcome.UNSUPPORTED: "nothing is written: this sglang has no such worker file; see `dynspec pins list` for what is supported",
        Outcome.FOREIGN: "nothing is written: a file was changed after dynspec wrote it. Save that change, put the file back as it was "
        "(reinstall sglang, or take the original from .dynspec/originals), and run the command again",
        Outcome.NOT_NEEDED: "this sglang has the argument itself",
    }.get(outcome, "")


def unified_diff(plan: Plan, prefix: str = "sglang") -> str:
    """The writes as a unified diff that ``git apply`` and ``patch -p1`` take, from the folder that holds ``sglang``."""
    parts = []
    for write in sorted(plan.writes, key=lambda w: w.path):
        name = f"{prefix}/{write.path}"
        old, new = _lines(write.old), _lines(write.new)
        parts.append(f"diff --git a/{name} b/{name}\n")
        if write.old is None:
            parts.append("new file mode 100644\n")
        fromfile = "/dev/null" if write.old is None else f"a/{name}"
        for line in difflib.unified_diff(old, new, fromfile, f"b/{name}", n=3):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def _lines(data: bytes | None) -> list[str]:
    """Lines with their own ends; bytes survive the round trip through surrogates."""
    if not data:
        return []
    lines = [line + b"\n" for line in data.split(b"\n")]  # on nothing else: git and patch do the same
    lines[-1] = lines[-1][:-1]
    return [line.decode("utf-8", "surrogateescape") for line in lines if line]


def export(text: str, path: Path) -> None:
    """Write a diff to a file, whole or not at all.

    Raises:
        DynspecError: the file can't be written.
    """
    try:
        disk.replace(path, text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise DynspecError(
            "a file that can be written", error.strerror or str(error), str(path), "name another path"
        ) from error


__all__ = [
    "FileResult",
    "Patched",
    "export",
    "patch",
    "revert",
    "sha256",
    "status",
    "switch_source",
    "unified_diff",
]
