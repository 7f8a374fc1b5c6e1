"""What is in a tree, and what a command would make of it. Pure: bytes in, values out.

:func:`inspect` says of each file what it is; :func:`plan_patch` and :func:`plan_revert` turn that into writes. Nothing
here reads or writes a file, so a plan can be shown, checked or thrown away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from . import __version__
from .manifest import Entry, Manifest
from .outcomes import FileResult, Outcome
from .transforms import TRANSFORMS
from .transforms.base import Already, Drift, Edited, NotNeeded, Transform

SWITCH_ROLE = "spec_switch"
SWITCH_PATH = "srt/speculative/dynspec_switch.py"
_PLACEHOLDER = b'DYNSPEC_VERSION = "0.0.0+source"'
# The switch first and the flag last: at no moment does a file need another one that is not there yet.
WRITE_ORDER = (SWITCH_ROLE, "eagle_worker", "eagle_worker_v2", "server_args")


class State(Enum):
    """What one file of the tree is."""

    PRISTINE = "pristine"
    OURS = "ours"  # the bytes are what this dynspec writes
    OUTDATED = "outdated"  # the bytes are what another dynspec wrote, and its original is at hand
    NOT_NEEDED = "not_needed"
    FOREIGN = "foreign"
    REMNANT = "remnant"  # part of the patch is there, and nothing says how it came about
    DRIFT = "drift"
    MISSING = "missing"


@dataclass(frozen=True)
class Found:
    """One file: what it is, its bytes now, before us, and as this dynspec would write them."""

    role: str
    path: str
    state: State
    current: bytes | None
    original: bytes | None
    patched: bytes | None
    detail: str = ""
    entry: Entry | None = None
    link: str | None = None


@dataclass(frozen=True)
class Write:
    """One change of the tree. ``new`` None removes the file; ``old`` is what has to be there at that moment.

    ``old_link``, ``new_link``: where the file is a symbolic link before or after, and leads there.
    """

    role: str
    path: str
    old: bytes | None
    new: bytes | None
    old_link: str | None = None
    new_link: str | None = None


@dataclass(frozen=True)
class Plan:
    """Results as a dry run reports them, the writes in order, and the manifest that will then hold."""

    outcome: Outcome
    files: tuple[FileResult, ...]
    writes: tuple[Write, ...]
    manifest: Manifest | None
    originals: Mapping[str, bytes]


def sha256(data: bytes | None) -> str | None:
    """Hex digest of ``data``, None for None."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def switch_module(source: bytes) -> bytes:
    """The vendored module as it is written: ``source`` with this dynspec's version in it.

    Raises:
        ValueError: the placeholder is not there exactly once.
    """
    if source.count(_PLACEHOLDER) != 1:
        raise ValueError(
            "patcher/runtime/dynspec_switch.py: the version placeholder must be there exactly once"
        )
    return source.replace(_PLACEHOLDER, f'DYNSPEC_VERSION = "{__version__}"'.encode())


def inspect(
    files: Mapping[str, tuple[str, bytes | None]],
    switch: bytes,
    manifest: Manifest | None,
    originals: Mapping[str, bytes],
    links: Mapping[str, str] | None = None,
) -> tuple[Found, ...]:
    """Say what each file is.

    Args:
        files: role -> (path, bytes or None when the file is not there), without the switch's module.
        switch: the bytes that the vendored module ought to have; ``files[SWITCH_ROLE]`` holds what is there.
        manifest, originals: what an earlier run left; input, never trusted: every use is checked by digest.
        links: role -> target, for the files that are symbolic links.
    """
    found = []
    for role, (path, current) in files.items():
        entry = manifest.entry(role) if manifest else None
        if role == SWITCH_ROLE:
            one = _inspect_switch(path, current, switch, entry)
        else:
            one = _inspect_file(role, path, current, entry, originals.get(role))
        found.append(replace(one, entry=entry, link=(links or {}).get(role)))
    return tuple(found)


def _wrote(entry: Entry | None, data: bytes) -> bool:
    """Whether an entry names these bytes as written by dynspec, this one or the one whose patch it was renewing."""
    return entry is not None and sha256(data) in (entry.after_sha256, entry.renews_sha256)


def _only_added_to(original: bytes, current: bytes) -> bool:
    """Whether ``current`` is ``original`` with lines put in: going back then loses nothing but those."""
    lines = iter(current.splitlines(keepends=True))
    return all(line in lines for line in original.splitlines(keepends=True))


