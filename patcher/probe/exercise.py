"""Level ``exercise``: the constructed worker really decodes, around the threshold, and what it did is checked.

Two fresh processes of the serving interpreter serve the same requests: one with the arguments in question (first with
the switch, then, same process, with the switch taken out: static speculation), one without speculation at all. Demands:

a. a step of N or more requests runs neither draft nor verify and advances each request by one token; a smaller one runs
   both. Seen at the worker's and the model runner's own methods, not at the switch's counters, which must agree.
b. greedy output equals the run without speculation, token for token (float32).
c. every KV slot and every request slot is free again at the end, and sglang's own idle check passes.
d. the draft worker's KV cache holds at every committed position what static speculation puts there, and so does what
   it carries from one step to the next (hidden state, top-k); drafts are accepted again after the last resume.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

FLAG = "--speculative-disable-batch-threshold"
LARGEST_THRESHOLD = 3
STEP_LIMIT = 150
TIME_LIMIT_S = 300.0  # of the whole exercise
PASS_LIMIT_S = 130.0  # of one pass of the scenario
# Largest difference between two float32 vectors of the draft's state, relative to the largest element: sums in another
# order differ by 1e-6; another hidden state or token by 1e-1 and more.
TOLERANCE = 1e-4
TOKENS = "top-k tokens"
# Static speculation must have accepted so many draft tokens after the last resume before none with the switch is a fault.
ENOUGH_ACCEPTED = 4
# What sglang's event loop calls when nothing runs, by release. It finds lost slots.
IDLE_CHECKS = ("self_check_during_idle", "on_idle")


@dataclass(frozen=True)
class Outcome:
    """Whether every demand was met, the first one that was not (or the numbers), and what stood in."""

    ok: bool
    detail: str
    stand_ins: list[str] = field(default_factory=list)


Key = tuple[Any, ...]  # request, position; and, of a carried state, the length at which its step began
Seen = tuple[dict[str, Any], bool]  # float32 vectors by name, and whether a skipped step wrote them


@dataclass(frozen=True)
class Arrival:
    """One request: it arrives when ``after`` decode steps have run."""

    rid: str
    prompt: list[int]
    new_tokens: int
    after: int


def scenario(threshold: int) -> list[Arrival]:
    """Arrivals and lengths that cross a threshold of N requests up and down, and end inside both modes."""

    def prompt(i: int) -> list[int]:
        return [(37 * i + 11 * j + 5) % 250 + 3 for j in range(5 + 2 * i)]

    base = max(threshold - 1, 1)
    # the first outlasts all others, so that there is something to accept after the last resume
    long = [Arrival(f"r{i}", prompt(i), 30 if i else 40, 0) for i in range(base)]
    up = base
    return [
        *long,
        Arrival(f"r{up}", prompt(up), 6, 3),  # reaches N, finishes in a skipped step: back below
        Arrival(f"r{up + 1}", prompt(up + 1), 5, 10),  # N again
        Arrival(f"r{up + 2}", prompt(up + 2), 8, 10),  # and N + 1
    ]


# ------------------------------------------------------------------- parent


def run(
    argv: Sequence[str],
    worker_class: type,
    threshold: int,
    scheduler: Any,
    server_args: Any,
    progress: Callable[[str], None],
    directory: str,
) -> Outcome:
    """Exercise the worker that ``argv`` (as it was constructed) selects.

    Args:
        threshold: N of the arguments in question; 0 means that no step may skip.
        scheduler: the constructed one; only its argument choices are read, the exercise builds its own.
        directory: for models, requests and results.
    """
    from dynspec_probe import harness, standins

    n = min(threshold, LARGEST_THRESHOLD)
    stand_ins = ["torch compiler off in the exercise (TORCHDYNAMO_DISABLE=1)"]
    if n != threshold:
        stand_ins.append(f"threshold: {n} in place of {threshold} for the exercise")
    options, _ = harness.without_options(
        harness.expanded(argv),
        [
            "speculative_disable_batch_threshold",
            "max_running_requests",
            "dtype",
            "attention_backend",
            "disable_cuda_graph",
        ],
    )
    changed = [
        "--dtype",
        "float32",
        "--attention-backend",
        "triton",
        "--disable-cuda-graph",
        "--max-running-requests",
        str(max(n, 1) + 2),
    ]
    options += changed
    stand_ins.append("server arguments for the exercise: " + " ".join(changed))
    if standins.has_gpu():  # the user's model may be too large to load three times
        kind = "EAGLE3" if server_args.speculative_algorithm == "EAGLE3" else "EAGLE"
        models = harness.tiny_models(directory, kind)
        options, _ = harness.without_options(
            options, ["model_path", "speculative_draft_model_path", "tokenizer_path", "skip_tokenizer_init"]
        )
        options += [
            "--model-path",
            models.target,
            "--speculative-draft-model-path",
            models.draft,
            "--skip-tokenizer-init",
        ]
        stand_ins.append("model: tiny models of dynspec's for the exercise")
    speculative = [a for a in _speculative_dests() if a != "speculative_disable_batch_threshold"]
    plain, _ = harness.without_options(options, [*speculative, "disable_overlap_schedule"])
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    choice = [getattr(server_args, name) for name in names]
    children = {
        "switched": _start(directory, "switched", [*options, FLAG, str(n)], n, choice),
        "base": _start(directory, "base", [*plain, "--disable-overlap-schedule"], n, choice),
    }
    progress(f"decoding around a threshold of {n}, with and without speculation")
    seen: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        while len(seen) < len(children) and not any(answer.get("error") for answer in seen.values()):
            if time.monotonic() > deadline:
                return Outcome(False, f"exercise: no answer within {TIME_LIMIT_S:g} s", stand_ins)
            for name, (process, result) in children.items():
                if name not in seen and process.poll() is not None:
                    seen[name] = _read(process, result)
            time.sleep(0.1)
    finally:
        for process, _ in children.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    for answer in seen.values():
        stand_ins += [s for s in answer.get("stand_ins", []) if s not in stand_ins]
    for name, answer in seen.items():
        if answer.get("error"):
            return Outcome(False, f"exercise ({name}): {answer['error']}", stand_ins)
    fault, detail = judge(seen["switched"], seen["base"], n, _name(worker_class))
    return Outcome(fault is None, f"exercise: {fault}" if fault else f"exercise: {detail}", stand_ins)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _speculative_dests() -> list[str]:
    from dynspec_probe import harness

    parser = harness._parser()
    return sorted({a.dest for a in parser._actions if a.dest.startswith("speculative_")})


def _start(
    directory: str, name: str, argv: list[str], n: int, choice: list[Any]
) -> tuple[subprocess.Popen[bytes], str]:
    os.makedirs(directory, exist_ok=True)
    request, result = (os.path.join(directory, f"exercise-{name}.{kind}") for kind in ("request", "result"))
    with open(request, "w", encoding="utf-8") as stream:
        json.dump({"mode": name, "argv": argv, "threshold": n, "choice": choice, "path": sys.path}, stream)
    code = (
        "import importlib.util as u, json, sys; q = json.load(open(sys.argv[1])); sys.path[:] = q['path']; d = sys.argv[3]; "
        "s = u.spec_from_file_location('dynspec_probe', d + '/__init__.py', submodule_search_locations=[d]); "
        "m = u.module_from_spec(s); sys.modules['dynspec_probe'] = m; s.loader.exec_module(m); "
        "from dynspec_probe import exercise; exercise.child(q, sys.argv[2])"
    )
    environment = {
        **os.environ,
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",  # sglang's default; else a lost slot is a warning
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, request, result, os.path.dirname(os.path.abspath(__file__))],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    return process, result


def _read(process: subprocess.Popen[bytes], result: str) -> dict[str, Any]:
    if not os.path.exists(result):
        return {"error": f"the process ended with code {process.returncode} and no result"}
    with open(result, encoding="utf-8") as stream:
        answer: dict[str, Any] = json.load(stream)
    return answer


# ------------------------------------------------------------------- verdict


def judge(switched: dict[str, Any], base: dict[str, Any], n: int, worker: str) -> tuple[str | None, str]:
    """The first demand that is not met, or None, and the numbers. Pure."""
    on, plain = switched["switched"], base["base"]
    if switched["worker"] != worker:
        return f"sglang constructed {switched['worker']} here, {worker} before", ""
    fault = fault_of_switched(on, n) or fault_of_run("without speculation", plain, n)
    if fault:  # the static pass may not have run then
        return fault, ""
    static = switched["static"]
    fault = (
        fault_of_run("with static speculation", static, n)
        or _fault_of_static(static)
        or _fault_of_output("static speculation (the stand-ins are at fault)", static, plain)
        or _fault_of_output("the switch", on, plain)
        or _fault_of_draft(switched["draft"], n)
    )
    if fault:
        return fault, ""
    resumed, possible = accepted_after_resume(on, static, n)
    if not accepted(static):
        return (
            "static speculation accepted no draft token, so the exercise can't tell drafts that are used from ones that are not",
            "",
        )
    if possible >= ENOUGH_ACCEPTED and not resumed:
        return (
            f"after the last resume no draft token was accepted; static speculation accepted {possible} from there on",
            "",
        )
    skips, speculates, crossings = counts(on, n)
    kv, carried = switched["draft"]["kv"], switched["draft"]["carried"]
    return None, (
        f"{skips} steps skipped and {speculates} speculative, {crossings} crossings of N={n}; "
        f"{sum(len(t) for t in plain['outputs'].values())} tokens equal to the run without "
        f"speculation; no KV slot lost; {kv['compared']} draft KV entries compared ({kv['after_skip']} written in skipped steps), "
        f"worst difference {kv['worst']:.1g}; {carried['compared']} carried draft states ({carried['after_skip']} from skipped "
        f"steps), worst {carried['worst']:.1g}; draft tokens accepted: {accepted(on)} with the switch"
        f"{f' ({resumed} after the last resume, {possible} static from there)' if n > 1 else ''}, {accepted(static)} static"
    )


def counts(run_: dict[str, Any], n: int) -> tuple[int, int, int]:
    """Skipped steps, speculative steps and changes between the two, as a threshold of ``n`` demands them."""
    modes = [n > 0 and step["running"] >= n for step in run_["steps"]]
    return (
        sum(modes),
        len(modes) - sum(modes),
        sum(a is not b for a, b in itertools.pairwise(modes)),
    )


def accepted(run_: dict[str, Any], since: dict[str, int] | None = None) -> int:
    """Draft tokens that were accepted, or those in steps that began at a length of ``since[rid]`` or more."""
    return sum(
        advanced - 1
        for step in run_["steps"]
        for (rid, length), advanced in zip(step["requests"], step["advanced"], strict=True)
        if advanced > 1 and (since is None or length >= since.get(rid, length + 1))
    )


def accepted_after_resume(on: dict[str, Any], static: dict[str, Any], n: int) -> tuple[int, int]:
    """Draft tokens accepted after the switch's last resume, and by static speculation from the same lengths on."""
    steps = on["steps"]
    resumes = [
        i for i in range(1, len(steps)) if n > 0 and steps[i]["running"] < n <= steps[i - 1]["running"]
    ]
    if not resumes:
        return 0, 0
    since = dict(steps[resumes[-1]]["requests"])
    return accepted(on, since), accepted(static, since)


