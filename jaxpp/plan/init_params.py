"""Parameters and optimizer state are made where they will live: each stage runs only the part of ``init`` that makes its leaves.

``init`` is traced once and divided by owner, so the whole model is never on one device, nor on the host, and every leaf has the
bits that ``jax.jit(init)(key)`` gives it.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Var

from jaxpp.errors import InitError
from jaxpp.plan.builder import CALLER, Builder, Name
from jaxpp.stages.fingerprint import ComparableFunction, fingerprint
from jaxpp.stages.graph import Graph, Piece, partition, trace
from jaxpp.stages.jaxpr import Atom, shapes_of, variables
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, Key, Tree

INIT_KEY = Name(CALLER, Ref(Role.KEY, shared=True))  # that parameters are made from


def trace_init(init: Callable[[Key], Tree], key: Key) -> tuple[Graph, Tree]:
    """Trace ``init(key)``: its graph, and the tree of parameter shapes."""
    trees: list[Tree] = []

    def flat(key: Key) -> list[Array]:
        leaves, tree = jax.tree.flatten(init(key))
        trees.append(tree)
        return [jax.numpy.array(leaf, copy=True) for leaf in leaves]

    try:
        graph, shapes = trace(flat, key)
    except jax.errors.TracerArrayConversionError as error:
        rule = "init is traced by jax.jit, so that each device makes only its own parameters"
        fix = "use jax.numpy and jax.random inside init, or make the parameters first and call pipe.init(params, batch)"
        raise InitError("Pipeline.init(init, key, batch)", rule, "a conversion to NumPy inside init", fix) from error
    except Exception as error:
        error.add_note("jaxpp: raised while tracing init")
        raise
    return graph, trees[-1].unflatten(shapes)


def closed_function(graph: Graph, piece: Piece, inputs: Sequence[Var], atoms: Sequence[Atom]) -> ComparableFunction:
    """A piece as a function of ``inputs``, its constants put in."""
    constants = {var: graph.constants[var] for var in piece.inputs if var in graph.constants}
    run = graph.function(piece.eqns, [*inputs, *constants], atoms)
    does = fingerprint([graph.eqns[i] for i in piece.eqns], inputs, atoms, constants)
    return ComparableFunction(lambda *args: run(*args, *constants.values()), does)


def lower_init(graph: Graph, sources_of: Sequence[Name], made: Sequence[Name], what: str = "init") -> Builder:
    """The lines that make leaves of a state from the key, or from other leaves, each stage its own."""
    builder, sources = Builder(), dict(zip(graph.inputs, sources_of, strict=True))
    for stage in sorted({name.stage for name in made}):
        mine = [k for k, name in enumerate(made) if name.stage == stage]
        atoms = [graph.outputs[k] for k in mine]
        piece = partition(graph, [None] * len(graph.eqns), dict.fromkeys(variables(atoms), stage)).get(stage, Piece())
        inputs = [var for var in piece.inputs if var in sources]
        names_in, names_out = [sources[var]._replace(stage=stage) for var in inputs], [made[k] for k in mine]
        for var, name in zip(inputs, names_in, strict=True):
            builder.send(f"send {name.ref.role} {name.ref.index} to stage {stage}", sources[var], name)
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        program = Program(closed_function(graph, piece, inputs, atoms), *refs, shapes_of(inputs), name=f"stage_{stage}_{what}")
        builder.compute(f"init stage {stage}", program, stage, names_in, names_out, ())
    return builder
