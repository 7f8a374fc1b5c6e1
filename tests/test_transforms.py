"""The codemods on real sources and on near misses. Whole-tree behaviour is in test_engine.py."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher.transforms import TRANSFORMS
from patcher.transforms.base import Already, Drift, Edited, NotNeeded, ParseFailed, Result

RELEASES = ("0.5.9", "0.5.12")
PATHS = {
    "server_args": "srt/server_args.py",
    "eagle_worker": "srt/speculative/eagle_worker.py",
    "eagle_worker_v2": "srt/speculative/eagle_worker_v2.py",
}
GOLDEN = Path(__file__).parent / "fixtures" / "golden"

SERVER_ARGS = """\
import argparse
import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    speculative_num_draft_tokens: int = 4
    speculative_token_map: str = ""

    def __post_init__(self):
        self._handle_speculative_decoding()
        self._handle_other_validations()

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-num-draft-tokens", type=int)
        parser.add_argument("--speculative-token-map")
"""
WORKER = '''\
import logging

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)


class EAGLEWorker:
    def __init__(self, server_args, target_worker):
        self.server_args = server_args
        # a last comment

    def forward_batch_generation(self, batch):
        """Docstring."""
        # a first comment
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return 1
        else:
            return 2
'''


def read(release_dir: Callable[[str], Path], version: str, role: str) -> bytes:
    return (release_dir(version) / "sglang" / PATHS[role]).read_bytes()


def zero_context_diff(role: str, before: bytes, after: bytes) -> str:
    """Our own lines and where they go; nothing of sglang's text."""
    lines = difflib.unified_diff(
        before.decode().splitlines(),
        after.decode().splitlines(),
        f"a/{PATHS[role]}",
        f"b/{PATHS[role]}",
        n=0,
        lineterm="",
    )
    return "\n".join(lines) + "\n"


def check_transformed(role: str, source: bytes) -> bytes:
    """Right, and right in every variant: compiles, a second pass changes nothing, stripping gives the input back."""
    transform = TRANSFORMS[role]
    first = b""
    for variant in (source, source.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + source):
        result = transform.apply(variant)
        assert isinstance(result, Edited), result
        compile(result.new, role, "exec")
        assert result.new.count(b"#") >= variant.count(b"#")
        assert transform.apply(result.new) == Already()
        assert transform.strip(result.new) == variant
        assert (b"\r\n" in result.new) == (b"\r\n" in variant)
        first = first or result.new
    return first


def check_noop(role: str, source: str | bytes) -> Result:
    """Refused: the answer is not an edit."""
    result = TRANSFORMS[role].apply(source if isinstance(source, bytes) else source.encode())
    assert not isinstance(result, (Edited, Already)), result
    return result


@pytest.mark.parametrize("role", PATHS)
@pytest.mark.parametrize("version", RELEASES)
def test_real_sources_give_the_golden(version: str, role: str, release_dir: Callable[[str], Path]) -> None:
    source = read(release_dir, version, role)
    diff = zero_context_diff(role, source, check_transformed(role, source))
    assert diff == (GOLDEN / version / f"{role}.diff").read_text(), "refresh with scripts/refresh_goldens.py"
    assert not [line for line in diff.splitlines() if line.startswith("-") and not line.startswith("---")]


@pytest.mark.parametrize(("role", "source"), [("server_args", SERVER_ARGS), ("eagle_worker", WORKER)])
@pytest.mark.parametrize("unit", ["    ", "\t", "  "])
def test_small_sources_in_other_indentations(role: str, source: str, unit: str) -> None:
    new = check_transformed(role, source.replace("    ", unit).encode()).decode()
    own_levels = {line[: len(line) - len(line.lstrip())] for line in new.splitlines() if line.strip()}
    assert own_levels <= {unit * level for level in range(6)}


def test_the_parts_stand_where_they_belong() -> None:
    new = check_transformed("eagle_worker", WORKER.encode()).decode()
    order = [
        "from sglang.srt.speculative.spec_info", "from sglang.srt.speculative import dynspec_switch", "logger = ",
        "self.server_args = server_args", "self.spec_switch = dynspec_switch.build(self, version=1)", "logger.info(",
        "# a last comment" if new.index("# a last comment") > new.index("logger.info(") else "def forward_batch_generation",
        '"""Docstring."""', "dynspec_switch.skips(self, batch)", "# a first comment", "is_extend()",
    ]  # fmt: skip
    places = [new.index(text) for text in order]
    assert places == sorted(places)


