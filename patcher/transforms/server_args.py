"""The field, the argument and its validation."""

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
    replaced,
    statements,
    the_class,
    the_method,
    with_method,
)

if TYPE_CHECKING:
    import libcst as cst

_FIELD = Block(
    1,
    "# dynspec: batch size from which decode batches skip speculation; 0 = never skip.\n"
    "speculative_disable_batch_threshold: int = 0\n",
)
_VALIDATE = Block(
    2,
    "# dynspec: refuse what cannot honour the threshold.\n"
    "from sglang.srt.speculative.dynspec_switch import validate_server_args\n"
    "\n"
    "validate_server_args(self)\n",
)
_ARGUMENT = Block(
    2,
    "# dynspec: the switch.\n"
    "from sglang.srt.speculative.dynspec_switch import add_cli_args as add_spec_switch_cli_args\n"
    "\n"
    "add_spec_switch_cli_args(parser, default=ServerArgs.speculative_disable_batch_threshold)\n",
)
_NEIGHBOUR = "speculative_num_draft_tokens"
_FLAG = "--speculative-num-draft-tokens"
_HANDLER = "_handle_speculative_decoding"


class ServerArgsTransform(Transform):
    """Target: ``srt/server_args.py``. Adds the field, the argument and the call that validates it.

    Why: the server has to accept ``--speculative-disable-batch-threshold``, and to refuse it where it can't be honoured.
    How: beside the neighbour ``speculative_num_draft_tokens``, and at the end of ``ServerArgs.__post_init__``.
    Upstream: https://github.com/sgl-project/sglang/issues/1979
    Remove when: sglang has the argument itself; the transform then answers ``not_needed``.
    """

    role = "server_args"

    def blocks(self) -> tuple[Block, ...]:
        return (_FIELD, _VALIDATE, _ARGUMENT)

    def not_needed(self, source: bytes) -> str | None:
        has_field = b"speculative_disable_batch_threshold:" in source
        if has_field and b"--speculative-disable-batch-threshold" in source and b"dynspec" not in source:
            return "this sglang has --speculative-disable-batch-threshold itself"
        return None

    def edit(self, module: cst.Module, tree: ast.Module) -> cst.Module:
        class_index, _ = the_class(module, tree, "ServerArgs", ("dataclasses.dataclass",))
        # from the end of the class to its start, so that places found first stay valid
        method = the_method(module, tree, class_index, "add_cli_args", ("staticmethod",))
        module = with_method(module, class_index, method.index, self._with_argument(module, tree, method))
        method = the_method(module, tree, class_index, "__post_init__")
        self._demand_handler(tree, method)
        changed = appended(method, statements(_VALIDATE, module), "ServerArgs.__post_init__")
        module = with_method(module, class_index, method.index, changed)
        return self._with_field(module, tree, class_index)

    @staticmethod
    def _with_field(module: cst.Module, tree: ast.Module, class_index: int) -> cst.Module:
        import libcst as cst
        from libcst import matchers as m

        owner = module.body[class_index]
        assert isinstance(owner, cst.ClassDef)
        field = m.SimpleStatementLine(body=[m.AnnAssign(target=m.Name(_NEIGHBOUR))])
        hits = [
            i
            for i, s in enumerate(owner.body.body)
            if isinstance(s, cst.SimpleStatementLine) and m.matches(s, field)
        ]
        (plain,) = (s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == "ServerArgs")
        bound = bindings(plain.body, _NEIGHBOUR)
        if not len(hits) == len(bound) == 1:
            raise DriftError(
                f"the annotated field {_NEIGHBOUR}, once, in class ServerArgs",
                f"{len(hits)} such field(s), bound on line(s) {bound}",
                candidates(tree, _NEIGHBOUR),
            )
        new = owner.body.with_changes(body=inserted(owner.body.body, hits[0] + 1, statements(_FIELD, module)))
        return module.with_changes(body=replaced(module.body, class_index, owner.with_changes(body=new)))

    @staticmethod
    def _with_argument(module: cst.Module, tree: ast.Module, method: Found) -> cst.FunctionDef:
        from libcst import matchers as m

        flag = m.Arg(m.SimpleString(f'"{_FLAG}"') | m.SimpleString(f"'{_FLAG}'"))
        call = m.SimpleStatementLine(
            body=[
                m.Expr(
                    m.Call(
                        func=m.Attribute(m.Name("parser"), m.Name("add_argument")),
                        args=[flag, m.ZeroOrMore()],
                    )
                )
            ]
        )
        body = method.node.body.body
        hits = [i for i, s in enumerate(body) if m.matches(s, call)]
        named = [
            n.lineno
            for n in own_nodes(method.plain)
            if isinstance(n, ast.Call)
            and any(isinstance(a, ast.Constant) and a.value == _FLAG for a in n.args)
        ]
        if not len(hits) == len(named) == 1:
            raise DriftError(
                f'parser.add_argument("{_FLAG}", ...), once, in ServerArgs.add_cli_args',
                f"{len(hits)} such statement(s), calls with it on line(s) {sorted(named)}",
                candidates(tree, _FLAG),
            )
        return method.node.with_changes(
            body=method.node.body.with_changes(
                body=inserted(body, hits[0] + 1, statements(_ARGUMENT, module))
            )
        )

    @staticmethod
    def _demand_handler(tree: ast.Module, method: Found) -> None:
        from libcst import matchers as m

        target = m.Attribute(m.Name("self"), m.Name(_HANDLER))
        call = m.SimpleStatementLine(body=[m.Expr(m.Call(func=target, args=[]))])
        hits = sum(m.matches(s, call) for s in method.node.body.body)
        named = [n for n in own_nodes(method.plain) if isinstance(n, ast.Attribute) and n.attr == _HANDLER]
        if not hits == len(named) == 1:
            raise DriftError(
                f"self.{_HANDLER}(), once, in ServerArgs.__post_init__",
                f"{hits} such statement(s), named {len(named)} time(s)",
                candidates(tree, _HANDLER),
            )