def fault_of_run(name: str, run_: dict[str, Any], n: int) -> str:
    """What is wrong with a pass by itself, or ``""``."""
    if run_["fault"]:
        return f"{name}: {run_['fault']}"
    for arrival in scenario(n):
        got = len(run_["outputs"].get(arrival.rid, ()))
        if got != arrival.new_tokens:
            return f"{name}: {arrival.rid} ended with {got} tokens, not with {arrival.new_tokens}"
    return ""


def fault_of_switched(on: dict[str, Any], n: int) -> str:
    """What is wrong with the pass with the switch by itself, or ``""``: causes (steps) before what they lead to."""
    return _fault_of_steps(on, n) or fault_of_run("with the switch", on, n) or _fault_of_totals(on, n)


def _fault_of_steps(on: dict[str, Any], n: int) -> str:
    """Demand a, step by step."""
    for i, step in enumerate(on["steps"]):
        skip = n > 0 and step["running"] >= n
        where = f"decode step {i + 1} with {step['running']} request(s), threshold {n}"
        done = f"(draft {step['drafts']}x, verify {step['verifies']}x, target {step['target']})"
        if not skip:
            if not _speculated(step):
                return f"{where}: it did not speculate {done}"
            continue
        if step["drafts"] or step["verifies"] or step["target"] != ["DECODE"]:
            return f"{where}: speculation was not skipped {done}"
        after = dict(on["steps"][i + 1]["requests"]) if i + 1 < len(on["steps"]) else {}
        for (rid, length), advanced in zip(step["requests"], step["advanced"], strict=True):
            if advanced != 1:
                return f"{where}: {rid} advanced by {advanced} tokens in a skipped step, not by one"
            if after.get(rid, length + 1) != length + 1:
                return f"{where}: the length of {rid} went from {length} to {after[rid]} in a skipped step"
    return ""


