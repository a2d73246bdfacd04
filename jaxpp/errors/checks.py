"""The arguments that stand for themselves (functions, names, devices), checked as the user wrote them."""

import numbers
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jaxpp.errors import ArgumentError, BatchError, shown
from jaxpp.errors.tracebacks import current_trace
from jaxpp.types import Device, Tree


def as_tuple(given: object) -> tuple[Tree, ...]:
    """The items of a list or of another iterable; a string, or what is no iterable, is one item."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def is_real(value: object) -> bool:
    """Whether a value is a real number, NumPy's included; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_flags(where: str, **flags: object) -> None:
    """Refuse what is neither True nor False: the text ``"no"``, which Python takes for True, or a number."""
    if wrong := [f"{name}={shown(value)}" for name, value in flags.items() if not isinstance(value, (bool, np.bool_))]:
        names = [name.partition("=")[0] for name in wrong]
        fix = "; ".join(f"pass {name}=True or {name}=False" for name in names)
        raise ArgumentError(where, "it is either True or False", wrong, fix)


def check_function(where: str, rule: str, value: object, fix: str = "pass the function itself") -> None:
    """Refuse what cannot be called, and a model, which is called in a function of the user's."""
    if callable(getattr(value, "init", None)) and callable(getattr(value, "apply", None)):
        call, fix = 'model.apply(params, batch["x"])', "write a function that calls model.apply"
        if rule.startswith("the loss"):
            fix += f', such as lambda params, batch: jnp.mean(({call} - batch["y"]) ** 2)'
        elif "carry" not in rule:
            fix += f", such as lambda params, batch: {call}"
        raise ArgumentError(where, rule, f"a model, {getattr(value, '__name__', None) or type(value).__name__}", fix)
    if not callable(value):
        raise ArgumentError(where, rule, shown(value), fix)


def check_optimizer(loss_fn: object, optimizer: object) -> None:
    """Refuse what is no optax transformation: what has no ``init`` and ``update``."""
    if _is_optimizer(optimizer):
        return
    fix = "pass for example optax.adamw(3e-4)"
    if _is_optimizer(loss_fn):
        fix = "change their places: the loss comes first"
    elif isinstance(optimizer, (list, tuple)) and optimizer and all(map(_is_optimizer, optimizer)):
        fix = "pass optax.chain(*transformations), one of all of them"
    elif callable(optimizer) and str(getattr(optimizer, "__module__", "")).startswith("optax"):
        made_inside = "<locals>" in getattr(optimizer, "__qualname__", "")  # a schedule of learning rates
        fix = f"call it: optax.{getattr(optimizer, '__name__', 'adamw')}(3e-4), for example"
        fix = "pass optax.adamw(schedule), if this is a schedule of learning rates" if made_inside else fix
    rule = "the optimizer is an optax transformation, with init and update"
    raise ArgumentError("Pipeline(loss_fn, optimizer, ...)", rule, shown(optimizer), fix)


def _is_optimizer(value: object) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def check_devices(devices: Tree) -> tuple[Device, ...]:
    """The devices given, which are at least one, or all there are."""
    if devices is None:
        return tuple(jax.devices())
    rule = "a pipeline runs on a list of JAX's devices, one a rank"
    if isinstance(devices, Mesh):
        raise ArgumentError("devices", rule, shown(devices), "pass it as mesh=mesh, and leave devices out")
    if isinstance(devices, str):
        raise ArgumentError(f"devices={devices!r}", rule, f"the name {devices!r}", f"pass devices=jax.devices({devices!r})")
    if isinstance(devices, jax.Device):
        raise ArgumentError(f"devices={devices}", rule, "one device", f"pass a list: devices=[jax.devices()[{devices.id}]]")
    if not isinstance(devices, Iterable):
        raise ArgumentError("devices", rule, shown(devices), _those_devices(devices, [devices]))
    found = tuple(devices)
    if not found:
        raise ArgumentError("devices=[]", "a pipeline needs at least one device", "an empty list", "leave devices out to use all")
    if wrong := [f"devices[{k}]: {shown(device)}" for k, device in enumerate(found) if not isinstance(device, jax.Device)]:
        raise ArgumentError("devices", rule, wrong, _those_devices(devices, found))
    return found


