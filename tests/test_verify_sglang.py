"""``verify`` on real sglang, in the environments that ``scripts/setup.py`` makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from patcher import engine, locate, verify
from patcher.outcomes import Level, Verdict

pytestmark = pytest.mark.sglang

SCHEMA = json.loads(resources.files("patcher").joinpath("schemas/verify.schema.json").read_text())
V1, V2 = "EAGLEWorker", "EAGLEWorkerV2"
FILES = {V1: "srt/speculative/eagle_worker.py", V2: "srt/speculative/eagle_worker_v2.py"}
THRESHOLD = ("--speculative-disable-batch-threshold", "24")


def interpreter(version: str) -> str:
    """The Python of the environment with that sglang; a failure, with the command that makes it, where there is none."""
    root = Path(os.environ.get("DYNSPEC_ENVS") or Path.home() / ".cache/dynspec/envs")
    for name in (version, f"e{version}"):
        python = root / name / "bin" / "python"
        if python.exists():
            return str(python)
    pytest.fail(
        f"no environment with sglang {version} in {root}; make it with `scripts/setup.py` (or set DYNSPEC_ENVS)"
    )


class Site:
    """A directory with its own copy of sglang, to be put first on the path of the environment's interpreter."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version, self.directory, self.python = version, directory, interpreter(version)
        self.package = directory / "sglang"

    @property
    def tree(self) -> locate.SglangTree:
        return locate.find_root(self.directory)

    def rewrite(self, path: str, change: Callable[[str], str]) -> None:
        """Edits a file of this copy alone: the copy shares inodes with its origin."""
        file = self.package / path
        before = file.read_text()
        after = change(before)
        assert after != before
        file.unlink()
        file.write_text(after)
        for stale in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            stale.unlink()

    def verify(
        self, *argv: str, level: Level = Level.CONSTRUCT, require_active: bool = False
    ) -> verify.VerifyResult:
        result = verify.run(
            self.tree,
            self.python,
            argv,
            level=level,
            require_active=require_active,
            source=self.source(),
            timeout=300,
        )
        jsonschema.validate(result.to_json(), SCHEMA)
        print(verify.render(result))
        return result

    def source(self) -> verify.SetResult:
        return engine.status(self.tree)

    def copy(self, directory: Path) -> Site:
        directory.mkdir(parents=True)
        for entry in self.directory.iterdir():
            shutil.copytree(entry, directory / entry.name, copy_function=os.link, symlinks=True)
        return Site(self.version, directory)


class Sabotaged(Site):
    """A copy edited after patching, of which the source level still believes that it is ours."""

    believed: verify.SetResult

    def source(self) -> verify.SetResult:
        return self.believed


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    """Unpatched copies of the environments' sglang, one for each version."""
    made: dict[str, Site] = {}

    def of(version: str) -> Site:
        if version not in made:
            site = Path(interpreter(version)).parent.parent
            (package,) = site.glob("lib/python3*/site-packages/sglang")
            directory = tmp_path_factory.mktemp(f"sglang-{version}")
            for entry in (package, *package.parent.glob("sglang-*.dist-info")):
                shutil.copytree(entry, directory / entry.name, copy_function=shutil.copy2, symlinks=True)
            made[version] = Site(version, directory)
        return made[version]

    return of


@pytest.fixture(scope="session")
def patched(
    originals: Callable[[str], Site], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Site]:
    """Copies with every file patched, one for each version."""
    made: dict[str, Site] = {}

    def of(version: str) -> Site:
        if version not in made:
            made[version] = originals(version).copy(tmp_path_factory.mktemp("patched") / version)
            engine.patch(made[version].tree)
        return made[version]

    return of