def _fault_of_totals(on: dict[str, Any], n: int) -> str:
    """Demand a, over the whole pass."""
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for step in on["steps"]:
        sizes[n > 0 and step["running"] >= n].add(step["running"])
    found = counts(on, n)
    if n > 0 and on["counters"] != list(found):
        return f"the switch counted [skipped, speculative, crossings] = {on['counters']}; seen were {list(found)}"
    if n > 0 and n not in sizes[True]:
        return f"no decode step ran with exactly {n} requests"
    if n > 1 and (n - 1 not in sizes[False] or found[2] < 4):
        return f"no decode step ran with exactly {n - 1} request(s), or the threshold was crossed {found[2]} times only"
    return ""


def _speculated(step: dict[str, Any]) -> bool:
    return bool(step["drafts"] and step["verifies"]) and step["target"] == ["TARGET_VERIFY"]


def _fault_of_static(static: dict[str, Any]) -> str:
    for i, step in enumerate(static["steps"]):
        if not _speculated(step):
            return f"with the switch taken out, decode step {i + 1} still did not speculate: there is nothing to compare with"
    return "" if static["steps"] else "with the switch taken out, no decode step was seen"


def _fault_of_output(name: str, run_: dict[str, Any], plain: dict[str, Any]) -> str:
    """Demand b. Both passes have every request at its full length (:func:`fault_of_run`)."""
    for rid, tokens in plain["outputs"].items():
        pairs = enumerate(zip(run_["outputs"][rid], tokens, strict=True))
        first = next((j for j, (got, wanted) in pairs if got != wanted), None)
        if first is not None:
            return (
                f"{rid}: output with {name} differs from the run without speculation at token {first + 1} "
                f"of {len(tokens)}"
            )
    return ""


