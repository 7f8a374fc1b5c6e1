"""The v1 worker."""

from __future__ import annotations

from .worker import WorkerTransform


class EagleWorkerTransform(WorkerTransform):
    """Target: ``srt/speculative/eagle_worker.py``, class ``EAGLEWorker`` (no overlap schedule; topk 1 and more).

    Why: this worker runs whenever the overlap schedule is off, by default up to sglang 0.5.10. A patch that misses it
    is accepted, printed and never executed.
    How: an import; at the end of ``__init__`` the attribute, the switch and the marker; first in
    ``forward_batch_generation`` the skipped step.
    Upstream: https://github.com/sgl-project/sglang/issues/1979
    Remove when: the file is gone (sglang 0.5.13 removed it).
    """

    role = "eagle_worker"
    class_name = "EAGLEWorker"
    version = 1
    batch = "batch"
