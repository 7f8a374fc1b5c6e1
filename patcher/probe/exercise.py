"""Level ``exercise``: the constructed worker really decodes, around the threshold, and what it did is checked.

Two fresh processes of the serving interpreter serve the same requests: one with the arguments in question (first with
the switch, then, same process, with the switch taken out: static speculation), one without speculation at all. Demands:

a. a step of N or more requests runs neither draft nor verify and advances each request by one token; a smaller one runs
   both. Seen at the worker's and the model runner's own methods, not at the switch's counters, which must agree.
b. greedy output equals the run without speculation, token for token (float32).
c. every KV slot and every request slot is free again at the end, and sglang's own idle check passes.
d. the draft worker's KV cache holds at every committed position what static speculation puts there.
"""

from __future__ import annotations

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
TIME_LIMIT_S = 300.0
# Largest difference between two float32 draft KV entries, relative to the largest entry: sums in another order differ
# by 1e-6; another hidden state or token by 1e-1 and more.
KV_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """Whether every demand was met, the first one that was not (or the numbers), and what stood in."""

    ok: bool
    detail: str
    stand_ins: list[str] = field(default_factory=list)


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
    long = [Arrival(f"r{i}", prompt(i), 30, 0) for i in range(base)]
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
    from dynspec_probe import harness

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
        str(n + 4),
    ]
    options += changed
    stand_ins.append("server arguments for the exercise: " + " ".join(changed))
    if (
        "--model-path" in options and "cpu" not in options
    ):  # a GPU host: the user's model may be too large to load twice
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
    deadline = time.monotonic() + TIME_LIMIT_S + 120
    try:
        for name, (process, result) in children.items():
            process.wait(max(1.0, deadline - time.monotonic()))
            seen[name] = _read(name, process, result)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"exercise: no answer within {TIME_LIMIT_S + 120:g} s", stand_ins)
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
    fault, detail = judge(seen["switched"], seen["base"], n, worker_class.__name__)
    return Outcome(fault is None, f"exercise: {fault}" if fault else f"exercise: {detail}", stand_ins)


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
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, request, result, os.path.dirname(os.path.abspath(__file__))],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    return process, result


def _read(name: str, process: subprocess.Popen[bytes], result: str) -> dict[str, Any]:
    if not os.path.exists(result):
        return {"error": f"the process ended with code {process.returncode} and no result"}
    with open(result, encoding="utf-8") as stream:
        answer: dict[str, Any] = json.load(stream)
    return answer


# ------------------------------------------------------------------- verdict


def judge(switched: dict[str, Any], base: dict[str, Any], n: int, worker: str) -> tuple[str | None, str]:
    """The first demand that is not met, or None, and the numbers. Pure."""
    on, static = switched["switched"], switched["static"]
    if switched["worker"] != worker:
        return f"sglang constructed {switched['worker']} here, {worker} before", ""
    for name, run_ in (
        ("with the switch", on),
        ("with static speculation", static),
        ("without speculation", base["base"]),
    ):
        if run_["fault"]:
            return f"{name}: {run_['fault']}", ""
    # a
    skips = speculates = crossings = 0
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    last: bool | None = None
    for i, step in enumerate(on["steps"]):
        skip = n > 0 and step["running"] >= n
        where = f"decode step {i + 1} with {step['running']} request(s), threshold {n}"
        if skip and (step["drafts"] or step["verifies"] or step["target"] != ["DECODE"]):
            return (
                f"{where}: speculation was not skipped (draft {step['drafts']}x, verify {step['verifies']}x, target {step['target']})",
                "",
            )
        if not skip and not (step["drafts"] and step["verifies"] and step["target"] == ["TARGET_VERIFY"]):
            return (
                f"{where}: it did not speculate (draft {step['drafts']}x, verify {step['verifies']}x, target {step['target']})",
                "",
            )
        if skip and any(count != 1 for count in step["advanced"]):
            return (
                f"{where}: requests advanced by {step['advanced']} tokens in a skipped step, not by one each",
                "",
            )
        skips, speculates = skips + skip, speculates + (not skip)
        crossings += last is not None and last is not skip
        last = skip
        sizes[skip].add(step["running"])
    counted = on["counters"]
    if n > 0 and counted != [skips, speculates, crossings]:
        return (
            f"the switch counted [skipped, speculative, crossings] = {counted}; seen were {[skips, speculates, crossings]}",
            "",
        )
    if n > 0 and n not in sizes[True]:
        return f"no decode step ran with exactly {n} requests", ""
    if n > 1 and (n - 1 not in sizes[False] or crossings < 4):
        return (
            f"no decode step ran with exactly {n - 1} request(s), or the threshold was crossed {crossings} times only",
            "",
        )
    # b
    wanted = base["base"]["outputs"]
    for name, run_ in (("static speculation (the stand-ins are at fault)", static), ("the switch", on)):
        for rid, tokens in wanted.items():
            got = run_["outputs"].get(rid)
            if got != tokens:
                first = next(
                    (j for j, (x, y) in enumerate(zip(got or [], tokens, strict=False)) if x != y),
                    min(len(got or []), len(tokens)),
                )
                return (
                    f"{rid}: output with {name} differs from the run without speculation at token {first + 1} of {len(tokens)}",
                    "",
                )
    # d
    kv = switched["draft_kv"]
    if kv["worst"] > KV_TOLERANCE:
        return (
            f"the draft worker's KV cache was not kept in step: {kv['where']} differs by {kv['worst']:.2g} (relative) from static speculation's",
            "",
        )
    if n > 0 and kv["after_skip"] == 0:
        return "no draft KV entry that a skipped step wrote could be compared", ""
    if not static["accepted"]:
        return (
            "static speculation accepted no draft token, so the exercise can't tell drafts that are used from ones that are not",
            "",
        )
    tokens_ = sum(len(t) for t in wanted.values())
    return None, (
        f"{skips} steps skipped and {speculates} speculative, {crossings} crossings of N={n}; {tokens_} tokens equal to the run without "
        f"speculation; no KV slot lost; {kv['compared']} draft KV entries compared ({kv['after_skip']} written in skipped steps), "
        f"worst difference {kv['worst']:.1g}; draft tokens accepted: {on['accepted']} with the switch, {static['accepted']} static"
    )


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
    flush = getattr(scheduler, "flush_cache", None)
    if flush is not None:
        flush()
    worker.spec_switch = None
    static = Run(scheduler, arrivals, worker)
    off = static.go()
    return {
        "worker": type(worker).__name__,
        "switched": on,
        "static": off,
        "draft_kv": compare_kv(switched.draft_kv, static.draft_kv),
        "stand_ins": used,
    }


