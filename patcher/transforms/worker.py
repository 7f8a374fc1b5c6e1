"""What the two worker transforms share: import, attribute with marker, and the call in the decode path."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from .base import (
    Block,
    DriftError,
    Found,
    Transform,
    appended,
    bindings,
    candidates,
    inserted,
    own_nodes,
    statements,
    the_class,
    the_method,
    with_method,
)

if TYPE_CHECKING:
    import libcst as cst

_IMPORT = Block(0, "from sglang.srt.speculative import dynspec_switch\n")
_PACKAGE = "sglang.srt.speculative"
_STEP = "forward_batch_generation"


class WorkerTransform(Transform):
    """A speculative worker's file; subclasses name the class and the worker generation."""

    class_name: str
    version: int
    batch: str

    def blocks(self) -> tuple[Block, ...]:
        return (_IMPORT, self._construct(), self._step())

    def _construct(self) -> Block:
        return Block(
            2,
            "# dynspec: no speculation for decode batches of this many requests or more.\n"
            'self.spec_disable_batch_threshold = getattr(server_args, "speculative_disable_batch_threshold", 0)\n'
            f"self.spec_switch = dynspec_switch.build(self, version={self.version})\n"
            "if self.spec_disable_batch_threshold > 0:\n"
            "    logger.info(\n"
            '        "Dynamic speculation disable enabled: threshold=%d (worker=%s, dynspec=%s)",\n'
            "        self.spec_disable_batch_threshold,\n"
            "        type(self).__name__,\n"
            "        dynspec_switch.DYNSPEC_VERSION,\n"
            "    )\n",
        )

    def _step(self) -> Block:
        return Block(
            2,
            f"if dynspec_switch.skips(self, {self.batch}):\n"
            f"    return dynspec_switch.step(self, {self.batch})\n",
        )

    def edit(self, module: cst.Module, tree: ast.Module) -> cst.Module:
        self._demand_logger(module, tree)
        class_index, _ = the_class(module, tree, self.class_name)
        method = the_method(module, tree, class_index, _STEP)
        module = with_method(module, class_index, method.index, self._with_step(module, tree, method))
        method = the_method(module, tree, class_index, "__init__")
        self._demand_parameters(method)
        changed = appended(method, statements(self._construct(), module), f"{self.class_name}.__init__")
        module = with_method(module, class_index, method.index, changed)
        return self._with_import(module, tree, class_index)

    def _with_step(self, module: cst.Module, tree: ast.Module, method: Found) -> cst.FunctionDef:
        import libcst as cst
        from libcst import matchers as m

        anchor = f"{self.class_name}.{_STEP}"
        names = [p.name.value for p in method.node.params.params]
        if names[:2] != ["self", self.batch]:
            raise DriftError(
                f"{anchor}(self, {self.batch})", f"its parameters are {names}", candidates(tree, _STEP)
            )
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in own_nodes(method.plain)):
            raise DriftError(f"{anchor}, a plain function", "it is a generator", candidates(tree, _STEP))
        body = list(method.node.body.body)
        mode = m.Attribute(m.Name(self.batch), m.Name("forward_mode"))
        is_extend = m.Call(func=m.Attribute(mode, m.Name("is_extend")))
        branch = m.If(test=is_extend | m.BooleanOperation(left=is_extend, operator=m.Or()))
        hits = sum(m.matches(s, branch) for s in body)
        if hits != 1:
            raise DriftError(
                f"if {self.batch}.forward_mode.is_extend() or ..., once, in {anchor}",
                f"{hits} such statement(s)",
                candidates(tree, "is_extend"),
            )
        docstring = m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString())])
        start = 1 if m.matches(body[0], docstring) else 0
        block = method.node.body
        assert isinstance(block, cst.IndentedBlock)
        return method.node.with_changes(
            body=block.with_changes(body=inserted(body, start, statements(self._step(), module)))
        )

    def _demand_parameters(self, method: Found) -> None:
        arguments = method.plain.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        where = f"{self.class_name}.__init__"
        if names[:1] != ["self"] or not {"server_args", "target_worker"} <= set(names):
            raise DriftError(
                f"{where} with self, server_args and target_worker", f"its parameters are {names}"
            )
        # what our lines use has to be what they mean by it
        for name in ("logger", "server_args", "self", "getattr", "type"):
            lines = bindings(method.plain.body, name)
            if lines or (name not in ("self", "server_args") and name in names):
                raise DriftError(f"{name} as it comes into {where}", f"rebound in it, line(s) {lines}")
        returns = sorted(n.lineno for n in own_nodes(method.plain) if isinstance(n, ast.Return))
        if returns:
            raise DriftError(f"the end of {where}, always reached", f"it returns early on line(s) {returns}")

    @staticmethod
    def _demand_logger(module: cst.Module, tree: ast.Module) -> None:
        from libcst import matchers as m

        call = m.Call(m.Attribute(m.Name("logging"), m.Name("getLogger")), [m.Arg(m.Name("__name__"))])
        logger = m.SimpleStatementLine(body=[m.Assign([m.AssignTarget(m.Name("logger"))], call)])
        hits = sum(m.matches(s, logger) for s in module.body)
        if not hits == len(bindings(tree.body, "logger")) == 1:
            raise DriftError(
                "logger = logging.getLogger(__name__), once, at top level",
                f"{hits} such statement(s)",
                candidates(tree, "logger"),
            )

    @staticmethod
    def _with_import(module: cst.Module, tree: ast.Module, class_index: int) -> cst.Module:
        import libcst as cst
        from libcst import matchers as m

        last = None
        for i, statement in enumerate(module.body):
            if not m.matches(statement, m.SimpleStatementLine(body=[m.ImportFrom()])):
                continue
            assert isinstance(statement, cst.SimpleStatementLine)
            source = statement.body[0]
            assert isinstance(source, cst.ImportFrom)
            name = (
                module.code_for_node(source.module)
                if source.module is not None and not source.relative
                else ""
            )
            if name == _PACKAGE or name.startswith(_PACKAGE + "."):
                last = i
        if last is None:
            raise DriftError(f"an import from {_PACKAGE} at top level", "none")
        if last > class_index:
            raise DriftError(
                f"the last import from {_PACKAGE}, before the class", "it stands below the class"
            )
        return module.with_changes(body=inserted(module.body, last + 1, statements(_IMPORT, module)))