@pytest.fixture(scope="session")
def incident(originals: Callable[[str], Site], tmp_path_factory: pytest.TempPathFactory) -> Site:
    """0.5.9 as the old script left it: ``server_args.py`` and ``eagle_worker_v2.py`` patched, nothing else."""
    site = originals("0.5.9").copy(tmp_path_factory.mktemp("incident") / "0.5.9")
    engine.patch(site.tree, only=["server_args", "eagle_worker_v2"])
    return site


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of a user whose model is an 8B llama (only its configuration: selection reads no weights)."""
    root = tmp_path_factory.mktemp("user")
    common = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    for name, architecture, layers in (
        ("target", "LlamaForCausalLM", 32),
        ("draft", "LlamaForCausalLMEagle3", 1),
    ):
        (root / name).mkdir()
        config = {**common, "architectures": [architecture], "num_hidden_layers": layers}
        (root / name / "config.json").write_text(json.dumps(config))
    return ("--model-path", str(root / "target"), "--speculative-draft-model-path", str(root / "draft"))


@pytest.fixture
def eagle3(model: tuple[str, ...]) -> tuple[str, ...]:
    return (*model, "--speculative-algorithm", "EAGLE3", *shape(1))


def shape(topk: int) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", "4"),
    )


@pytest.fixture(autouse=True)
def neutral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Site], None]:
    """Starts in an empty directory, with sglang's switch unset; returns how to put a site on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)

    def use(site: Site) -> None:
        monkeypatch.setenv("PYTHONPATH", str(site.directory))

    return use


# --------------------------------------------------------------------------- the incident


def test_incident_is_inert(incident: Site, eagle3: tuple[str, ...], neutral: Callable[[Site], None]) -> None:
    neutral(incident)
    result = incident.verify(*eagle3, *THRESHOLD)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.INERT, Level.SELECT, 1)
    assert result.selected is not None
    assert result.selected.class_name == V1
    assert result.selected.file == str(incident.package / FILES[V1])
    because = result.selected.because or ""
    for said in ("disable_overlap_schedule=True", "SGLANG_ENABLE_SPEC_V2 is off (unset, default off)", V2):
        assert said in because
    for said in (
        V1,
        FILES[V1],
        FILES[V2],
        "srt/server_args.py",
        f"dynspec patch --sglang-root {incident.package}",
    ):
        assert said in result.detail
    assert because in result.detail


def test_incident_with_the_variable_is_active(
    incident: Site, eagle3: tuple[str, ...], neutral: Callable[[Site], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    neutral(incident)
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "True")
    assert incident.verify(*eagle3, *THRESHOLD).verdict is Verdict.ACTIVE


# --------------------------------------------------------------------------------- active


@pytest.mark.parametrize(
    ("version", "variable", "options", "worker", "because"),
    [
        ("0.5.9", None, shape(1), V1, "SGLANG_ENABLE_SPEC_V2 is off (unset, default off)"),
        ("0.5.9", "True", shape(1), V2, "SGLANG_ENABLE_SPEC_V2 is on (set to 'True')"),
        ("0.5.12", None, shape(1), V2, "SGLANG_ENABLE_SPEC_V2 is on (unset, default on)"),
        ("0.5.12", None, shape(2), V1, "--speculative-eagle-topk is 2"),
        ("0.5.12", "False", shape(1), V1, "SGLANG_ENABLE_SPEC_V2 is off (set to 'False')"),
        (
            "0.5.12",
            None,
            (*shape(1), "--disable-overlap-schedule"),
            V1,
            "--disable-overlap-schedule is given",
        ),
    ],
)
def test_active(
    patched: Callable[[str], Site],
    model: tuple[str, ...],
    neutral: Callable[[Site], None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    variable: str | None,
    options: tuple[str, ...],
    worker: str,
    because: str,
) -> None:
    site = patched(version)
    neutral(site)
    if variable:
        monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", variable)
    big_machine = (
        "--tp",
        "8",
        "--kv-cache-dtype=fp8_e4m3",
        "--context-length",
        "32768",
        "--log-level",
        "error",
    )
    result = site.verify(*model, "--speculative-algorithm", "EAGLE3", *options, *THRESHOLD, *big_machine)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.ACTIVE, Level.CONSTRUCT, 0)
    assert result.selected is not None
    assert result.selected.class_name == worker
    assert result.selected.file == str(site.package / FILES[worker])
    assert because in (result.selected.because or "")
    assert (result.threshold, result.attribute) == (24, 24)
    assert (result.marker or "").startswith("Dynamic speculation disable enabled: threshold=24 (")
    assert "--log-level error" in result.detail
    stand_ins = "\n".join(result.stand_ins)
    for said in (
        "TRITON_INTERPRET=1",
        "GPU name: NVIDIA H200",
        "--tp 8",
        "--kv-cache-dtype=fp8_e4m3",
        "--device cpu",
        model[1],
    ):
        assert said in stand_ins


def test_active_without_server_arguments(
    patched: Callable[[str], Site], neutral: Callable[[Site], None]
) -> None:
    site = patched("0.5.9")
    neutral(site)
    result = site.verify()
    assert (result.verdict, result.threshold, result.exit_code) == (Verdict.ACTIVE, 4, 0)
    assert any(text.startswith("server arguments: dynspec's own") for text in result.stand_ins)


def test_eagle_and_off(
    patched: Callable[[str], Site], model: tuple[str, ...], neutral: Callable[[Site], None]
) -> None:
    site = patched("0.5.9")
    neutral(site)
    result = site.verify(*model, "--speculative-algorithm", "EAGLE", *shape(1), require_active=True)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.OFF, Level.CONSTRUCT, 1)
    assert (result.threshold, result.attribute, result.marker) == (0, 0, None)


