"""The only file that uses what is not part of JAX's public interface, with care and with a public fall-back each.

The *key-value store* of ``jax.distributed`` has texts for all processes of a run; else ``processes.channel`` exchanges them by
sends. *JAX's attention by cuDNN* asks for cuDNN's version while it is traced, which whoever plans for GPUs that are not there does
not have; else it raises what it raises. The *runtime's own copy* (``jaxlib.xla_client``), which takes a fifth of the host time, is
tried once and must give what ``jax.device_put`` gives; else ``send`` calls ``jax.device_put``.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp.errors import ArgumentError
from jaxpp.targets import GPU, compiles_only, target_of
from jaxpp.types import Array, Device, Home


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # a later version may have another name for it
        return None


distributed, xla_client = _module("jax._src.distributed"), _module("jaxlib.xla_client")
attention = _module("jax._src.cudnn.fused_attention_stablehlo")

_METHODS = ("key_value_set", "key_value_dir_get", "blocking_key_value_get", "key_value_delete")


class Store:
    """Texts under names with slashes, which all processes read and write; ``jax.distributed.initialize`` starts it in process 0."""

    def __init__(self, client: Any, process: int):  # ``jax.process_index`` would open the devices, and wait for all processes
        self._client, self.process = client, process

    def put(self, name: str, text: str) -> None:
        """Write a text, over any that has this name."""
        self._client.key_value_set(name, text, allow_overwrite=True)

    def folder(self, name: str) -> Mapping[int, str]:
        """All texts of a folder, by the last part of their names, the number of a process."""
        return {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(name + "/")}

    def wait(self, name: str, seconds: float) -> str | None:
        """The text of this name, as soon as somebody has written it; None when the time is over."""
        try:
            return self._client.blocking_key_value_get(name, int(1000 * seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def drop(self, name: str) -> None:
        """Forget a text, or all texts of a folder, if there are any."""
        with contextlib.suppress(Exception):  # it was forgotten before
            self._client.key_value_delete(name)


def shared_store() -> Store | None:
    """The store of this run; None in a run of one process, and where this version of JAX has no such client."""
    state = getattr(distributed, "global_state", None)
    client, process, count = (getattr(state, name, None) for name in ("client", "process_id", "num_processes"))
    if process is None or count in (None, 1) or not all(hasattr(client, method) for method in _METHODS):
        return None
    return Store(client, process)


def is_known_alone() -> bool:
    """Whether this is a run of one process, as far as that can be said without opening the devices."""
    return getattr(getattr(distributed, "global_state", None), "num_processes", None) == 1


_CUDNN = 91000  # the version that ``GPU.spec`` names, 9.10.0, as cuDNN writes it
_PLANNED_FOR = ContextVar[GPU | None]("the GPU that is traced for", default=None)
_QUESTIONS = ContextVar[set[str] | None]("what traced functions have asked of the GPU", default=None)
_ONE_AT_A_TIME = threading.RLock()


def _has_cudnn(numbers: GPU) -> int:
    """The version of cuDNN, a patch of its own for each compute capability: JAX traces a function once for each version."""
    major, minor = numbers.chip.capability
    if major >= 8:
        return _CUDNN + 10 * major + minor
    where, rule = 'implementation="cudnn"', "attention by cuDNN is for GPUs of compute capability 8.0 and above"
    raise ArgumentError(where, rule, f"{numbers.kind}, of {major}.{minor}", 'pass implementation="xla", or leave it out')


def _capability(said: str) -> tuple[int, ...]:
    return tuple(map(int, said.split(".")))


_ANSWERS: Mapping[str, Callable[..., object]] = {
    "check_cudnn_version": _has_cudnn,
    "check_compute_capability": lambda numbers, least: numbers.chip.capability >= _capability(least),
    "is_cuda_compute_capability_equal": lambda numbers, exact: numbers.chip.capability == _capability(exact),
}


@contextlib.contextmanager
def cudnn_of(devices: Sequence[Device]) -> Iterator[None]:
    """Trace for devices that only compile as on a machine that has them, and cuDNN; other threads are answered as ever."""
    numbers = target_of(devices[0]) if compiles_only(devices[0]) else None
    asked = {name: getattr(attention, name) for name in _ANSWERS if callable(getattr(attention, name, None))}
    if numbers is None or not asked:
        yield
        return
    with _ONE_AT_A_TIME:
        token = _PLANNED_FOR.set(numbers)
        try:
            for name, usual in asked.items():
                setattr(attention, name, _answering(name, usual))
            yield
        finally:
            for name, usual in asked.items():
                setattr(attention, name, usual)
            _PLANNED_FOR.reset(token)


def _answering(name: str, usual: Callable[..., object]) -> Callable[..., object]:
    def answering(*given: object) -> object:
        numbers, noted = _PLANNED_FOR.get(), _QUESTIONS.get()
        if numbers is None:
            return usual(*given)
        if noted is not None:
            noted.add(name)
        return _ANSWERS[name](numbers, *given)

    return answering


@contextlib.contextmanager
def questions_noted() -> Iterator[set[str]]:
    """What functions ask of the GPU that they are traced for; nothing of one whose trace is the same for all GPUs."""
    noted = set[str]()
    token = _QUESTIONS.set(noted)
    try:
        yield noted
    finally:
        _QUESTIONS.reset(token)


@functools.cache
def direct_copy(home: Home) -> tuple[Callable[[Array], Sequence[Array]], frozenset[Sharding]]:
    """The copy that ``jax.device_put`` itself makes to one device, and the shardings from which it was tried and did the same."""
    if isinstance(home, Sharding) and not isinstance(home, SingleDeviceSharding):
        return jax.device_put, frozenset()
    sharding = home if isinstance(home, SingleDeviceSharding) else SingleDeviceSharding(home)
    (device,) = sharding.device_set
    shardings = [sharding]
    try:
        copy_arrays = xla_client.batched_copy_array_to_devices_with_sharding
        devices, semantics = [xla_client.DeviceList((device,))], [xla_client.ArrayCopySemantics.REUSE_INPUT]

        def copy(value: Array) -> Sequence[Array]:
            return copy_arrays([value], devices, shardings, semantics)

        values = [jnp.asarray(value) for value in (np.arange(6, dtype=np.int32).reshape(2, 3), 2.0)]
        tried = [[jax.device_put(v, other) for v in values] for other in device.client.local_devices() if other != device]
        good = [all(_is_same(copy(probe), jax.device_put(probe, home), probe) for probe in probes) for probes in tried]
        return copy, frozenset(probes[0].sharding for probes, is_good in zip(tried, good, strict=True) if is_good)
    except Exception:  # noqa: BLE001  (whatever it is that this version of JAX lacks)
        return jax.device_put, frozenset()


def memory_copy(goals: Sequence[Sharding]) -> Callable[..., Sequence[Array]]:
    """The copy that ``jax.device_put`` itself makes of arrays to other memory of their device; use it where ``copies_memory``."""
    copy_arrays, always = xla_client.batched_copy_array_to_devices_with_sharding, xla_client.ArrayCopySemantics.ALWAYS_COPY
    devices, semantics = [xla_client.DeviceList(tuple(goal.device_set)) for goal in goals], [always] * len(goals)
    shardings = list(goals)

    def copy(*values: Array) -> Sequence[Array]:
        return copy_arrays(list(values), devices, shardings, semantics)

    return copy


@functools.cache
def copies_memory(home: SingleDeviceSharding, there: SingleDeviceSharding) -> bool:
    """Whether ``memory_copy`` brings arrays of a device to other memory beside it and back: tried once."""
    try:
        values = jax.device_put([np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(2)], [home] * 2)
        copies = memory_copy([there] * 2)(*values)
        back = memory_copy([home] * 2)(*copies)
        buffers = {array.unsafe_buffer_pointer() for array in (*values, *copies, *back)}
        moved = all(copy.sharding == there and not value.is_deleted() for copy, value in zip(copies, values, strict=True))
        same = all(_is_same([array], value, copy) for array, value, copy in zip(back, values, copies, strict=True))
        return moved and same and len(buffers) == 3 * len(values)
    except Exception:  # noqa: BLE001  (whatever it is that this version of JAX lacks)
        return False


def _is_same(arrays: Sequence[Array], wanted: Array, source: Array) -> bool:
    (array,) = arrays
    kinds = [(one.aval, one.sharding, one.committed, one.devices(), type(one)) for one in (array, wanted)]
    return kinds[0] == kinds[1] and not source.is_deleted() and bool(np.array_equal(array, source))