def check_ranks(devices: Tree) -> tuple[tuple[Device, ...], ...]:
    """The devices of each rank: of each entry of a list of devices, some of which may be lists of devices; or all there are."""
    if isinstance(devices, (str, Mesh, jax.Device)) or not isinstance(devices, Iterable):
        return tuple((device,) for device in check_devices(devices))
    entries = [tuple(each) if isinstance(each, (list, tuple, np.ndarray)) else each for each in devices]
    if not any(isinstance(each, tuple) for each in entries):
        return tuple((device,) for device in check_devices(entries))
    ranks = [each if isinstance(each, tuple) else (each,) for each in entries]
    where, rule = "devices", "each entry of a list of devices is a rank: a device of JAX's, or a list of such devices"
    if wrong := [
        f"devices[{k}]: {shown(each)}"
        for k, each in enumerate(entries)
        if not ranks[k] or not all(isinstance(device, jax.Device) for device in ranks[k])
    ]:
        raise ArgumentError(where, rule, wrong, "pass for example devices=[jax.devices()[:2], *jax.devices()[2:4]]")
    sets = [frozenset(each) for each in ranks]
    wrong = [
        f"devices[{k}]: {shown(each)}"
        for k, each in enumerate(entries)
        if len(sets[k]) < len(ranks[k]) or any(sets[k] & other and ranks[k] != ranks[i] for i, other in enumerate(sets))
    ]
    if wrong:
        rule = "a device stands once in a rank, and two ranks have all their devices in common, in the same order, or none"
        raise ArgumentError(where, rule, wrong, "name each device once")
    return tuple(ranks)


def _those_devices(devices: object, found: Sequence[object]) -> str:
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        return f"pass devices=jax.devices()[:{devices}]"
    if found and all(isinstance(device, int) and not isinstance(device, bool) for device in found):
        return f"pass devices=[jax.devices()[k] for k in {shown(list(found))}]"
    return "pass some of jax.devices(), such as devices=jax.devices()[:2]"


def refuse_tracers(where: str, *trees: Tree) -> None:
    """Refuse to run inside a transformation of JAX, where arguments are traced, or all that is computed is.

    ``jax.Ref``s are refused too, and iterators, which JAX would take for leaves.
    """
    for tree in trees:
        if found := [each for each in (tree if isinstance(tree, tuple) else (tree,)) if isinstance(each, Iterator)]:
            fix = "pass one batch at a time, for batch in batches: state, metrics = pipe.step(state, batch); next(batches) to init"
            raise BatchError(where, "a batch is a tree of arrays", f"an iterator, {type(found[0]).__name__}", fix)
    leaves = jax.tree.leaves(trees)
    if any(isinstance(leaf, jax.Ref) for leaf in leaves):
        paths = jax.tree_util.tree_leaves_with_path(trees)
        got = [f"{jax.tree_util.keystr(path[1:]) or 'an argument'}: a jax.Ref" for path, leaf in paths if isinstance(leaf, jax.Ref)]
        rule, fix = "the programs of stages share no array that can be changed", "pass what it holds now, ref[...]"
        raise ArgumentError(where, rule, got, fix)
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if traced or (leaves and is_traced()):
        rule = "a pipeline runs programs on several devices itself, so it cannot run inside jax.jit, jax.grad or jax.vmap"
        fix = f"call {where.partition('(')[0]} outside of these (it compiles what it runs itself), and jit what comes after it"
        raise ArgumentError(where, rule, "a traced argument" if traced else "a call in a function that JAX traces", fix)


def is_traced() -> bool:
    """Whether what is computed here becomes an equation of a function that JAX traces, even where no argument of it is traced."""
    return type(current_trace()) is not _EAGER and isinstance(jax.lax.neg(np.float32(0)), Tracer)


_EAGER = type(current_trace())  # how JAX computes where nothing is traced
