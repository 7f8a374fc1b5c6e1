"""What the exercise makes of observations, without sglang: each demand is broken in turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from patcher.probe import exercise

N = 2
WORKER = "sglang.srt.speculative.eagle_worker.EAGLEWorker"


def step(lengths: dict[str, int], skip: bool, advance: int) -> dict[str, Any]:
    return {
        "running": len(lengths),
        "requests": [[rid, length] for rid, length in lengths.items()],
        "drafts": 0 if skip else 1,
        "verifies": 0 if skip else 1,
        "target": ["DECODE"] if skip else ["TARGET_VERIFY"],
        "advanced": [1 if skip else advance] * len(lengths),
    }


def passed(threshold: int) -> dict[str, Any]:
    """A pass of 10 steps in which r1 comes and goes twice; speculative steps advance by 3."""
    length, steps = 5, []
    for running in (1, 2, 2, 1, 1, 2, 3, 1, 1, 1):
        skip = 0 < threshold <= running
        rids = [f"r{i}" for i in range(running)]
        steps.append(step(dict.fromkeys(rids, length), skip, 3))
        length += steps[-1]["advanced"][0]
    return {
        "fault": "",
        "steps": steps,
        "outputs": {a.rid: list(range(a.new_tokens)) for a in exercise.scenario(N)},
        "counters": [4, 6, 4],
    }


@pytest.fixture
def seen() -> dict[str, Any]:
    compared = {"worst": 1e-6, "where": "here", "compared": 9, "after_skip": 3}
    return {
        "worker": WORKER,
        "switched": passed(N),
        "static": passed(0),
        "draft": {"kv": dict(compared), "carried": dict(compared)},
    }


def judged(seen: dict[str, Any], base: dict[str, Any] | None = None) -> tuple[str | None, str]:
    # as it comes from the child
    seen = json.loads(json.dumps(seen))
    return exercise.judge(seen, {"base": base or passed(0)}, N, WORKER)


def test_all_demands_met(seen: dict[str, Any]) -> None:
    fault, detail = judged(seen)
    assert fault is None
    assert "4 steps skipped and 6 speculative, 4 crossings of N=2" in detail


def nothing_accepted_after_resume(seen: dict[str, Any]) -> None:
    for each in seen["switched"]["steps"][7:]:
        each["advanced"] = [1]


def shortened(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda seen: seen[name]["outputs"]["r1"].pop()


def lost(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda seen: seen[name]["outputs"].pop("r1")


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(seen: dict[str, Any]) -> None:
        for key in path[:-1]:
            seen = seen[key]
        seen[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("worker", value="x.Other"), "sglang constructed x.Other"),
        (put("switched", "fault", value="slots were lost"), "with the switch: slots were lost"),
        (put("switched", "steps", 1, "drafts", value=1), "decode step 2 with 2 request(s), threshold 2: speculation was not"),
        (put("switched", "steps", 1, "target", value=["DECODE", "DECODE"]), "decode step 2"),
        (put("switched", "steps", 0, "verifies", value=0), "decode step 1 with 1 request(s), threshold 2: it did not"),
        (put("switched", "steps", 0, "target", value=["DECODE", "TARGET_VERIFY"]), "it did not speculate"),
        (put("switched", "steps", 1, "advanced", value=[1, 0]), "r1 advanced by 0 tokens in a skipped step"),
        (put("switched", "steps", 2, "requests", 0, 1, value=10), "the length of r0 went from 8 to 10"),
        (put("switched", "counters", value=[4, 6, 3]), "the switch counted"),
        (put("switched", "outputs", "r0", 3, value=-1), "r0: output with the switch differs from the run without speculation at token 4"),
        (put("static", "outputs", "r0", 3, value=-1), "the stand-ins are at fault"),
        (put("static", "steps", 1, "drafts", value=0), "with the switch taken out, decode step 2 still did not speculate"),
        (put("static", "steps", value=[]), "no decode step was seen"),
        (shortened("switched"), "with the switch: r1 ended with 5 tokens, not with 6"),
        (lost("switched"), "with the switch: r1 ended with 0 tokens"),
        (lost("static"), "with static speculation: r1 ended with 0 tokens"),
        (put("draft", "kv", "worst", value=0.2), "KV cache was not kept in step"),
        (put("draft", "kv", "worst", value=float("nan")), "KV cache was not kept in step"),
        (put("draft", "kv", "after_skip", value=0), "no draft KV entry that a skipped step wrote"),
        (put("draft", "carried", "worst", value=0.2), "state was not kept in step"),
        (nothing_accepted_after_resume, "after the last resume no draft token was accepted"),
    ],
)  # fmt: skip
def test_each_broken_demand_is_named(
    change: Callable[[dict[str, Any]], None], said: str, seen: dict[str, Any]
) -> None:
    before = copy.deepcopy(seen)
    change(seen)
    assert seen != before
    fault, detail = judged(seen)
    assert fault is not None
    assert said in fault
    assert detail == ""


def test_the_cause_is_named_before_what_it_leads_to(seen: dict[str, Any]) -> None:
    seen["switched"]["fault"] = "slots were lost"
    seen["switched"]["steps"][1]["advanced"] = [1, 2]
    fault, _ = judged(seen)
    assert fault is not None
    assert "decode step 2 with 2 request(s), threshold 2: r1 advanced by 2 tokens" in fault


def test_a_request_that_the_plain_run_lost_is_no_agreement(seen: dict[str, Any]) -> None:
    base = passed(0)
    del base["outputs"]["r1"]
    assert judged(seen, base) == ("without speculation: r1 ended with 0 tokens, not with 6", "")


class Vector(list[float]):
    """As much of a tensor as is compared."""

    def __sub__(self, other: Vector) -> Vector:
        return Vector(a - b for a, b in zip(self, other, strict=True))

    def abs(self) -> Vector:
        return Vector(abs(a) for a in self)

    def max(self) -> float:
        return next((a for a in self if a != a), max(self))


def test_not_a_number_stays_the_worst_difference() -> None:
    good, bad = {"K": Vector([1.0, 2.0])}, {"K": Vector([1.0, float("nan")])}
    static = {("r0", i): (good, False) for i in range(3)}
    switched = {("r0", 0): (good, False), ("r0", 1): (bad, True), ("r0", 2): (good, True)}
    found = exercise.compare(switched, static)
    assert found == {
        "worst": float("inf"),
        "where": "K, request r0, position 1",
        "compared": 3,
        "after_skip": 2,
    }


def test_another_token_is_no_small_difference() -> None:
    one, other = {exercise.TOKENS: Vector([99999.0])}, {exercise.TOKENS: Vector([100000.0])}
    assert exercise.compare({("r0", 1): (one, True)}, {("r0", 1): (other, False)})["worst"] == float("inf")


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_the_scenario_reaches_one_more_than_the_threshold(n: int) -> None:
    arrivals = exercise.scenario(n)
    assert len(arrivals) >= n + 1
    assert len({a.rid for a in arrivals}) == len(arrivals)
    assert arrivals == exercise.scenario(n)