def _fault_of_draft(draft: dict[str, Any], n: int) -> str:
    """Demand d."""
    for name, what in (("kv", "KV cache"), ("carried", "state")):
        found = draft[name]
        if not found["worst"] <= TOLERANCE:  # not a number is no agreement either
            by = (
                f"{found['worst']:.2g} (relative)"
                if found["worst"] < float("inf")
                else "a token, or is not a number"
            )
            return f"the draft worker's {what} was not kept in step: {found['where']} differs from static speculation's by {by}"
    kv = draft["kv"]
    if not kv["compared"] or (n > 0 and not kv["after_skip"]):
        return f"no draft KV entry{' that a skipped step wrote' if n else ''} could be compared"
    return ""


# ------------------------------------------------------------------- child


def child(request: dict[str, Any], result: str) -> None:
    """Serve the scenario in this process and write what was seen."""
    answer: dict[str, Any] = {"stand_ins": []}
    try:
        answer |= _serve(request)
    except BaseException as error:  # sglang may raise SystemExit and worse
        traceback.print_exc()
        lines = (
            "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip().splitlines()
        )
        answer["error"] = "\n".join(lines[-6:])
    temporary = result + ".tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os.replace(temporary, result)
    sys.stdout.flush()
    os._exit(0)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    from dynspec_probe import harness, standins

    used = list(standins.prepare())
    import sglang.srt.server_args as server_args_module

    used += standins.after_server_args()
    if hasattr(server_args_module, "auto_choose_speculative_params"):
        server_args_module.auto_choose_speculative_params = lambda _args: tuple(request["choice"])
    _, scheduler = harness.build_scheduler(request["argv"])
    arrivals = scenario(request["threshold"])
    if request["mode"] == "base":
        return {"base": Run(scheduler, arrivals, None).go(), "stand_ins": used}
    worker = scheduler.draft_worker
    used += harness.install_kernels(worker)
    switched = Run(scheduler, arrivals, worker)
    on = switched.go()
    answer = {"worker": _name(type(worker)), "switched": on, "stand_ins": used}
    n = request["threshold"]
    if fault_of_switched(on, n):
        return answer  # the parent says which; no need for the second pass
    flush = getattr(scheduler, "flush_cache", None)
    if flush is not None:
        flush()
    worker.spec_switch = None
    static = Run(scheduler, arrivals, worker)
    off = static.go()
    return {
        **answer,
        "static": off,
        "draft": {
            "kv": compare(switched.draft_kv, static.draft_kv),
            "carried": compare(switched.carried, static.carried),
        },
    }


