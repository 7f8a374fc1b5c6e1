"""What a transform is, what it may answer, and the LibCST pieces that all of them share.

A transform is pure: bytes in, a closed set of answers out. It only ever inserts whole statements; taking exactly those
lines away again (:meth:`Transform.strip`) gives the input back byte for byte, and every edit is checked for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import libcst as cst

BOM = b"\xef\xbb\xbf"
MARKERS = (b"dynspec", b"speculative_disable_batch_threshold", b"spec_disable_batch_threshold")


@dataclass(frozen=True)
class Edited:
    """The change was made."""

    new: bytes


@dataclass(frozen=True)
class Already:
    """Exactly our insertions are there."""


@dataclass(frozen=True)
class NotNeeded:
    """Upstream has it."""

    why: str


@dataclass(frozen=True)
class Drift:
    """An anchor is missing, moved or ambiguous."""

    anchor: str
    found: str
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParseFailed:
    """The file is not Python that LibCST can read."""

    line: int | None
    message: str


@dataclass(frozen=True)
class Block:
    """One insertion: whole statements as text (LF, four spaces a level, not indented) and their level in the file."""

    level: int
    text: str


Result = Edited | Already | NotNeeded | Drift | ParseFailed


class DriftError(Exception):
    """Carries a :class:`Drift` out of nested anchor look-ups."""

    def __init__(self, anchor: str, found: str, candidates: Sequence[str] = ()) -> None:
        super().__init__(anchor)
        self.drift = Drift(anchor, found, tuple(candidates))


class Transform(ABC):
    """One file of sglang."""

    role: str

    @abstractmethod
    def edit(self, module: cst.Module, text: str) -> cst.Module:
        """Insert our statements. ``text`` is the module's source, for drift reports.

        Raises:
            DriftError: an anchor is not there exactly once.
        """

    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """Our insertions, in the order in which they stand in the file."""

    def not_needed(self, source: bytes) -> str | None:
        """Why upstream makes the transform unnecessary, or None."""
        return None

    def traces(self, source: bytes) -> bool:
        """Whether anything of ours is in the file."""
        return any(marker in source for marker in MARKERS)

    def strip(self, source: bytes) -> bytes | None:
        """The file without our insertions; None unless each of them is there exactly once, in order."""
        newline = _newline(source)
        position, kept = 0, []
        for block in self.blocks():
            data = _render(block, source, newline)
            if source.count(data) != 1:
                return None
            start = source.index(data)
            if start < position or not (start == 0 or source[start - 1 : start] == b"\n"):
                return None
            kept.append(source[position:start])
            position = start + len(data)
        kept.append(source[position:])
        stripped = b"".join(kept)
        return None if self.traces(stripped) else stripped

    def apply(self, source: bytes) -> Result:
        """Patch ``source``; see the answers' own texts."""
        if self.traces(source):
            why = self.not_needed(source)
            if why is not None:
                return NotNeeded(why)
            stripped = self.strip(source)
            if stripped is not None:
                again = self.apply(stripped)
                if isinstance(again, Edited) and again.new == source:
                    return Already()
            return Drift(
                "a file without dynspec's lines, or with all of them", "half patched, or edited since"
            )
        module = parse(source)
        if isinstance(module, ParseFailed):
            return module
        try:
            new = self.edit(module, source.decode("utf-8", "replace")).bytes
        except DriftError as error:
            return error.drift
        if source.startswith(BOM):
            new = BOM + new
        if self.strip(new) != source:
            return Drift(
                "a file whose other bytes stay as they are",
                "LibCST would change more than the inserted lines",
            )
        failure = _does_not_compile(new)
        if failure is not None:
            return Drift("a result that compiles", failure)
        return Edited(new)


def parse(source: bytes) -> cst.Module | ParseFailed:
    """Parse bytes with whatever the parser may throw at valid and invalid code turned into a value."""
    import ast
    import warnings

    import libcst as cst

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # CPython's parser first: it refuses nesting on which LibCST's overflows the stack.
            ast.parse(source)
    except SyntaxError as error:
        return ParseFailed(error.lineno, error.msg)
    except (ValueError, MemoryError, RecursionError) as error:
        return ParseFailed(None, f"{type(error).__name__}: {error}")
    try:
        return cst.parse_module(source[len(BOM) :] if source.startswith(BOM) else source)
    except cst.ParserSyntaxError as error:
        return ParseFailed(error.raw_line, error.message)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # LibCST's native parser panics with a BaseException (LibCST#1061, #901)
        return ParseFailed(None, f"{type(error).__name__}: {error}")


def _does_not_compile(data: bytes) -> str | None:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, "<patched>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _newline(source: bytes) -> bytes:
    end = source.find(b"\n")
    return b"\r\n" if end > 0 and source[end - 1 : end] == b"\r" else b"\n"


def _indent(source: bytes) -> bytes:
    """The file's own indentation unit, as LibCST guesses it: that of the first indented line after a colon."""
    import re

    counts: dict[bytes, int] = {}
    for match in re.finditer(rb":[ \t]*\r?\n([ \t]+)\S", source[:200_000]):
        counts[match[1]] = counts.get(match[1], 0) + 1
    units = sorted(counts, key=len)
    return units[0] if units else b"    "