def sub(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


NEAR_MISSES: list[tuple[str, str, Callable[[str], str]]] = [
    ("class renamed", "eagle_worker", sub("class EAGLEWorker:", "class EagleWorker:")),
    ("class doubled", "eagle_worker", lambda s: s + "\n\nclass EAGLEWorker:\n    pass\n"),
    ("class doubled under a condition", "eagle_worker", lambda s: s + "\nif logger:\n    class EAGLEWorker:\n        pass\n"),
    ("class nested", "eagle_worker", lambda s: s.replace("class EAGLEWorker:", "class A:\n  class EAGLEWorker:")),
    ("method renamed", "eagle_worker", sub("def forward_batch_generation", "def forward")),
    ("method doubled", "eagle_worker", lambda s: s + "\n    def forward_batch_generation(self, batch):\n        pass\n"),
    ("method under a condition", "eagle_worker", lambda s: s + "\n    if True:\n        def forward_batch_generation(self, batch):\n            pass\n"),
    ("method rebound", "eagle_worker", lambda s: s + "\n    forward_batch_generation = None\n"),
    ("method decorated", "eagle_worker", sub("    def forward_batch", "    @torch.no_grad()\n    def forward_batch")),
    ("method async", "eagle_worker", sub("    def forward_batch", "    async def forward_batch")),
    ("parameter renamed", "eagle_worker", lambda s: s.replace("batch)", "b)").replace("batch.", "b.")),
    ("no extend branch", "eagle_worker", sub("batch.forward_mode.is_extend()", "batch.is_prefill()")),
    ("constructor returns", "eagle_worker", sub("        # a last comment", "        return")),
    ("constructor raises", "eagle_worker", sub("        # a last comment", "        raise ValueError")),
    ("constructor without server_args", "eagle_worker", lambda s: s.replace("server_args, target", "args, target").replace("= server_args", "= args")),
    ("no logger", "eagle_worker", sub("logger = logging", "log = logging")),
    ("no import from speculative", "eagle_worker", sub("from sglang.srt.speculative.spec_info import SpeculativeAlgorithm\n", "")),
    ("dynspec_switch means something else", "eagle_worker", sub("import logging\n", "import logging\nimport other as dynspec_switch\n")),
    ("half of our lines", "eagle_worker", lambda s: s + "\n    # self.spec_disable_batch_threshold\n"),
    ("field missing", "server_args", sub("    speculative_num_draft_tokens: int = 4\n", "")),
    ("field without annotation", "server_args", sub("speculative_num_draft_tokens: int = 4", "speculative_num_draft_tokens = 4")),
    ("field doubled", "server_args", sub("    speculative_token_map", "    speculative_num_draft_tokens: int = 5\n    speculative_token_map")),
    ("argument missing", "server_args", sub("--speculative-num-draft-tokens", "--num-draft-tokens")),
    ("argument doubled", "server_args", lambda s: s + '        parser.add_argument("--speculative-num-draft-tokens", type=int)\n'),
    ("argument of a group", "server_args", sub("parser.add_argument(\"--speculative-num", "group.add_argument(\"--speculative-num")),
    ("argument under a condition", "server_args", sub('        parser.add_argument("--speculative-num-draft-tokens", type=int)', '        if True:\n            parser.add_argument("--speculative-num-draft-tokens", type=int)')),
    ("handler not called", "server_args", sub("        self._handle_speculative_decoding()\n", "")),
    ("handler called twice", "server_args", lambda s: s.replace("        self._handle_speculative_decoding()\n", 2 * "        self._handle_speculative_decoding()\n")),
    ("not a static method", "server_args", sub("    @staticmethod\n", "    @classmethod\n")),
    ("post-init returns", "server_args", sub("        self._handle_other_validations()", "        return")),
    ("class rebound", "eagle_worker", lambda s: s + "\nEAGLEWorker = object\n"),
    ("class rebound by an import", "eagle_worker", lambda s: s + "\nfrom other import EAGLEWorker\n"),
    ("class decorated", "eagle_worker", sub("class EAGLEWorker", "@replace\nclass EAGLEWorker")),
    ("method redefined in a loop", "eagle_worker", lambda s: s + "\n    for _ in (1,):\n        def forward_batch_generation(self, batch):\n            pass\n"),
    ("method rebound under a condition", "eagle_worker", lambda s: s + "\n    if logger:\n        forward_batch_generation = None\n"),
    ("method rebound in a tuple", "eagle_worker", lambda s: s + "\n    forward_batch_generation, x = 1, 2\n"),
    ("method rebound by an import", "eagle_worker", lambda s: s + "\n    from other import forward_batch_generation\n"),
    ("method deleted", "eagle_worker", lambda s: s + "\n    del forward_batch_generation\n"),
    ("method overwritten from outside", "eagle_worker", lambda s: s + "\nEAGLEWorker.forward_batch_generation = print\n"),
    ("method overwritten by setattr", "eagle_worker", lambda s: s + "\nsetattr(EAGLEWorker, 'forward_batch_generation', print)\n"),
    ("method overwritten in the instance", "eagle_worker", sub("        # a last comment", "        self.forward_batch_generation = print")),
    ("method is a generator", "eagle_worker", sub("return 2", "yield 2")),
    ("method moved to another class", "eagle_worker", sub("    def forward_batch", "\nclass Other:\n    def forward_batch")),
    ("constructor returns early", "eagle_worker", sub("        # a last comment", "        if server_args:\n            return\n        self.x = 1")),
    ("constructor returns in each branch", "eagle_worker", sub("        # a last comment", "        if server_args:\n            return\n        else:\n            return")),
    ("constructor never ends", "eagle_worker", sub("        # a last comment", "        while True:\n            pass")),
    ("constructor rebinds server_args", "eagle_worker", sub("        # a last comment", "        server_args = None")),
    ("logger of another kind", "eagle_worker", sub("logging.getLogger(__name__)", "make()")),
    ("logger rebound under a condition", "eagle_worker", lambda s: s + "\nif x:\n    logger = None\n"),
    ("last import below the class", "eagle_worker", lambda s: s + "\nfrom sglang.srt.speculative.late import x\n"),
    ("class without decorator", "server_args", sub("@dataclasses.dataclass\n", "")),
    ("field moved to another class", "server_args", lambda s: s.replace("    speculative_num_draft_tokens: int = 4\n", "") + "\n\nclass Other:\n    speculative_num_draft_tokens: int = 4\n"),
    ("field again under a condition", "server_args", sub("    speculative_token_map", "    if True:\n        speculative_num_draft_tokens: int = 5\n    speculative_token_map")),
    ("field assigned again", "server_args", sub("    speculative_token_map", "    speculative_num_draft_tokens = 5\n    speculative_token_map")),
    ("argument moved to another method", "server_args", sub("        parser.add_argument(\"--speculative-num", "        pass\n\n    @staticmethod\n    def more(parser):\n        parser.add_argument(\"--speculative-num")),
    ("argument again under a condition", "server_args", lambda s: s + '        if True:\n            parser.add_argument("--speculative-num-draft-tokens")\n'),
    ("argument again in a group", "server_args", lambda s: s + '        group.add_argument("--speculative-num-draft-tokens")\n'),
    ("argument bound to a name", "server_args", sub("        parser.add_argument(\"--speculative-num", "        x = parser.add_argument(\"--speculative-num")),
    ("handler again under a condition", "server_args", sub("        self._handle_other", "        if True:\n            self._handle_speculative_decoding()\n        self._handle_other")),
    ("handler with an argument", "server_args", sub("_speculative_decoding()", "_speculative_decoding(1)")),
    ("post-init raises in each branch", "server_args", sub("        self._handle_other_validations()", "        if self:\n            raise ValueError\n        else:\n            raise TypeError")),
    ("no line end after the insertion's place", "server_args", lambda s: s.replace("        parser.add_argument(\"--speculative-token-map\")\n", "").rstrip("\n")),
    ("does not parse", "server_args", lambda s: s + "def f(:\n"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "change"), [m[1:] for m in NEAR_MISSES], ids=[m[0] for m in NEAR_MISSES])
def test_near_misses_are_refused(role: str, change: Callable[[str], str]) -> None:
    source = SERVER_ARGS if role == "server_args" else WORKER
    changed = change(source)
    assert changed != source
    result = check_noop(role, changed)
    assert isinstance(result, (Drift, ParseFailed))


@pytest.mark.parametrize("role", PATHS)
@pytest.mark.parametrize("version", RELEASES)
def test_real_sources_half_reverted_are_refused(
    version: str, role: str, release_dir: Callable[[str], Path]
) -> None:
    transform = TRANSFORMS[role]
    result = transform.apply(read(release_dir, version, role))
    assert isinstance(result, Edited)
    for block in transform.blocks():
        ours = block.text.splitlines()
        lines = result.new.splitlines(keepends=True)
        (place,) = (i for i, line in enumerate(lines) if line.strip() == ours[0].encode())
        half = b"".join(lines[:place] + lines[place + len(ours) :])
        check_noop(role, half)
        assert transform.strip(half) is None


def test_drift_names_the_candidates() -> None:
    doubled = WORKER + "\n    def forward_batch_generation(self, batch):\n        pass\n"
    result = check_noop("eagle_worker", doubled)
    assert isinstance(result, Drift)
    assert result.candidates == tuple(
        f"def forward_batch_generation in class EAGLEWorker, line {line}" for line in (13, 21)
    )


def test_encoding_cookie_is_kept() -> None:
    for cookie, encoding in (("latin-1", "latin-1"), ("utf-8", "utf-8")):
        text = f"# -*- coding: {cookie} -*-\n" + WORKER.replace("a first comment", "caf\u00e9")
        source = text.encode(encoding)
        for variant in (source, source.replace(b"\n", b"\r\n")):
            result = TRANSFORMS["eagle_worker"].apply(variant)
            assert isinstance(result, Edited), result
            assert result.new.splitlines()[0] == variant.splitlines()[0]
            compile(result.new, "worker", "exec")
            assert TRANSFORMS["eagle_worker"].strip(result.new) == variant
            assert TRANSFORMS["eagle_worker"].apply(result.new) == Already()
    unlabelled = WORKER.replace("a first comment", "caf\u00e9").encode("latin-1")
    assert isinstance(check_noop("eagle_worker", unlabelled), ParseFailed)


def test_a_panic_of_the_parser_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import libcst

    class PanicException(BaseException):
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(libcst, "parse_module", panic)
    assert isinstance(check_noop("eagle_worker", WORKER), ParseFailed)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe", b"x = 1\0", b"# -*- coding: nonsense -*-\nx = 1\n", b"(" * 3000],
    ids=["bytes", "null", "cookie", "deep"],
)
def test_what_no_parser_takes_is_refused(data: bytes) -> None:
    for role in TRANSFORMS:
        check_noop(role, data)


