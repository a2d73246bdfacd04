"""Parameters are made where they will live: each stage runs only the part of ``init`` that makes its own leaves.

``init`` is traced once and carved by owner, so the whole model is never on one device, nor on the host, and every leaf has the
bits that ``jax.jit(init)(key)`` gives it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp.errors import InitError
from jaxpp.plan.builder import CALLER, Builder, Name
from jaxpp.stages.graph import Graph, Piece, partition, trace
from jaxpp.stages.jaxpr import shapes_of, variables
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["INIT_KEY", "closed_function", "lower_init", "trace_init"]

_KEY = Ref(Role.KEY, shared=True)
INIT_KEY = Name(CALLER, _KEY)
"""The key that parameters are made from."""


def trace_init(init: Callable[[Any], Any], key: Any) -> tuple[Graph, Any]:
    """Trace ``init(key)``: its graph, and the tree of parameter shapes.

    Raises:
        InitError: it converts a traced value to NumPy, which ``jax.jit`` cannot do either.
        Exception: whatever else it raises, unchanged, with a note.
    """
    trees: list[Any] = []

    def flat(key: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(init(key))
        trees.append(tree)
        return [jax.numpy.array(leaf, copy=True) for leaf in leaves]

    try:
        graph, shapes = trace(flat, key)
    except jax.errors.TracerArrayConversionError as error:
        raise InitError(
            "Pipeline.init(init, key, batch)",
            "init is traced by jax.jit, so that each device makes only its own parameters",
            "a conversion to NumPy inside init",
            "use jax.numpy and jax.random inside init, or make the parameters first and call pipe.init(params, batch)",
        ) from error
    except Exception as error:
        error.add_note("jaxpp: raised while tracing init")
        raise
    return graph, trees[-1].unflatten(shapes)


def closed_function(graph: Graph, piece: Piece, inputs: Sequence[Any], atoms: Sequence[Any]) -> Callable[..., list[Any]]:
    """A piece as a function of ``inputs``, its constants put in."""
    constants = {var: graph.constants[var] for var in piece.inputs if var in graph.constants}
    run = graph.function(piece.eqns, [*inputs, *constants], atoms)
    return lambda *args: run(*args, *constants.values())


def lower_init(graph: Graph, names: Sequence[Name]) -> Builder:
    """The lines that make parameters and model state from the key, ``INIT_KEY``.

    Args:
        graph: of the init function.
        names: of its results, each on its owner.
    """
    builder = Builder()
    for stage in sorted({name.stage for name in names}):
        mine = [leaf for leaf, name in enumerate(names) if name.stage == stage]
        atoms = [graph.outputs[leaf] for leaf in mine]
        piece = partition(graph, [None] * len(graph.eqns), dict.fromkeys(variables(atoms), stage)).get(stage, Piece())
        inputs = [var for var in piece.inputs if var in graph.inputs]
        names_in = [Name(stage, _KEY) for _ in inputs]
        for name in names_in:
            builder.send(f"send key to stage {stage}", INIT_KEY, name)
        names_out = [names[leaf] for leaf in mine]
        function = closed_function(graph, piece, inputs, atoms)
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        program = Program(function, *refs, shapes_of(inputs), name=f"stage_{stage}_init")
        builder.compute(f"init stage {stage}", program, stage, names_in, names_out, ())
    return builder