def _render(block: Block, source: bytes, newline: bytes) -> bytes:
    unit = b"    " if b"\n    " in source else _indent(source)
    lines = []
    for line in block.text.splitlines():
        body = line.lstrip(" ")
        lines.append(unit * (block.level + (len(line) - len(body)) // 4) + body.encode() if body else b"")
    return newline.join(lines) + newline


# ------------------------------------------------------------------- anchors


def _reindented(text: str, unit: str) -> str:
    """``text`` with its levels of four spaces in another unit, also inside brackets, where LibCST keeps them literally."""
    lines = [line.lstrip(" ") for line in text.splitlines()]
    return "".join(
        unit * ((len(whole) - len(body)) // 4) + body + "\n"
        for whole, body in zip(text.splitlines(), lines, strict=True)
    )


def statements(block: Block, module: cst.Module) -> list[cst.BaseStatement]:
    """A block as statements in the file's own line ends and indentation; leading comments and blank lines kept."""
    import libcst as cst

    config = module.config_for_parsing
    newline = config.default_newline
    assert isinstance(newline, str)
    parsed = cst.parse_module(
        _reindented(block.text, module.default_indent).replace("\n", newline), config=config
    )
    body = []
    for i, statement in enumerate(parsed.body):
        leading = [*parsed.header, *statement.leading_lines] if i == 0 else statement.leading_lines
        # an empty line stays empty instead of taking the block's indentation
        lines = [line if line.comment else line.with_changes(indent=False) for line in leading]
        body.append(statement.with_changes(leading_lines=lines))
    return body  # type: ignore[return-value]


def all_named(text: str, name: str) -> list[str]:
    """Where definitions of this name stand in the file, for drift reports."""
    import re

    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(rf"(\s*)(?:async\s+)?(class|def)\s+({re.escape(name)})\b", line)
        if match:
            found.append(f"{match[2]} {name}, line {number}")
    return found


def the_class(module: cst.Module, text: str, name: str) -> tuple[int, cst.ClassDef]:
    """The one top-level class of that name, and its place in the module's body."""
    import libcst as cst

    hits = [(i, s) for i, s in enumerate(module.body) if isinstance(s, cst.ClassDef) and s.name.value == name]
    everywhere = all_named(text, name)
    if len(hits) != 1 or len(everywhere) != 1:
        raise DriftError(
            f"class {name}, once, at top level",
            f"{len(everywhere)} definition(s), {len(hits)} at top level",
            everywhere,
        )
    return hits[0]


def the_method(
    module: cst.Module, text: str, owner: cst.ClassDef, name: str, decorators: tuple[str, ...] = ()
) -> tuple[int, cst.FunctionDef]:
    """The one method of that name in a class's own body, with exactly these decorators."""
    import libcst as cst
    from libcst import matchers as m

    body = owner.body.body
    anchor = f"def {name}, once, in class {owner.name.value}"
    hits = [(i, s) for i, s in enumerate(body) if m.matches(s, m.FunctionDef(name=m.Name(name)))]
    nested = [
        s
        for s in body
        if isinstance(s, (cst.If, cst.Try, cst.With)) and m.findall(s, m.FunctionDef(name=m.Name(name)))
    ]
    rebound = [
        s
        for s in body
        if m.matches(
            s,
            m.SimpleStatementLine(
                body=[
                    m.OneOf(
                        m.Assign(targets=[m.AssignTarget(target=m.Name(name))]),
                        m.AnnAssign(target=m.Name(name)),
                    )
                ]
            ),
        )
    ]
    if len(hits) != 1 or nested or rebound:
        what = (
            f"{len(hits)} definition(s)"
            + (", and one under a condition" if nested else "")
            + (", and it is assigned" if rebound else "")
        )
        raise DriftError(anchor, what, all_named(text, name))
    index, method = hits[0]
    assert isinstance(method, cst.FunctionDef)
    names = tuple(module.code_for_node(d.decorator) for d in method.decorators)
    if names != decorators or method.asynchronous is not None:
        raise DriftError(
            anchor, f"its decorators are {list(names)}, not {list(decorators)}", all_named(text, name)
        )
    if not isinstance(method.body, cst.IndentedBlock):
        raise DriftError(anchor, "its body is on the line of its head", all_named(text, name))
    return index, method


def replaced(sequence: Sequence[cst.CSTNode], index: int, node: cst.CSTNode) -> list[cst.CSTNode]:
    """A copy of ``sequence`` with one element changed."""
    out = list(sequence)
    out[index] = node
    return out


def inserted(sequence: Sequence[cst.CSTNode], index: int, nodes: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """A copy of ``sequence`` with ``nodes`` put in before ``index``."""
    return [*sequence[:index], *nodes, *sequence[index:]]


def with_method(
    module: cst.Module, class_index: int, method_index: int, method: cst.FunctionDef
) -> cst.Module:
    """The module with one method of one top-level class changed."""
    import libcst as cst

    owner = module.body[class_index]
    assert isinstance(owner, cst.ClassDef)
    body = owner.body.with_changes(body=replaced(owner.body.body, method_index, method))
    return module.with_changes(body=replaced(module.body, class_index, owner.with_changes(body=body)))


def appended(method: cst.FunctionDef, nodes: Sequence[cst.CSTNode], where: str) -> cst.FunctionDef:
    """Put statements at a function's end, which must be reached."""
    import libcst as cst
    from libcst import matchers as m

    last = method.body.body[-1]
    if m.matches(last, m.SimpleStatementLine(body=[m.ZeroOrMore(), m.OneOf(m.Return(), m.Raise())])):
        raise DriftError(f"the end of {where}", "its last statement returns or raises")
    assert isinstance(method.body, cst.IndentedBlock)
    # Comments behind the last statement belong to the block's footer, which stays behind what is put in.
    return method.with_changes(body=method.body.with_changes(body=[*method.body.body, *nodes]))