def test_upstream_has_it() -> None:
    text = SERVER_ARGS.replace(
        "    speculative_token_map",
        "    speculative_disable_batch_threshold: int = 0\n    speculative_token_map",
    )
    text += '        parser.add_argument("--speculative-disable-batch-threshold", type=int)\n'
    assert isinstance(TRANSFORMS["server_args"].apply(text.encode()), NotNeeded)


def test_losing_any_line_of_ours_is_noticed() -> None:
    for role, source in (("server_args", SERVER_ARGS), ("eagle_worker", WORKER)):
        lines = check_transformed(role, source.encode()).decode().splitlines(keepends=True)
        ours = [i for i, line in enumerate(lines) if line not in source.splitlines(keepends=True)]
        assert len(ours) > 5
        for i in ours:
            without = "".join(lines[:i] + lines[i + 1 :])
            assert not isinstance(TRANSFORMS[role].apply(without.encode()), (Already, Edited)), lines[i]
            assert TRANSFORMS[role].strip(without.encode()) is None


def test_goldens_hold_our_lines_only() -> None:
    ours = "\n".join(block.text for t in TRANSFORMS.values() for block in t.blocks()).splitlines()
    for golden in GOLDEN.rglob("*.diff"):
        for line in golden.read_text().splitlines():
            assert line.startswith(("---", "+++", "@@ ")) or line[1:].strip() in {o.strip() for o in ours}, (
                golden,
                line,
            )


def test_refresh_script_changes_nothing() -> None:
    script = Path(__file__).parent.parent / "scripts" / "refresh_goldens.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