def compare_kv(switched: dict[Any, Any], static: dict[Any, Any]) -> dict[str, Any]:
    """The worst relative difference between two collections of draft KV entries, (rid, position) -> (entry, skipped)."""
    worst, where, compared, after_skip = 0.0, "", 0, 0
    for key, (entry, skipped) in switched.items():
        if key not in static:
            continue
        other = static[key][0]
        difference = float((entry - other).abs().max() / max(float(other.abs().max()), 1e-9))
        compared, after_skip = compared + 1, after_skip + skipped
        if not difference <= worst:
            worst, where = difference, f"request {key[0]}, position {key[1]}"
    return {"worst": worst, "where": where, "compared": compared, "after_skip": after_skip}


class Run:
    """One pass of the scenario through sglang's own event loop, with the worker's methods watched."""

    def __init__(self, scheduler: Any, arrivals: list[Arrival], worker: Any) -> None:
        self.scheduler, self.worker = scheduler, worker
        self.todo = list(arrivals)
        self.wanted = {a.rid: a for a in arrivals}
        self.reqs: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.draft_kv: dict[tuple[str, int], tuple[Any, bool]] = {}
        self.known: dict[str, int] = {}
        self.turns = 0
        self.current: dict[str, Any] | None = None
        self.previous_skipped = False

    def go(self) -> dict[str, Any]:
        """The observations as JSON values."""
        from dynspec_probe import harness

        free_before = self._free()
        switch = getattr(self.worker, "spec_switch", None)
        unwatch = self._watch()
        fault = ""
        self.deadline = time.monotonic() + TIME_LIMIT_S / 2
        try:
            harness.run_event_loop(self.scheduler, self._receive)
        finally:
            unwatch()
        if self.turns > STEP_LIMIT or time.monotonic() > self.deadline:
            done = {rid: len(r.output_ids) for rid, r in self.reqs.items()}
            fault = (
                f"it did not end within {STEP_LIMIT} turns and {TIME_LIMIT_S / 2:g} s; tokens so far {done}"
            )
        elif self._free() != free_before:
            fault = f"[KV slots, request slots] free at the end {self._free()}, at the start {free_before}: slots were lost"
        else:
            fault = self._idle_check()
        return {
            "fault": fault,
            "steps": self.steps,
            "outputs": {
                rid: list(r.output_ids)[: self.wanted[rid].new_tokens] for rid, r in self.reqs.items()
            },
            "accepted": sum(
                int(getattr(r, "spec_accepted_tokens", 0) or getattr(r, "spec_num_correct_drafts", 0) or 0)
                for r in self.reqs.values()
            ),
            "counters": [switch.skipped_steps, switch.speculative_steps, switch.crossings]
            if switch
            else None,
        }

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
        self.quiet = getattr(self, "quiet", 0) + 1
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

    def _idle_check(self) -> str:
        for name in ("check_memory", "self_check_during_idle"):
            check = getattr(self.scheduler, name, None)
            if check is not None:
                try:
                    check()
                except Exception as error:
                    return f"sglang's own {name} says: {error}"
                return ""
        return ""

    # -- observation

    def _watch(self) -> Callable[[], None]:
        if self.worker is None:
            return lambda: None
        worker = self.worker
        drafter = worker if hasattr(type(worker), "draft") else worker.draft_worker
        runner = worker.target_worker.model_runner
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (worker, "forward_batch_generation", self._step),
            (drafter, "draft", self._count("drafts")),
            (worker, "verify", self._count("verifies")),
            (runner, "forward", self._target),
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
        before = [len(r.output_ids) for r in reqs]
        self.current = {"running": len(batch.seq_lens), "drafts": 0, "verifies": 0, "target": []}
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
        import torch

        worker = self.worker
        runner = getattr(worker, "draft_model_runner", None) or worker.draft_worker.draft_runner
        pool, table = runner.token_to_kv_pool, worker.req_to_token_pool.req_to_token
        for req, index, length in zip(
            reqs, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=False
        ):
            wanted = self.wanted.get(req.rid)
            if wanted is None:
                continue
            start = self.known.get(req.rid, 0)
            end = min(length, len(wanted.prompt) + wanted.new_tokens - 1)
            if end <= start:
                continue
            slots = table[index, start:end].long()
            layers = [
                torch.cat([b[slots].flatten(1), a[slots].flatten(1)], 1)
                for a, b in zip(pool.k_buffer, pool.v_buffer, strict=False)
            ]
            entries = torch.cat(layers, 1).float().cpu().clone()
            for offset in range(end - start):
                self.draft_kv[(req.rid, start + offset)] = (
                    entries[offset],
                    start > 0 and self.previous_skipped,
                )
            self.known[req.rid] = end
