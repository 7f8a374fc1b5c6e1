"""The codemods, one file each; :data:`TRANSFORMS` is the list of them by role."""

from __future__ import annotations

from .base import Transform
from .eagle_worker import EagleWorkerTransform
from .eagle_worker_v2 import EagleWorkerV2Transform
from .server_args import ServerArgsTransform

TRANSFORMS: dict[str, Transform] = {
    transform.role: transform
    for transform in (ServerArgsTransform(), EagleWorkerTransform(), EagleWorkerV2Transform())
}
