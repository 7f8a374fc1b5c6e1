"""What a machine without a GPU needs before sglang can be imported and a Scheduler built on it.

A real package always wins over its stand-in, and nothing is computed wrongly: a missing CUDA kernel is a name that
raises when it is called. On a machine with a GPU every function here does nothing and returns ``[]``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_KEEP: list[Any] = []  # torch.library fragments vanish when they are collected

_ENVIRONMENT = {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device."""
    import torch

    return bool(torch.cuda.is_available())


def prepare() -> list[str]:
    """Everything that must happen before ``import sglang``. Returns what was replaced, one sentence each."""
    if has_gpu():
        return []
    import torch

    os.environ.update(_ENVIRONMENT)  # read while triton and sglang are imported
    settings = ", ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
    used = [f"GPU: none on this machine; Triton kernels run in Triton's interpreter, uncompiled ({settings})"]
    used += _torchvision_ops()
    used += _missing_packages("sgl_kernel")
    setattr(torch.cuda, "synchronize", lambda *_a, **_k: None)  # noqa: B010
    setattr(torch.Tensor, "record_stream", lambda _self, _stream: None)  # noqa: B010
    used.append("torch.cuda.synchronize and Tensor.record_stream: replaced by no-ops")
    return used


def after_server_args() -> list[str]:
    """What is replaced inside sglang once ``sglang.srt.server_args`` is imported and before the workers are."""
    if has_gpu():
        return []
    used: list[str] = []
    import sglang.srt.utils as utils
    import sglang.srt.utils.common as common

    if hasattr(common, "cached_triton_kernel"):
        # It asserts triton's JITFunction; the interpreter's function is another class.
        def uncached(_key_fn: Any = None) -> Callable[[Any], Any]:
            return lambda function: function

        common.cached_triton_kernel = utils.cached_triton_kernel = uncached
        used.append("sglang.srt.utils.cached_triton_kernel: replaced by no caching")
    return used


class _MissingKernel:
    """A name of a CUDA package that is not here. Importing it is fine, calling it raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel, and this machine has no GPU")

    def __repr__(self) -> str:
        return f"<missing CUDA kernel {self.__name__}>"


class _MissingModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")


class _MissingFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the given top-level packages, last of all finders: a real install wins."""

    # sglang has an ImportError fallback of its own for these.
    absent = frozenset({"sgl_kernel.scalar_type"})

    def __init__(self, top: str) -> None:
        self.top = top

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.absent or fullname.split(".")[0] != self.top:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _missing_packages(*names: str) -> list[str]:
    used = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            why = str(error)
        except Exception as error:  # a CUDA wheel without its driver raises what it likes
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            continue
        for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
            del sys.modules[loaded]
        finder = _MissingFinder(name)
        if "No module named" in why:
            sys.meta_path.append(finder)
        else:  # installed but broken: the stand-in must come first
            sys.meta_path.insert(0, finder)
        used.append(f"package {name}: a stand-in whose kernels raise when called ({why})")
    return used


def _torchvision_ops() -> list[str]:
    """PyPI's torchvision is a CUDA build, and dies at ``register_fake("torchvision::nms")`` beside a CPU torch."""
    import torch

    try:
        torch.ops.torchvision.nms  # noqa: B018
    except (AttributeError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEEP.append(library)
        return ["operator torchvision::nms: declared without code"]
    return []


@contextmanager
def gpu_answers(server_args_module: Any, used: list[str]) -> Iterator[None]:
    """While open, what argument resolution asks of a GPU is answered as one H200 would.

    Only the names that ``sglang.srt.server_args`` binds are replaced. Each one that is really asked is added to
    ``used``; everything is put back at the end.
    """
    if has_gpu():
        yield
        return
    import torch

    undo: list[tuple[Any, str, Any]] = []

    def answer(owner: Any, name: str, value: Any, text: str) -> None:
        if not hasattr(owner, name):
            return
        line = f"{text} (asked while the arguments were resolved)"

        def replaced(*_args: Any, **_kwargs: Any) -> Any:
            if line not in used:
                used.append(line)
            return value

        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replaced)

    module = server_args_module
    answer(module, "get_device", "cuda", "device: cuda")
    answer(module, "get_device_memory_capacity", 143771.0, "GPU memory: 143771 MiB, as one H200")
    answer(module, "get_device_name", "NVIDIA H200", "GPU name: NVIDIA H200")
    answer(module, "get_device_sm", 90, "compute capability: 9.0, as one H200")
    answer(module, "is_sm90_supported", True, "compute capability: 9.0, as one H200")
    answer(module, "is_sm100_supported", False, "compute capability: 9.0, as one H200")
    answer(module, "is_sm120_supported", False, "compute capability: 9.0, as one H200")
    answer(module, "is_cuda", True, "platform: CUDA")
    answer(module, "is_cpu", False, "platform: CUDA")
    answer(torch.cuda, "get_device_capability", (9, 0), "compute capability: 9.0, as one H200")
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