# -------------------------------------------------------------- refused, and not in reach


@pytest.mark.parametrize(
    ("version", "options", "verdict", "said"),
    [
        (
            "0.5.9",
            ("--speculative-disable-batch-threshold", "-1"),
            Verdict.REFUSED,
            "expected an integer >= 0",
        ),
        ("0.5.12", ("--speculative-disable-batch-threshold", "two"), Verdict.REFUSED, "'two'"),
        (
            "0.5.9",
            (*THRESHOLD, "--model-path", "/no/such/model"),
            Verdict.REFUSED,
            "/no/such/model: this path does not exist",
        ),
        ("0.5.12", (*THRESHOLD, "--pp-size", "2"), Verdict.REFUSED, "pipeline parallel"),
        ("0.5.9", (*THRESHOLD, "--speculative-algorithm", "STANDALONE"), Verdict.UNSUPPORTED, "STANDALONE"),
        ("0.5.9", ("--speculative-algorithm", "STANDALONE"), Verdict.UNSUPPORTED, "StandaloneWorker"),
    ],
)
def test_negative(
    patched: Callable[[str], Site],
    eagle3: tuple[str, ...],
    neutral: Callable[[Site], None],
    version: str,
    options: tuple[str, ...],
    verdict: Verdict,
    said: str,
) -> None:
    site = patched(version)
    neutral(site)
    result = site.verify(*eagle3, *options)
    assert (result.verdict, result.level, result.exit_code) == (verdict, Level.SELECT, 1)
    assert said in result.detail
    if verdict is Verdict.UNSUPPORTED:
        assert result.selected is not None
        assert result.selected.class_name == "StandaloneWorker"


@pytest.mark.parametrize("threshold", [(), THRESHOLD])
def test_not_speculative(
    patched: Callable[[str], Site],
    model: tuple[str, ...],
    neutral: Callable[[Site], None],
    threshold: tuple[str, ...],
) -> None:
    site = patched("0.5.12")
    neutral(site)
    result = site.verify(*model[:2], *threshold)
    assert (result.verdict, result.selected, result.exit_code) == (Verdict.NOT_SPECULATIVE, None, 1)


def test_unpatched(
    originals: Callable[[str], Site], eagle3: tuple[str, ...], neutral: Callable[[Site], None]
) -> None:
    site = originals("0.5.9")
    neutral(site)
    result = site.verify(*eagle3)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.UNPATCHED, Level.SOURCE, 1)


def test_a_worker_without_server_args(
    originals: Callable[[str], Site], eagle3: tuple[str, ...], neutral: Callable[[Site], None], tmp_path: Path
) -> None:
    site = originals("0.5.9").copy(tmp_path / "site")
    engine.patch(site.tree, only=["eagle_worker"])
    neutral(site)
    refused = site.verify(*eagle3, *THRESHOLD)
    assert refused.verdict is Verdict.REFUSED
    assert "srt/server_args.py is not patched" in refused.detail
    inert = site.verify(*eagle3)
    assert inert.verdict is Verdict.INERT
    assert "srt/server_args.py is not" in inert.detail