def _inspect_switch(path: str, current: bytes | None, switch: bytes, entry: Entry | None) -> Found:
    if current is None:
        return Found(SWITCH_ROLE, path, State.PRISTINE, None, None, switch)
    if current == switch:
        return Found(SWITCH_ROLE, path, State.OURS, current, None, switch)
    if _wrote(entry, current):
        return Found(
            SWITCH_ROLE, path, State.OUTDATED, current, None, switch, "written by another dynspec version"
        )
    return Found(
        SWITCH_ROLE,
        path,
        State.FOREIGN,
        current,
        None,
        None,
        "not the module that dynspec writes; edited, or somebody else's",
    )


def _inspect_file(
    role: str, path: str, current: bytes | None, entry: Entry | None, original: bytes | None
) -> Found:
    transform = TRANSFORMS[role]
    if current is None:
        return Found(role, path, State.MISSING, None, None, None, "this sglang has no such file")
    stripped = transform.strip(current)
    if stripped is not None and transform.makes(stripped, current):
        if entry is not None and not _wrote(entry, current):
            detail = "changed by somebody else after dynspec wrote it, outside dynspec's own lines"
            return Found(role, path, State.FOREIGN, current, stripped, None, detail)
        return Found(role, path, State.OURS, current, stripped, current)
    if not transform.traces(current):
        result = transform.replay(current) or transform.apply(current)
        if isinstance(result, Edited):
            return Found(role, path, State.PRISTINE, current, current, result.new)
        if isinstance(result, NotNeeded):
            return Found(role, path, State.NOT_NEEDED, current, current, None, result.why)
        return Found(role, path, State.DRIFT, current, None, None, _explain(result))
    if entry is not None and original is not None and entry.before_sha256 == sha256(original):
        renewed = _renewed(transform, original, current) if _wrote(entry, current) else None
        if renewed is not None:
            return Found(
                role, path, State.OUTDATED, current, original, renewed, "written by another dynspec version"
            )
        return Found(
            role,
            path,
            State.FOREIGN,
            current,
            original,
            None,
            "changed by somebody else after dynspec wrote it; the original is kept",
        )
    result = transform.apply(current)
    if isinstance(result, NotNeeded):
        return Found(role, path, State.NOT_NEEDED, current, current, None, result.why)
    if entry is not None:
        return Found(
            role, path, State.FOREIGN, current, None, None, "changed by somebody else after dynspec wrote it"
        )
    return Found(
        role,
        path,
        State.REMNANT,
        current,
        None,
        None,
        "has parts of dynspec's patch but not all of it: " + _explain(result),
    )


def _renewed(transform: Transform, original: bytes, current: bytes) -> bytes | None:
    """What this dynspec makes of the original of another one's patch; None where that would lose more than its lines."""
    if transform.traces(original) or not _only_added_to(original, current):
        return None
    again = transform.apply(original)
    return again.new if isinstance(again, Edited) else None


def _explain(result: object) -> str:
    if isinstance(result, Drift):
        where = "; candidates: " + ", ".join(result.candidates) if result.candidates else ""
        return f"anchor {result.anchor}: {result.found}{where}"
    if isinstance(result, Already):
        return "the patch is there but its bytes are not what dynspec writes"
    line, message = getattr(result, "line", None), getattr(result, "message", result)
    return f"does not parse{f' (line {line})' if line else ''}: {message}"


def _result(found: Found, outcome: Outcome, after: bytes | None, detail: str = "") -> FileResult:
    return FileResult(
        found.role, found.path, outcome, sha256(found.current), sha256(after), detail or found.detail
    )


_BLOCKING = {
    State.DRIFT: Outcome.DRIFT,
    State.REMNANT: Outcome.DRIFT,
    State.FOREIGN: Outcome.FOREIGN,
    State.MISSING: Outcome.UNSUPPORTED,
}


def _blocked(found: Sequence[Found]) -> Outcome | None:
    states = {f.state for f in found}
    for state in (State.DRIFT, State.REMNANT, State.MISSING, State.FOREIGN):
        if state in states:
            return _BLOCKING[state]
    return None


