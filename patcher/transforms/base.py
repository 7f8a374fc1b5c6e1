"""What a transform is, what it may answer, and the LibCST pieces that all of them share.

A transform is pure: bytes in, a closed set of answers out. It only ever inserts whole statements; taking exactly those
lines away again (:meth:`Transform.strip`) gives the input back byte for byte, and every edit is checked for that.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .proven import PROVEN

if TYPE_CHECKING:
    import libcst as cst

BOM = b"\xef\xbb\xbf"
MARKERS = (b"dynspec", b"speculative_disable_batch_threshold", b"spec_disable_batch_threshold")
_UNITS = (b"    ", b"\t", b"  ", b"   ", b"        ")  # one level of indentation


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
    def edit(self, module: cst.Module, tree: ast.Module) -> cst.Module:
        """Insert our statements. ``tree`` is the same module as CPython reads it: what each scope binds is asked there.

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
        for unit in _UNITS:
            stripped = self._without(source, unit, _newline(source))
            if stripped is not None:
                return None if self.traces(stripped) else stripped
        return None

    def _without(self, source: bytes, unit: bytes, newline: bytes) -> bytes | None:
        position, kept = 0, []
        for block in self.blocks():
            data = _render(block, unit, newline)
            if source.count(data) != 1:
                return None
            start = source.index(data)
            if start < position or not (start == 0 or source[start - 1 : start] == b"\n"):
                return None
            kept.append(source[position:start])
            position = start + len(data)
        kept.append(source[position:])
        return b"".join(kept)

    def replay(self, source: bytes) -> Edited | None:
        """What :meth:`apply` makes of a pinned release's file, without LibCST; None for any other file.

        Our blocks go in before the lines that :mod:`.proven` names, and the result counts only if its digest is the
        one that :meth:`apply` gave.
        """
        known = PROVEN.get(self.role, {}).get(hashlib.sha256(source).hexdigest())
        if known is None:
            return None
        digest, places = known
        lines = source.splitlines(keepends=True)
        blocks = [_render(block, b"    ", b"\n") for block in self.blocks()]
        for place, data in sorted(zip(places, blocks, strict=False), reverse=True):
            lines.insert(place, data)
        new = b"".join(lines)
        return Edited(new) if hashlib.sha256(new).hexdigest() == digest else None

    def makes(self, original: bytes, patched: bytes) -> bool:
        """Whether :meth:`apply` turns ``original`` into exactly ``patched``.

        For a pinned release its digests say so (:mod:`.proven`, which the tests hold against :meth:`apply`), and
        LibCST is not even imported; anything else is applied and compared.
        """
        known = PROVEN.get(self.role, {}).get(hashlib.sha256(original).hexdigest())
        if known is not None and known[0] == hashlib.sha256(patched).hexdigest():
            return True
        again = self.apply(original)
        return isinstance(again, Edited) and again.new == patched

    def apply(self, source: bytes) -> Result:
        """Patch ``source``; see the answers' own texts."""
        if self.traces(source):
            why = self.not_needed(source)
            if why is not None:
                return NotNeeded(why)
            stripped = self.strip(source)
            if stripped is not None and self.makes(stripped, source):
                return Already()
            return Drift(
                "a file without dynspec's lines, or with all of them", "half patched, or edited since"
            )
        parsed = parse(source)
        if isinstance(parsed, ParseFailed):
            return parsed
        try:
            new = self.edit(*parsed).bytes
        except DriftError as error:
            return error.drift
        if source.startswith(BOM):
            new = BOM + new
        if self.strip(new) != source:
            return Drift(
                "a file whose other bytes stay as they are",
                "more than whole inserted lines would change (line ends of several kinds, or none at the file's end)",
            )
        failure = _does_not_compile(new)
        if failure is not None:
            return Drift("a result that compiles", failure)
        return Edited(new)


def parse(source: bytes) -> tuple[cst.Module, ast.Module] | ParseFailed:
    """Parse bytes with whatever the parsers may throw at valid and invalid code turned into a value."""
    import warnings

    import libcst as cst

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # CPython's parser first: it refuses nesting on which LibCST's overflows the stack.
            tree = ast.parse(source)
    except SyntaxError as error:
        return ParseFailed(error.lineno, error.msg)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        return ParseFailed(None, f"{type(error).__name__}: {error}")
    try:
        return cst.parse_module(source[len(BOM) :] if source.startswith(BOM) else source), tree
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


def _render(block: Block, unit: bytes, newline: bytes) -> bytes:
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


def bindings(scope: Sequence[ast.stmt], name: str) -> list[int]:
    """Lines on which a scope's own statements bind or delete a name, in whatever form and under whatever condition."""
    lines, stack = [], list[ast.AST](scope)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                lines.append(node.lineno)
            continue  # another scope
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines += [node.lineno for a in node.names if (a.asname or a.name.split(".")[0]) == name]
        elif isinstance(node, ast.Name):
            if node.id == name and not isinstance(node.ctx, ast.Load):
                lines.append(node.lineno)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name == name:
            lines.append(node.lineno)
        stack.extend(ast.iter_child_nodes(node))
    return sorted(lines)


