"""Level ``construct``: does the selected worker class, built by sglang's own Scheduler, carry the switch?"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from . import harness

ATTRIBUTE = "spec_disable_batch_threshold"
MARKER = re.compile(r"Dynamic speculation disable enabled: threshold=(-?\d+)(?!\d)")


@dataclass
class Constructed:
    """What the constructor left behind. ``fault`` says what is wrong with it, or is ``""``."""

    server_args: Any
    scheduler: Any
    worker: Any
    attribute: int | None
    marker: str | None
    fault: str


@dataclass
class _Records:
    """Records that the worker module's own logger was asked to emit, and markers that anybody made."""

    own: list[logging.LogRecord] = field(default_factory=list)
    made: list[logging.LogRecord] = field(default_factory=list)


def construct(argv: Sequence[str], selected: type, threshold: int) -> Constructed:
    """Builds the Scheduler from ``argv`` and inspects its worker.

    Raises whatever sglang's constructors raise.
    """
    with _recorded(selected.__module__) as records:
        server_args, scheduler = harness.build_scheduler(argv)
    worker = getattr(scheduler, "draft_worker", None)
    value = vars(worker).get(ATTRIBUTE) if worker is not None else None
    own = [r for r in records.own if MARKER.match(r.getMessage())]
    fault = (
        _fault_of_class(worker, selected)
        or _fault_of_attribute(worker, value, threshold)
        or _fault_of_marker(own, records.made, selected, threshold)
    )
    return Constructed(
        server_args,
        scheduler,
        worker,
        value if type(value) is int else None,
        own[0].getMessage() if own else None,
        fault,
    )


@contextmanager
def _recorded(logger_name: str) -> Iterator[_Records]:
    """Collects records of that logger, however quiet the user's ``--log-level`` is.

    The handler sits on the logger itself: argument parsing calls ``basicConfig(force=True)``, which drops the root's.
    """
    records = _Records()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.own.append(record)

    make = logging.getLogRecordFactory()

    def noticed(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if MARKER.match(_text(record)):
            records.made.append(record)
        return record

    logger, handler = logging.getLogger(logger_name), Collect(level=logging.NOTSET)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logging.setLogRecordFactory(noticed)
    try:
        yield records
    finally:
        logging.setLogRecordFactory(make)
        logger.removeHandler(handler)
        logger.setLevel(level)


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # somebody else's broken format string
        return str(record.msg)


def _fault_of_class(worker: Any, selected: type) -> str:
    if type(worker) is selected:
        return ""
    return (
        f"sglang's Scheduler constructed {_name(type(worker))}, but these arguments select {_name(selected)}: the "
        "arguments replaced for this machine changed the class"
    )


def _fault_of_attribute(worker: Any, value: Any, threshold: int) -> str:
    if ATTRIBUTE not in vars(worker):
        return f"the constructed {type(worker).__name__} has no attribute {ATTRIBUTE} of its own"
    if type(value) is not int or value != threshold:
        return f"{type(worker).__name__}.{ATTRIBUTE} is {value!r}, not the threshold {threshold}"
    return ""


def _fault_of_marker(
    own: Sequence[logging.LogRecord], made: Sequence[logging.LogRecord], selected: type, threshold: int
) -> str:
    wanted = f"one INFO line 'Dynamic speculation disable enabled: threshold={threshold}' from {selected.__name__}.__init__"
    if threshold == 0:
        return f"the threshold is 0, yet {_where(made[0])} logged {_text(made[0])!r}" if made else ""
    if not own:
        elsewhere = f"; seen instead: {_where(made[0])} logged {_text(made[0])!r}" if made else ""
        return f"expected {wanted}; it was not logged by {selected.__module__}{elsewhere}"
    if len(own) > 1:
        return f"expected {wanted}; it was logged {len(own)} times"
    record = own[0]
    match = MARKER.match(record.getMessage())
    assert match is not None
    if int(match.group(1)) != threshold:
        return f"expected {wanted}; found threshold={match.group(1)} in it"
    if record.levelno != logging.INFO:
        return f"expected {wanted}; it was logged at {record.levelname}"
    file = inspect.getsourcefile(selected) or ""
    if os.path.realpath(record.pathname) != os.path.realpath(file) or record.funcName != "__init__":
        return f"expected {wanted}; it was logged by {_where(record)}"
    return ""


def _where(record: logging.LogRecord) -> str:
    return f"{record.funcName} ({record.pathname}:{record.lineno}, logger {record.name}, {record.levelname})"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