# ---------------------------------------------------------------------------------- stale


def test_shadowed_by_the_current_directory(
    patched: Callable[[str], Site],
    originals: Callable[[str], Site],
    eagle3: tuple[str, ...],
    neutral: Callable[[Site], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, shadow = patched("0.5.9"), originals("0.5.9")
    neutral(site)
    monkeypatch.chdir(shadow.directory)
    result = site.verify(*eagle3, *THRESHOLD)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.STALE, Level.IMPORT, 1)
    assert str(site.package) in result.detail
    assert str(shadow.package) in result.detail


@pytest.mark.parametrize("path", ["srt/server_args.py", FILES[V1]])
def test_bytecode_of_before_the_patch(
    patched: Callable[[str], Site],
    originals: Callable[[str], Site],
    eagle3: tuple[str, ...],
    neutral: Callable[[Site], None],
    tmp_path: Path,
    path: str,
) -> None:
    """Unchecked-hash bytecode ignores every later edit of its source. Made by the serving interpreter itself."""
    site = patched("0.5.9").copy(tmp_path / "site")
    neutral(site)
    (python,) = Path(site.python).parent.parent.glob("lib/python3*")
    cache = f"{Path(path).stem}.cpython-{python.name.removeprefix('python').replace('.', '')}.pyc"
    target = site.package / Path(path).parent / "__pycache__" / cache
    script = (
        "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], dfile=sys.argv[3], "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    target.unlink(missing_ok=True)
    before = originals("0.5.9").package / path
    subprocess.run([site.python, "-c", script, before, target, site.package / path], check=True)
    result = site.verify(*eagle3, *THRESHOLD)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.STALE, Level.IMPORT, 1)
    assert str(target) in result.detail


# --------------------------------------------------------------------------------- broken


@pytest.mark.parametrize(
    ("old", "new", "level", "said"),
    [
        (
            "self.spec_disable_batch_threshold = getattr",
            "self.spec_threshold = getattr",
            Level.CONSTRUCT,
            "spec_disable_batch_threshold",
        ),
        (
            "self.topk = server_args.speculative_eagle_topk",
            "self.topk = 1 // 0",
            Level.CONSTRUCT,
            "ZeroDivisionError",
        ),
        ("import logging\n", "import logging\nimport os; os._exit(0)\n", Level.IMPORT, "exit code 0"),
        ("import logging\n", "import logging\nimport no_such_module\n", Level.IMPORT, "no_such_module"),
    ],
)
def test_broken(
    patched: Callable[[str], Site],
    eagle3: tuple[str, ...],
    neutral: Callable[[Site], None],
    tmp_path: Path,
    old: str,
    new: str,
    level: Level,
    said: str,
) -> None:
    """The source level is made to believe in the file, so that the probe's own checks have to find it."""
    good = patched("0.5.9")
    copy = good.copy(tmp_path / "site")
    site = Sabotaged(copy.version, copy.directory)
    site.believed = good.source()
    site.rewrite(FILES[V1], lambda text: text.replace(old, new, 1))
    neutral(site)
    result = site.verify(*eagle3, *THRESHOLD)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.BROKEN, level, 1)
    assert said in result.detail


def test_a_foreign_edit(
    patched: Callable[[str], Site], eagle3: tuple[str, ...], neutral: Callable[[Site], None], tmp_path: Path
) -> None:
    site = patched("0.5.9").copy(tmp_path / "site")
    site.rewrite(FILES[V1], lambda text: text.replace("Dynamic speculation disable enabled", "Dynamic"))
    neutral(site)
    result = site.verify(*eagle3, *THRESHOLD)
    assert (result.verdict, result.exit_code) == (Verdict.BROKEN, 1)
    assert FILES[V1] in result.detail
    assert "dynspec status" in result.detail
