"""Runs in the serving interpreter: ``python main.py REQUEST.json RESULT.json``. The parent is ``patcher/verify.py``.

The answer is written at the end, whole or not at all. Events (one JSON object a line) go to the request's ``events``.
"""

# As `python -m sglang.launch_server` has it: the current directory first, and nothing of ours. This comes before any
# other import, since a module beside this file has the name of one of the standard library's (os is loaded already).
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = os.getcwd()
sys.dont_write_bytecode = True  # verifying writes nothing beside sglang

import contextlib  # noqa: E402
import importlib.util  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402


class Verdict(Exception):
    """Ends the probe with a verdict that is known early."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict
        self.detail = detail


class Probe:
    """One run. ``answer`` grows as levels are passed; a :class:`Verdict` ends it wherever it is known."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.request = request
        self.package: str = request["package"]
        self.files: list[dict[str, Any]] = request["files"]
        self.argv: list[str] = list(request["argv"])
        self.answer: dict[str, Any] = {
            "verdict": None,
            "level": "source",
            "selected": None,
            "threshold": None,
            "marker": None,
            "attribute": None,
            "stand_ins": [],
            "detail": "",
            "version": sys.version.split()[0],
        }

    def say(self, text: str) -> None:
        """One progress event, with the level that is being worked on."""
        with open(self.request["events"], "a", encoding="utf-8") as stream:
            stream.write(
                json.dumps({"level": self.answer["level"], "text": text, "time": time.time()}) + "\n"
            )

    def use(self, stand_ins: "list[str]") -> None:
        """Adds stand-ins to the list, each once."""
        known = self.answer["stand_ins"]
        known += [s for s in stand_ins if s not in known]

    def run(self) -> "dict[str, Any]":
        """The answer; never raises on sglang's account."""
        try:
            self.imported()
            self.selected()
            self.constructed()
        except Verdict as verdict:
            self.answer["verdict"], self.answer["detail"] = verdict.verdict, verdict.detail
        except BaseException as error:  # sglang may raise SystemExit, KeyboardInterrupt or worse
            traceback.print_exc()
            self.answer["verdict"], self.answer["detail"] = "BROKEN", _last_lines(error)
        return self.answer

    # ------------------------------------------------------------------ import

    def imported(self) -> None:
        """sglang and every patched module, and that they are the ones on disk."""
        from dynspec_probe import live, standins

        self.answer["level"] = "import"
        self.say("importing sglang")
        self.use(standins.prepare())
        self.modules: dict[str, Any] = {}
        try:
            live.check_package(self.package)
            server_args = [f for f in self.files if f["role"] == "server_args"]
            for file in server_args + [f for f in self.files if f["role"] != "server_args"]:
                if file["patched"]:
                    self.modules[file["role"]] = live.check_module(self.package, file["role"], file["path"])
                if file["role"] == "server_args":
                    import sglang.srt.server_args  # noqa: F401

                    self.use(standins.after_server_args())
        except live.StaleError as error:
            raise Verdict("STALE", str(error)) from error

    # ------------------------------------------------------------------ select

    def selected(self) -> None:
        """The class that sglang's own code selects, and what speaks against it already."""
        from dynspec_probe import select

        self.answer["level"] = "select"
        if not self.argv:
            self.own_arguments()
        self.say("selecting the worker class with sglang's own code")
        missing = select.missing_model_path(self.argv)
        if missing:
            raise Verdict("REFUSED", missing)
        foreign = {f["role"]: f for f in self.files if f["outcome"] in ("foreign", "partial", "error")}
        if "server_args" in foreign:
            raise Verdict("BROKEN", self.explain_foreign(foreign["server_args"]))
        try:
            self.selection = select.select(self.argv)
        except select.RefusedError as error:
            self.refused(error)
        except select.UnavailableError as error:
            text = f"the worker of --speculative-algorithm {error.algorithm} can't be imported here: {error}"
            if error.algorithm in ("EAGLE", "EAGLE3"):
                raise Verdict("BROKEN", text) from error
            raise Verdict("UNSUPPORTED", f"{text}; dynspec has no switch for it either") from error
        self.use(list(self.selection.used))
        worker, threshold = self.selection.worker, self.selection.threshold
        self.answer["threshold"] = threshold
        if worker is None:
            raise Verdict(
                "NOT_SPECULATIVE",
                "these arguments select no speculative worker: --speculative-algorithm is not set",
            )
        self.describe(worker)
        path = self.path_of(worker)
        file = next((f for f in self.files if f["path"] == path), None)
        if file is None or file["role"] in ("server_args", "spec_switch"):
            raise Verdict("UNSUPPORTED", f"{worker.__name__} ({path}) has no switch")
        if file["role"] in foreign:
            raise Verdict("BROKEN", self.explain_foreign(file))
        patched = [f["path"] for f in self.files if f["patched"]]
        mend = f"`dynspec patch --sglang-root {self.package}`"
        if not file["patched"]:
            raise Verdict(
                "INERT",
                f"sglang runs {worker.__name__} from {path}, which is not patched; patched: {', '.join(patched)}. "
                f"Chosen because {self.answer['selected']['because']}. Mend it with {mend}",
            )
        if not any(f["patched"] for f in self.files if f["role"] == "server_args"):
            raise Verdict(
                "INERT",
                f"{worker.__name__} is patched, but srt/server_args.py is not, so sglang has no {select.FLAG} "
                f"and the switch can never be on. Mend it with {mend}",
            )

    def own_arguments(self) -> None:
        """Stand-in arguments, for a run without SERVER ARGS."""
        from dynspec_probe import harness

        models = harness.tiny_models(self.request["directory"], "EAGLE3")
        self.argv = [
            *("--model-path", models.target, "--speculative-draft-model-path", models.draft),
            *(
                "--speculative-algorithm",
                "EAGLE3",
                "--speculative-num-steps",
                "3",
                "--speculative-eagle-topk",
                "1",
            ),
            *("--speculative-num-draft-tokens", "4", "--speculative-disable-batch-threshold", "4"),
            "--skip-tokenizer-init",
        ]
        self.use(
            [
                "server arguments: dynspec's own, since none were given (a tiny EAGLE3 model, 3 steps, top-k 1, threshold 4)"
            ]
        )

    def refused(self, error: Any) -> None:
        """Raises the verdict for arguments that sglang, or the switch in it, refused."""
        from dynspec_probe import select

        text = str(error)
        self.answer["threshold"] = getattr(select.parsed(self.argv), select.FIELD, None)
        if error.code == "not_speculative":
            raise Verdict("NOT_SPECULATIVE", text)
        if error.code == "unsupported_worker":
            from dynspec_probe import harness

            without, _ = harness.without_options(harness.expanded(self.argv), [select.FIELD])
            with contextlib.suppress(select.RefusedError, select.UnavailableError):
                self.selection = select.select(without)
                self.use(list(self.selection.used))
                if self.selection.worker is not None:
                    self.describe(self.selection.worker)
            raise Verdict("UNSUPPORTED", text)
        if error.code is None and "unrecognized arguments" in text and select.FLAG in text:
            text += f". srt/server_args.py is not patched; patch it with `dynspec patch --sglang-root {self.package}`"
        raise Verdict("REFUSED", text)

    def describe(self, worker: type) -> None:
        """Fills ``selected``."""
        from dynspec_probe import select

        self.answer["selected"] = {
            "class": worker.__name__,
            "module": worker.__module__,
            "file": inspect.getsourcefile(worker),
            "because": None,
        }
        self.answer["selected"]["because"] = select.why(self.argv, self.selection)

    def path_of(self, worker: type) -> str:
        """The worker's file, relative to the package directory where it lies in it."""
        file = os.path.realpath(inspect.getsourcefile(worker) or "")
        root = os.path.realpath(self.package) + os.sep
        return file[len(root) :].replace(os.sep, "/") if file.startswith(root) else file

    def explain_foreign(self, file: "dict[str, Any]") -> str:
        """What is wrong with a file that somebody else changed after us, and what to do."""
        return (
            f"{file['path']} carries dynspec's patch but not dynspec's bytes ({file['outcome']}"
            f"{': ' + file['detail'] if file.get('detail') else ''}). Look at `dynspec status --sglang-root {self.package}`; "
            "put the file back (`dynspec revert`, or reinstall sglang) and run `dynspec patch` again"
        )

    # --------------------------------------------------------------- construct

    def constructed(self) -> None:
        """The selected class, constructed by sglang's own Scheduler."""
        from dynspec_probe import construct, harness, live, standins

        self.answer["level"] = "construct"
        worker, threshold = self.selection.worker, self.selection.threshold
        assert worker is not None
        argv, own_models = self.argv, not self.request["argv"]
        if standins.has_gpu():
            argv = self.on_gpu(argv)
        else:
            kind = "EAGLE3" if self.selection.server_args.speculative_algorithm == "EAGLE3" else "EAGLE"
            models = None if own_models else harness.tiny_models(self.request["directory"], kind)
            self.use(harness.same_choice(argv, self.selection.server_args))
            argv, used = harness.cpu_overrides(argv, models)
            self.use(used)
            argv = self.same_class(argv)
        self.say(f"constructing {worker.__name__} through sglang's Scheduler")
        for file in self.files:
            if file["patched"]:  # what was imported since may have replaced a method
                try:
                    live.check_live(self.package, file["role"], file["path"], self.modules[file["role"]])
                except live.StaleError as error:
                    raise Verdict("STALE", str(error)) from error
        built = construct.construct(argv, worker, threshold)
        self.answer["attribute"], self.answer["marker"] = built.attribute, built.marker
        if built.fault:
            raise Verdict("BROKEN", built.fault)
        notes = []
        level = str(getattr(self.selection.server_args, "log_level", "info")).lower()
        if threshold > 0 and level in ("warning", "error", "critical"):
            notes.append(f"--log-level {level} keeps the marker line out of the server's own log")
        if threshold == 0:
            notes.append("the switch is in place, but the threshold is 0: speculation is never skipped")
        self.answer["verdict"], self.answer["detail"] = (
            ("ACTIVE" if threshold > 0 else "OFF"),
            "; ".join(notes),
        )
        if self.request["level"] == "exercise":
            self.exercised(argv, worker, threshold, built)

    def same_class(self, argv: "list[str]") -> "list[str]":
        """``argv`` such that the tiny model gets the class of the user's: some architectures turn overlap off."""
        from dynspec_probe import select

        off = "--disable-overlap-schedule"
        if select.select(argv).worker is self.selection.worker:
            return argv
        if (
            self.selection.server_args.disable_overlap_schedule
            and select.select([*argv, off]).worker is self.selection.worker
        ):
            self.use([f"{off}: as sglang resolved it for the user's model"])
            return [*argv, off]
        return argv  # the check of the constructed class says it

    def on_gpu(self, argv: "list[str]") -> "list[str]":
        """The user's own arguments; only the number of ranks is brought down to this one process."""
        from dynspec_probe import harness

        resolved = self.selection.server_args
        if int(resolved.tp_size) * int(getattr(resolved, "pp_size", 1) or 1) == 1:
            return argv
        dests = (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel_size",
            "nnodes",
            "node_rank",
        )
        argv, dropped = harness.without_options(harness.expanded(argv), (*dests, "dist_init_addr"))
        self.use([f"ranks: one process instead of all ({', '.join(dropped)} left out)"])
        return argv

    # ---------------------------------------------------------------- exercise

    def exercised(self, argv: "list[str]", worker: type, threshold: int, built: Any) -> None:
        """Real decode steps around the threshold. The verdict stands only if they come out right."""
        from dynspec_probe import exercise

        self.answer["level"] = "exercise"
        self.say("decoding around the threshold")
        outcome = exercise.run(
            argv=argv,
            worker_class=worker,
            threshold=threshold,
            scheduler=built.scheduler,
            server_args=built.server_args,
            progress=self.say,
            directory=self.request["directory"],
        )
        self.use(list(outcome.stand_ins))
        self.answer["detail"] = "; ".join(t for t in (self.answer["detail"], outcome.detail) if t)
        if not outcome.ok:
            raise Verdict("BROKEN", outcome.detail)


def _last_lines(error: BaseException, lines: int = 6) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return "\n".join(text.strip().splitlines()[-lines:])


def _load_siblings() -> None:
    spec = importlib.util.spec_from_file_location(
        "dynspec_probe", os.path.join(_HERE, "__init__.py"), submodule_search_locations=[_HERE]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["dynspec_probe"] = package
    spec.loader.exec_module(package)


def main(request_path: str, result_path: str) -> None:
    """Reads the request, runs the probe, writes the result by rename."""
    with open(request_path, encoding="utf-8") as stream:
        request = json.load(stream)
    _load_siblings()
    probe = Probe(request)
    probe.say("started")
    answer = probe.run()
    handle, name = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(result_path)))
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os.replace(name, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # sglang leaves threads and process groups behind