@functools.lru_cache(maxsize=1)
def every_node(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file; walked once, since ``server_args.py`` has some 80,000."""
    return tuple(ast.walk(tree))


def overwritten(tree: ast.Module, owner: str, name: str) -> list[int]:
    """Lines that put something else in a method's place from outside the class body: ``Owner.name = ...``, ``setattr``."""
    receivers, lines = {owner, "self", "cls"}, []
    for node in every_node(tree):
        if isinstance(node, ast.Attribute):
            value, hit = node.value, node.attr == name and not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            value, key = node.args[:2]
            hit = (
                node.func.id in ("setattr", "delattr") and isinstance(key, ast.Constant) and key.value == name
            )
        else:
            continue
        if hit and isinstance(value, ast.Name) and value.id in receivers:
            lines.append(node.lineno)
    return lines


def candidates(tree: ast.Module, name: str) -> list[str]:
    """Where a name (or a string of that value) stands in the file and in which class, for drift reports."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST, owner: str) -> None:
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                kind = "class" if isinstance(node, ast.ClassDef) else "def"
                found.append((line, f"{kind} {name}{owner}, line {line}"))
            if isinstance(node, ast.ClassDef):
                owner = f" in class {node.name}"
        elif (
            (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.Attribute) and node.attr == name)
            or (isinstance(node, ast.alias) and (node.asname or node.name) == name)
            or (isinstance(node, ast.Constant) and node.value == name)
        ):
            found.append((line, f"{name}{owner}, line {line}"))
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    visit(tree, "")
    return [text for _, text in sorted(found)][:10]


def ends(statement: ast.stmt) -> bool:
    """Whether control can't go on behind this statement."""
    if isinstance(statement, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        return True
    if isinstance(statement, ast.If):
        return all(branch and ends(branch[-1]) for branch in (statement.body, statement.orelse))
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return ends(statement.body[-1])
    if isinstance(statement, ast.While):
        endless = isinstance(statement.test, ast.Constant) and bool(statement.test.value)
        return endless and not any(isinstance(n, ast.Break) for n in ast.walk(statement))
    if isinstance(statement, ast.Try):
        if statement.finalbody and ends(statement.finalbody[-1]):
            return True
        normal = statement.orelse or statement.body
        return ends(normal[-1]) and all(ends(handler.body[-1]) for handler in statement.handlers)
    return False


def own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function's body without those of functions and classes defined in it."""
    out, stack = [], list[ast.AST](function.body)
    while stack:
        node = stack.pop()
        out.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
    return out


@dataclass(frozen=True)
class Found:
    """A method in both trees: to edit (``node``, ``index`` in its class) and to ask (``plain``)."""

    index: int
    node: cst.FunctionDef
    plain: ast.FunctionDef


def the_class(
    module: cst.Module, tree: ast.Module, name: str, decorators: tuple[str, ...] = ()
) -> tuple[int, cst.ClassDef]:
    """The one top-level class of that name with exactly these decorators, and its place in the module's body."""
    import libcst as cst

    anchor = f"class {name}, once, at top level"
    hits = [(i, s) for i, s in enumerate(module.body) if isinstance(s, cst.ClassDef) and s.name.value == name]
    bound = bindings(tree.body, name)
    defined = [n for n in every_node(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if not len(hits) == len(bound) == len(defined) == 1:
        raise DriftError(
            anchor,
            f"{len(defined)} class(es) of that name, {len(hits)} at top level, bound on line(s) {bound}",
            candidates(tree, name),
        )
    index, owner = hits[0]
    names = tuple(module.code_for_node(d.decorator) for d in owner.decorators)
    if names != decorators:
        raise DriftError(
            anchor, f"its decorators are {list(names)}, not {list(decorators)}", candidates(tree, name)
        )
    return index, owner


def the_method(
    module: cst.Module, tree: ast.Module, class_index: int, name: str, decorators: tuple[str, ...] = ()
) -> Found:
    """The one method of that name in a top-level class's own body, with exactly these decorators."""
    import libcst as cst

    owner, plain = module.body[class_index], tree.body
    assert isinstance(owner, cst.ClassDef)
    anchor = f"def {name}, once, in class {owner.name.value}"
    (same,) = (s for s in plain if isinstance(s, ast.ClassDef) and s.name == owner.name.value)
    hits = [
        (i, s)
        for i, s in enumerate(owner.body.body)
        if isinstance(s, cst.FunctionDef) and s.name.value == name
    ]
    bound, elsewhere = bindings(same.body, name), overwritten(tree, same.name, name)
    if not len(hits) == len(bound) == 1 or elsewhere:
        what = f"{len(hits)} definition(s), bound on line(s) {bound}"
        what += f", overwritten on line(s) {elsewhere}" if elsewhere else ""
        raise DriftError(anchor, what, candidates(tree, name))
    index, method = hits[0]
    names = tuple(module.code_for_node(d.decorator) for d in method.decorators)
    if names != decorators or method.asynchronous is not None:
        kind = (
            "it is async"
            if method.asynchronous
            else f"its decorators are {list(names)}, not {list(decorators)}"
        )
        raise DriftError(anchor, kind, candidates(tree, name))
    if not isinstance(method.body, cst.IndentedBlock):
        raise DriftError(anchor, "its body is on the line of its head", candidates(tree, name))
    (function,) = (s for s in same.body if isinstance(s, ast.FunctionDef) and s.name == name)
    return Found(index, method, function)


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


def appended(method: Found, nodes: Sequence[cst.CSTNode], where: str) -> cst.FunctionDef:
    """Put statements at a function's end, which must be reached."""
    import libcst as cst

    stops = [s.lineno for s in method.plain.body if ends(s)]
    if stops:
        raise DriftError(
            f"the end of {where}", f"it is never reached: see line {stops[0]}", (f"line {stops[0]}",)
        )
    body = method.node.body
    assert isinstance(body, cst.IndentedBlock)
    # Comments behind the last statement belong to the block's footer, which stays behind what is put in.
    return method.node.with_changes(body=body.with_changes(body=[*body.body, *nodes]))