def plan_patch(found: Sequence[Found], only: Sequence[str], sglang_version: str | None) -> Plan:
    """Plan ``patch``. ``only`` names the roles to write (the switch's module comes with any); empty means all."""
    chosen = [f for f in found if not only or f.role in only or f.role == SWITCH_ROLE]
    blocked = _blocked(chosen)
    results, writes = [], []
    entries: list[Entry] = []
    originals: dict[str, bytes] = {}
    for f in chosen:
        if f.state in _BLOCKING:
            results.append(_result(f, _BLOCKING[f.state], f.current))
        elif f.state is State.NOT_NEEDED:
            results.append(_result(f, Outcome.NOT_NEEDED, f.current))
        elif f.state is State.OURS:
            results.append(_result(f, Outcome.ALREADY, f.current))
        else:
            results.append(_result(f, Outcome.WOULD_APPLY, f.patched))
            writes.append(Write(f.role, f.path, f.current, f.patched, f.link))
    for f in found:
        entry = _entry(f, f in chosen)
        if entry is not None:
            entries.append(entry)
            if f.original is not None:
                originals[f.role] = f.original
    if blocked is not None:
        return Plan(blocked, tuple(results), (), None, {})
    if not writes:
        states = {f.state for f in chosen if f.role != SWITCH_ROLE}
        outcome = Outcome.NOT_NEEDED if states == {State.NOT_NEEDED} else Outcome.ALREADY
        return Plan(outcome, tuple(results), (), None, {})
    if {f.state for f in chosen if f.role != SWITCH_ROLE} == {State.NOT_NEEDED}:
        return Plan(Outcome.NOT_NEEDED, tuple(r for r in results if r.role != SWITCH_ROLE), (), None, {})
    writes.sort(key=lambda w: WRITE_ORDER.index(w.role))
    manifest = Manifest.of(sglang_version, entries)
    return Plan(Outcome.WOULD_APPLY, tuple(results), tuple(writes), manifest, originals)


def _entry(f: Found, chosen: bool) -> Entry | None:
    """What the manifest says of a file once the plan is carried out."""
    link = f.link if f.state is State.PRISTINE else f.entry.link if f.entry else None
    before, now, after = sha256(f.original), sha256(f.current) or "", sha256(f.patched) or ""
    if f.state is State.OURS or (chosen and f.state is State.PRISTINE):
        return Entry(f.role, f.path, before, after, None, link)
    if f.state is State.OUTDATED:
        return Entry(f.role, f.path, before, after if chosen else now, now if chosen else None, link)
    return f.entry if f.state is State.FOREIGN else None


def plan_revert(found: Sequence[Found]) -> Plan:
    """Plan ``revert``: the original bytes back everywhere, or nothing where that would lose somebody's edit."""
    results, writes = [], []
    blocked = None
    for f in found:
        ours = f.state in (State.OURS, State.OUTDATED)
        if f.state in (State.FOREIGN, State.REMNANT):
            blocked = Outcome.FOREIGN
            results.append(_result(f, Outcome.FOREIGN, f.current))
        elif ours:
            results.append(_result(f, Outcome.REVERTED, f.original))
            link = f.entry.link if f.entry else None
            writes.append(Write(f.role, f.path, f.current, f.original, f.link, link))
        else:
            results.append(_result(f, Outcome.NOT_NEEDED, f.current, f.detail or "not patched"))
    if blocked is not None:
        return Plan(
            blocked, tuple(r if r.outcome is Outcome.FOREIGN else _kept(r) for r in results), (), None, {}
        )
    writes.sort(key=lambda w: WRITE_ORDER.index(w.role), reverse=True)
    return Plan(Outcome.REVERTED if writes else Outcome.NOT_NEEDED, tuple(results), tuple(writes), None, {})


def _kept(result: FileResult) -> FileResult:
    if result.outcome is not Outcome.REVERTED:
        return result
    return FileResult(
        result.role, result.path, Outcome.ALREADY, result.before_sha256, result.before_sha256, "left as it is"
    )


_STATUS = {
    State.PRISTINE: Outcome.WOULD_APPLY,
    State.OURS: Outcome.ALREADY,
    State.OUTDATED: Outcome.FOREIGN,
    State.NOT_NEEDED: Outcome.NOT_NEEDED,
    State.FOREIGN: Outcome.FOREIGN,
    State.REMNANT: Outcome.DRIFT,
    State.DRIFT: Outcome.DRIFT,
    State.MISSING: Outcome.UNSUPPORTED,
}


def summarize(found: Sequence[Found]) -> tuple[Outcome, tuple[FileResult, ...]]:
    """``status``: one outcome for each file and one for the set."""
    results = tuple(
        _result(
            f,
            _STATUS[f.state],
            f.current,
            "written by another dynspec version; `dynspec patch` renews it"
            if f.state is State.OUTDATED
            else "",
        )
        for f in found
    )
    blocked = _blocked(found)
    if blocked is not None:
        return blocked, results
    outcomes = {r.outcome for r in results if r.role != SWITCH_ROLE} - {Outcome.NOT_NEEDED}
    switch = next(r.outcome for r in results if r.role == SWITCH_ROLE)
    if Outcome.FOREIGN in outcomes | {switch}:
        return Outcome.FOREIGN, results
    if not outcomes:
        return Outcome.NOT_NEEDED, results
    if outcomes == {Outcome.WOULD_APPLY}:
        return Outcome.WOULD_APPLY, results
    if outcomes == {Outcome.ALREADY} and switch is Outcome.ALREADY:
        return Outcome.ALREADY, results
    return Outcome.PARTIAL, results