def compare(switched: dict[Key, Seen], static: dict[Key, Seen]) -> dict[str, Any]:
    """The worst relative difference between what was seen of the draft's state in both passes, and where."""
    worst, where, compared, after_skip = 0.0, "", 0, 0
    for key, (vectors, skipped) in switched.items():
        if key not in static:
            continue
        compared, after_skip = compared + 1, after_skip + skipped
        for name, vector in vectors.items():
            other = static[key][0][name]
            difference = float((vector - other).abs().max()) / max(float(other.abs().max()), 1e-9)
            if difference != difference or (name == TOKENS and difference > 0):  # not a number; another token
                difference = float("inf")
            if difference > worst:
                worst, where = difference, f"{name}, request {key[0]}, position {key[1]}"
    return {"worst": worst, "where": where, "compared": compared, "after_skip": after_skip}


class Run:
    """One pass of the scenario through sglang's own event loop, with the worker's methods watched."""

    def __init__(self, scheduler: Any, arrivals: list[Arrival], worker: Any) -> None:
        self.scheduler, self.worker = scheduler, worker
        self.todo = list(arrivals)
        self.wanted = {a.rid: a for a in arrivals}
        self.reqs: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.draft_kv: dict[Key, Seen] = {}
        self.carried: dict[Key, Seen] = {}
        self.known: dict[str, int] = {}
        self.turns = 0
        self.current: dict[str, Any] | None = None
        self.previous_skipped = False
        self.quiet = self.idle_checks = 0
        self.idle_fault = ""
        self.began: dict[str, int] = {}

    def go(self) -> dict[str, Any]:
        """The observations as JSON values."""
        from dynspec_probe import harness

        free_before = self._free()
        switch = getattr(self.worker, "spec_switch", None)
        unwatch = self._watch()
        self.deadline = time.monotonic() + PASS_LIMIT_S
        try:
            harness.run_event_loop(self.scheduler, self._receive)
        finally:
            unwatch()
        return {
            "fault": self._fault(free_before),
            "steps": self.steps,
            "outputs": {
                rid: list(r.output_ids)[: self.wanted[rid].new_tokens] for rid, r in self.reqs.items()
            },
            "counters": [switch.skipped_steps, switch.speculative_steps, switch.crossings]
            if switch
            else None,
        }

    def _fault(self, free_before: list[int]) -> str:
        done = {rid: len(r.output_ids) for rid, r in self.reqs.items()}
        if self.turns > STEP_LIMIT or time.monotonic() > self.deadline:
            return f"it did not end within {STEP_LIMIT} turns and {PASS_LIMIT_S:g} s; tokens so far {done}"
        free = self._free()
        if self.idle_fault or free != free_before:
            fault = f"slots were lost: [KV, request] slots free at the end {free}, at the start {free_before}"
            return f"{fault}; {self.idle_fault}" if self.idle_fault else fault
        return "" if self.idle_checks else f"sglang's own idle check ({' or '.join(IDLE_CHECKS)}) did not run"

    # -- arrivals

    def _receive(self) -> list[Any]:
        from dynspec_probe import harness

        self.turns += 1
        self._learn_requests()
        if self.turns > STEP_LIMIT or time.monotonic() > self.deadline:
            raise harness.Stop
        done = len(self.steps) if self.worker is not None else self._base_steps()
        ready = [a for a in self.todo if a.after <= done or self._all_finished()]
        self.todo = [a for a in self.todo if a not in ready]
        if not self.todo and not ready and self._all_finished() and self._idle_turns():
            raise harness.Stop
        return [harness.make_request(a.rid, a.prompt, a.new_tokens) for a in ready]

    def _base_steps(self) -> int:
        return max((len(r.output_ids) for r in self.reqs.values()), default=0)

    def _all_finished(self) -> bool:
        return (
            bool(self.reqs)
            and all(r.finished() for r in self.reqs.values())
            and len(self.reqs) + len(self.todo) == len(self.wanted)
        )

    def _idle_turns(self) -> bool:
        """Three quiet turns, so that an overlapped last step is processed and everything is freed."""
        self.quiet += 1
        return self.quiet > 3

    def _learn_requests(self) -> None:
        s = self.scheduler
        batches = [getattr(s, n, None) for n in ("running_batch", "last_batch", "cur_batch")]
        for source in (s.waiting_queue, *(getattr(b, "reqs", None) or [] for b in batches)):
            for req in source:
                if req.rid in self.wanted:
                    self.reqs.setdefault(req.rid, req)

    # -- what is free

    def _free(self) -> list[int]:
        s = self.scheduler
        slots = s.token_to_kv_pool_allocator.available_size() + s.tree_cache.evictable_size()
        return [int(slots), int(s.req_to_token_pool.available_size())]

    def _idle(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        from dynspec_probe import harness

        try:
            result = real(*args, **kwargs)
        except Exception as error:
            name = getattr(real, "__name__", "idle check")
            self.idle_fault = f"sglang's own {name} says: {type(error).__name__}: {error}".strip()
            raise harness.Stop from error
        self.idle_checks += bool(self.quiet)
        return result

    # -- observation

    def _watch(self) -> Callable[[], None]:
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (self.scheduler, name, self._idle) for name in IDLE_CHECKS if hasattr(self.scheduler, name)
        ]
        if self.worker is not None:
            worker = self.worker
            drafter = worker if hasattr(type(worker), "draft") else worker.draft_worker
            places += [
                (worker, "forward_batch_generation", self._step),
                (drafter, "draft", self._count("drafts")),
                (worker, "verify", self._count("verifies")),
                (worker.target_worker.model_runner, "forward", self._target),
            ]
        for owner, name, wrapper in places:
            real = getattr(owner, name)

            def watched(*args: Any, _real: Any = real, _wrapper: Any = wrapper, **kwargs: Any) -> Any:
                return _wrapper(_real, *args, **kwargs)

            setattr(owner, name, watched)

        def unwatch() -> None:
            for owner, name, _ in places:
                delattr(owner, name)

        return unwatch

    def _count(self, what: str) -> Callable[..., Any]:
        def wrapper(real: Any, *args: Any, **kwargs: Any) -> Any:
            if self.current is not None:
                self.current[what] += 1
            return real(*args, **kwargs)

        return wrapper

    def _target(self, real: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.current is not None:
            self.current["target"].append(forward_batch.forward_mode.name)
        return real(forward_batch, *args, **kwargs)

    def _step(self, real: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if mode.is_extend() or mode.is_idle() or batch.is_extend_in_batch:
            return real(batch, *args, **kwargs)
        self._learn_requests()
        reqs = list(batch.reqs)
        self._copy_draft_kv(batch, reqs)
        self._copy_carried(batch, reqs)
        before = [len(r.output_ids) for r in reqs]
        self.current = {
            "running": len(batch.seq_lens),
            "requests": [[r.rid, n] for r, n in zip(reqs, batch.seq_lens.tolist(), strict=True)],
            "drafts": 0,
            "verifies": 0,
            "target": [],
        }
        result = real(batch, *args, **kwargs)
        step, self.current = self.current, None
        lengths = getattr(result, "accept_lens", None)
        if lengths is not None:
            step["advanced"] = [int(x) for x in lengths]
        else:
            step["advanced"] = [len(r.output_ids) - b for r, b in zip(reqs, before, strict=False)]
        self.previous_skipped = not step["verifies"]
        self.steps.append(step)
        return result

    def _copy_draft_kv(self, batch: Any, reqs: list[Any]) -> None:
        """Copy the draft's K and V of positions committed since the last look (a request's own, up to its last token)."""
        worker = self.worker
        runner = getattr(worker, "draft_model_runner", None) or worker.draft_worker.draft_runner
        pool, table = runner.token_to_kv_pool, worker.req_to_token_pool.req_to_token
        buffers = {
            f"{kind} of draft layer {i}": buffer
            for kind, of_layers in (("K", pool.k_buffer), ("V", pool.v_buffer))
            for i, buffer in enumerate(of_layers)
        }
        for req, index, length in zip(
            reqs, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True
        ):
            start, end = self.known.get(req.rid, 0), min(length, self._last_length(req.rid))
            if end <= start:
                continue
            slots = table[index, start:end].long()
            # indexing copies
            entries = {name: buffer[slots].flatten(1).float().cpu() for name, buffer in buffers.items()}
            for offset in range(end - start):
                vectors = {name: entry[offset] for name, entry in entries.items()}
                self.draft_kv[(req.rid, start + offset)] = vectors, start > 0 and self.previous_skipped
            self.known[req.rid] = end

    def _copy_carried(self, batch: Any, reqs: list[Any]) -> None:
        """Copy what the last draft extend hands to this step: hidden states (bs, hidden), top-k tokens and probabilities.

        Only states of extends that began at the same length are comparable: v1's, on the Triton backend, attends to the
        tokens that it extends by twice (sglang passes the whole length as the prefix), so their number moves its result.
        """
        carried = batch.spec_info
        names = {"hidden_states": "hidden state", "topk_p": "top-k probabilities", "topk_index": TOKENS}
        rows = {text: getattr(carried, name).float().cpu().clone() for name, text in names.items()}
        lengths = batch.seq_lens.tolist()
        for i, (req, length) in enumerate(zip(reqs, lengths, strict=True)):
            if length < self._last_length(req.rid):
                began = self.began.get(req.rid)  # None after prefill
                vectors = {text: values[i] for text, values in rows.items()}
                self.carried[(req.rid, length, began)] = vectors, began is not None and self.previous_skipped
        self.began = {req.rid: length for req, length in zip(reqs, lengths, strict=True)}

    def _last_length(self, rid: str) -> int:
        """The length at which the request is finished; v2 may step a finished one once more."""
        wanted = self.wanted[rid]
        return len(wanted.prompt) + wanted.new_tokens - 1
