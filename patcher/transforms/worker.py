"""What the two worker transforms share: import, attribute with marker, and the call in the decode path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import (
    Block,
    DriftError,
    Transform,
    appended,
    inserted,
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

    def edit(self, module: cst.Module, text: str) -> cst.Module:
        self._demand_logger(module)
        class_index, owner = the_class(module, text, self.class_name)
        index, method = the_method(module, text, owner, _STEP)
        module = with_method(module, class_index, index, self._with_step(module, method))
        index, method = the_method(module, text, owner, "__init__")
        self._demand_parameters(method)
        where = f"{self.class_name}.__init__"
        module = with_method(
            module, class_index, index, appended(method, statements(self._construct(), module), where)
        )
        return self._with_import(module)

    def _with_step(self, module: cst.Module, method: cst.FunctionDef) -> cst.FunctionDef:
        import libcst as cst
        from libcst import matchers as m

        anchor = f"{self.class_name}.{_STEP}"
        names = [p.name.value for p in method.params.params]
        if names[:2] != ["self", self.batch]:
            raise DriftError(f"{anchor}(self, {self.batch})", f"its parameters are {names}")
        body = list(method.body.body)
        mode = m.Attribute(m.Name(self.batch), m.Name("forward_mode"))
        is_extend = m.Call(func=m.Attribute(mode, m.Name("is_extend")))
        branch = m.If(test=is_extend | m.BooleanOperation(left=is_extend, operator=m.Or()))
        hits = sum(m.matches(s, branch) for s in body)
        if hits != 1:
            raise DriftError(
                f"if {self.batch}.forward_mode.is_extend() or ..., once, in {anchor}",
                f"{hits} such statement(s)",
            )
        docstring = m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString())])
        start = 1 if m.matches(body[0], docstring) else 0
        assert isinstance(method.body, cst.IndentedBlock)
        return method.with_changes(
            body=method.body.with_changes(body=inserted(body, start, statements(self._step(), module)))
        )

    def _demand_parameters(self, method: cst.FunctionDef) -> None:
        names = [p.name.value for p in (*method.params.params, *method.params.kwonly_params)]
        missing = [n for n in ("server_args", "target_worker") if n not in names]
        if missing:
            raise DriftError(
                f"{self.class_name}.__init__ with server_args and target_worker",
                f"its parameters are {names}",
            )

    @staticmethod
    def _demand_logger(module: cst.Module) -> None:
        from libcst import matchers as m

        logger = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name("logger"))])])
        hits = sum(m.matches(s, logger) for s in module.body)
        if hits != 1:
            raise DriftError(
                "logger = logging.getLogger(__name__), once, at top level", f"{hits} such statement(s)"
            )

    @staticmethod
    def _with_import(module: cst.Module) -> cst.Module:
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
        return module.with_changes(body=inserted(module.body, last + 1, statements(_IMPORT, module)))
