"""The field, the argument and its validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import (
    Block,
    DriftError,
    Transform,
    appended,
    inserted,
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

    def edit(self, module: cst.Module, text: str) -> cst.Module:
        class_index, owner = the_class(module, text, "ServerArgs")
        # from the end of the class to its start, so that places found first stay valid
        index, method = the_method(module, text, owner, "add_cli_args", ("staticmethod",))
        module = with_method(module, class_index, index, self._with_argument(module, method))
        index, method = the_method(module, text, owner, "__post_init__")
        self._demand_handler(method)
        module = with_method(
            module,
            class_index,
            index,
            appended(method, statements(_VALIDATE, module), "ServerArgs.__post_init__"),
        )
        return self._with_field(module, class_index)

    @staticmethod
    def _with_field(module: cst.Module, class_index: int) -> cst.Module:
        import libcst as cst
        from libcst import matchers as m

        owner = module.body[class_index]
        assert isinstance(owner, cst.ClassDef)
        body = list(owner.body.body)
        field = m.SimpleStatementLine(body=[m.AnnAssign(target=m.Name(_NEIGHBOUR))])
        hits = [i for i, s in enumerate(body) if m.matches(s, field)]
        if len(hits) != 1:
            raise DriftError(
                f"the field {_NEIGHBOUR}, once, in class ServerArgs", f"{len(hits)} such field(s)"
            )
        new = owner.body.with_changes(body=inserted(body, hits[0] + 1, statements(_FIELD, module)))
        return module.with_changes(body=replaced(module.body, class_index, owner.with_changes(body=new)))

    @staticmethod
    def _with_argument(module: cst.Module, method: cst.FunctionDef) -> cst.FunctionDef:
        from libcst import matchers as m

        call = m.SimpleStatementLine(
            body=[
                m.Expr(
                    m.Call(
                        func=m.Attribute(m.Name("parser"), m.Name("add_argument")),
                        args=[
                            m.Arg(m.SimpleString(f'"{_FLAG}"') | m.SimpleString(f"'{_FLAG}'")),
                            m.ZeroOrMore(),
                        ],
                    )
                )
            ]
        )
        body = list(method.body.body)
        hits = [i for i, s in enumerate(body) if m.matches(s, call)]
        if len(hits) != 1:
            raise DriftError(
                f'parser.add_argument("{_FLAG}", ...), once, in ServerArgs.add_cli_args',
                f"{len(hits)} such statement(s)",
            )
        return method.with_changes(
            body=method.body.with_changes(body=inserted(body, hits[0] + 1, statements(_ARGUMENT, module)))
        )

    @staticmethod
    def _demand_handler(method: cst.FunctionDef) -> None:
        from libcst import matchers as m

        call = m.SimpleStatementLine(
            body=[
                m.Expr(
                    m.Call(func=m.Attribute(m.Name("self"), m.Name("_handle_speculative_decoding")), args=[])
                )
            ]
        )
        hits = sum(m.matches(s, call) for s in method.body.body)
        if hits != 1:
            raise DriftError(
                "self._handle_speculative_decoding(), once, in ServerArgs.__post_init__",
                f"{hits} such statement(s)",
            )
