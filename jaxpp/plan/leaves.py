"""The leaves of a state by what they are, instead of by their place in one flat list."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Leaves"]

_T = TypeVar("_T")
_S = TypeVar("_S")


class Leaves(NamedTuple, Generic[_T]):
    """Something for each leaf of a state: an array, a name, a shape, a home.

    A plan takes and gives the groups one after another, in this order.

    Attributes:
        params: the parameters that all replicas share.
        own_params: the parameters of which each replica has its own (those of a task).
        opt: the optimizer state of ``params``.
        own_opt: the optimizer state of ``own_params``.
        model_state: what the loss hands on from microbatch to microbatch.
        loss_scale: the loss scale.
    """

    params: Sequence[_T] = ()
    own_params: Sequence[_T] = ()
    opt: Sequence[_T] = ()
    own_opt: Sequence[_T] = ()
    model_state: Sequence[_T] = ()
    loss_scale: Sequence[_T] = ()

    @property
    def all_params(self) -> list[_T]:
        """The parameters, shared and own, in the order in which they are numbered."""
        return [*self.params, *self.own_params]

    @property
    def all_opt(self) -> list[_T]:
        """The optimizer state, shared and own, in the order in which its leaves are numbered."""
        return [*self.opt, *self.own_opt]

    @property
    def own(self) -> list[_T]:
        """What each replica has of its own."""
        return [*self.own_params, *self.own_opt]

    @property
    def shared(self) -> "Leaves[_T]":
        """Without what each replica has of its own."""
        return self._replace(own_params=(), own_opt=())

    def flat(self) -> list[_T]:
        """All groups, one after another."""
        return list(itertools.chain.from_iterable(self))

    def fill(self, values: Sequence[_S]) -> "Leaves[_S]":
        """The same groups with other values, given one after another."""
        supply: Iterator[_S] = iter(values)
        return Leaves(*(list(itertools.islice(supply, len(group))) for group in self))

    def with_own(self, values: Sequence[_T], like: "Leaves[_S]") -> "Leaves[_T]":
        """The same with ``values`` as what each replica has of its own, divided as in ``like``."""
        count = len(like.own_params)
        return self._replace(own_params=values[:count], own_opt=values[count:])
