"""The v2 worker."""

from __future__ import annotations

from .worker import WorkerTransform


class EagleWorkerV2Transform(WorkerTransform):
    """Target: ``srt/speculative/eagle_worker_v2.py``, class ``EAGLEWorkerV2`` (overlap schedule, topk 1).

    Why: this worker runs with the overlap schedule: ``SGLANG_ENABLE_SPEC_V2=True`` up to sglang 0.5.10, the default
    from 0.5.11 on.
    How: an import; at the end of ``__init__`` the attribute, the switch and the marker; first in
    ``forward_batch_generation`` the skipped step.
    Upstream: https://github.com/sgl-project/sglang/issues/1979
    Remove when: sglang's own zero-step mode is exact at N and as fast as a plain decode.
    """

    role = "eagle_worker_v2"
    class_name = "EAGLEWorkerV2"
    version = 2
    batch = "model_worker_batch"
