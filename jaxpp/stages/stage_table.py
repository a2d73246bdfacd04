"""The stage table, ``print(pipe.stages)``: what each stage is, where it lives, what it costs, what crosses to the next.

*F* and *B* are the FLOPs of forward and backward, *share* is the part of the step's time, as it is estimated (``estimate.py``);
*kept* are the bytes that one microbatch holds from forward to backward, out of those that it would hold if nothing were computed
again; *offloaded*: those of some microbatches wait in host memory. Each row is a ``Stage``, which can also be run by hand.

Below, "about N times as fast" is what this schedule makes of the estimated times, sends included; a measured step may be faster or
slower than that. ``UnevenStagesWarning`` says "at most": one over the largest share, which no schedule of these stages can exceed.
"""

import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp.errors import PullbackError
from jaxpp.errors.tracebacks import entry
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.cuts.head import SCOPE
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, in_units, whole_rows
from jaxpp.targets import device_name, refuse_compile_only
from jaxpp.types import Activation, Cotangent, Device, Grads, Leaf, Params, Tree


class Pullback:
    """Turns the cotangent of an activation into ``(grads, cotangent of its input)``, once: the call frees the residuals."""

    def __init__(self, stage: int, vjp: Callable[[Cotangent], tuple[Grads, Cotangent]]):
        self._stage = stage
        self._vjp: Callable[[Cotangent], tuple[Grads, Cotangent]] | None = vjp

    def __call__(self, cotangent: Cotangent) -> tuple[Grads, Cotangent]:
        """Run the backward; a second time raises a ``PullbackError``."""
        if self._vjp is None:
            where, rule = f"pullback of stage {self._stage}", "a pullback runs once, because it gives its residuals back"
            raise PullbackError(where, rule, "a second call", f"call pipe.stages[{self._stage}].forward again for a new pullback")
        vjp, self._vjp = self._vjp, None
        return vjp(cotangent)


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    index: int
    device: object  # where it lives: a device, or several
    home: Device  # where ``forward`` runs: the device, or the first of them
    modules: str  # the modules it runs, shortened
    params: tuple[str, ...]  # paths of the parameters it owns
    borrowed: tuple[str, ...]  # paths of the parameters it reads but does not own
    num_params: int  # parameters it owns
    num_bytes: int  # their bytes
    flops: float  # of the forward of one microbatch
    backward_flops: float  # of its backward, with what that computes again
    costs: Mapping[str, float]  # seconds that F, B, I and W of one microbatch take, estimated
    kept: int  # bytes that a microbatch holds from the stage's forward to its backward
    keepable: int  # what they would be with ``remat="keep"``
    sends: tuple[str, ...]  # shape of each value it sends, and to which stage; of a last stage without a loss, the outputs
    function: Callable[..., Activation]  # ``(params, x, *inputs) -> x``; what ``forward`` runs
    trains: bool = True  # whether it has a backward
    offloads: bool = False  # whether residuals of some of its microbatches wait in host memory

    @property
    def seconds(self) -> float:
        """What forward and backward take together, estimated."""
        return self.costs["F"] + self.costs["B"]

    @entry
    def forward(self, params: Params, x: Activation, *inputs: Any) -> tuple[Activation, Pullback] | Activation:
        """Run the stage by hand, on its device (of several, the first).

        Args:
            params: this stage's parameters for a pipeline made ``from_stages``; the whole parameter tree for a loss that was cut.
            x: the stage's input: for a cut pipeline ``{}`` at the first stage, then what the stage before returned.
            *inputs: for a cut pipeline the microbatch, and its key if the loss takes one.

        Returns:
            the activation (from the last stage of a cut pipeline the loss), alone for a ``jaxpp.Forward``; and else the pullback:
            ``grads, cotangent = pullback(cotangent_of_activation)``, which brings its cotangent to the stage's device too.
        """

        def copied(leaf: Leaf) -> Leaf:  # the pullback reads it later, and the caller may change it before
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf

        def on_device(tree: Tree) -> Tree:
            return jax.device_put(jax.tree.map(copied, tree), self.home)

        refuse_compile_only(f"pipe.stages[{self.index}].forward", [self.home])
        params, x, inputs = on_device((params, x, inputs))
        if not self.trains:
            return self.function(params, x, *inputs)
        activation, vjp = jax.vjp(lambda params, x: self.function(params, x, *inputs), params, x)
        return activation, Pullback(self.index, lambda cotangent: vjp(on_device(cotangent)))


class Stages(Sequence[Stage]):
    """The stages of a pipeline, in order; prints as a table, with ``remarks`` on what was chosen below."""

    def __init__(self, stages: Sequence[Stage], remarks: Sequence[str] = (), schedule: str = "", speed_up: float = 0.0):
        self._stages, self.remarks = tuple(stages), tuple(remarks)
        self._schedule, self.speed_up = schedule, speed_up  # how many times as fast as one device a step is, estimated

    def __getitem__(self, index: Any) -> Any:
        return self._stages[index]

    def __len__(self) -> int:
        return len(self._stages)

    def _cells(self) -> list[list[str]]:
        total, keeps = sum(stage.seconds for stage in self) or 1.0, any(stage.trains for stage in self)
        rows = [["stage", "device", "modules", "params", "bytes", "F", *["B"] * keeps, "share", *["kept"] * keeps, "sends"]]
        for stage in self:
            tied = f" (+{len(stage.borrowed)} tied)" if stage.borrowed else ""
            sends = ", ".join(f"{n} x {what}" if n > 1 else what for what, n in Counter(stage.sends).items()) or "loss"
            everything = f" of {bytes_in_words(stage.keepable)}" if stage.kept < stage.keepable else ""
            kept = f"{bytes_in_words(stage.kept)}{everything}{', offloaded' * stage.offloads}"
            row = [str(stage.index), device_name(stage.device), stage.modules, f"{stage.num_params:,}{tied}"]
            row += [bytes_in_words(stage.num_bytes), _flops(stage.flops), *[_flops(stage.backward_flops)] * keeps]
            rows.append([*row, f"{stage.seconds / total:.1%}", *[kept] * keeps, sends])
        return rows

    def _legend(self) -> str:
        """What the columns count."""
        if not any(stage.trains for stage in self):
            return "F: FLOPs of a microbatch; share: of the time"
        less = ', of all with remat="keep"' * any(stage.kept < stage.keepable for stage in self)
        return f"F, B: FLOPs of a microbatch, forward and backward; share: of the time; kept: bytes from F to B{less}"

    def _summary(self) -> str:
        """All parameters, the device (or the rank of several devices) with the most work, and the speed-up of the step."""
        total = sum(stage.seconds for stage in self) or 1.0
        shares: dict[str, float] = {}
        for stage in self:
            name = device_name(stage.device)
            shares[name] = shares.get(name, 0.0) + stage.seconds / total
        device, share = max(shares.items(), key=lambda item: item[1])
        one = "one device" if any(device_name(stage.device) == device_name(stage.home) for stage in self) else "one rank"
        speed = f"{self._schedule} is about {self.speed_up:.3g} times as fast as {one}" if share else "no work is counted"
        return f"{sum(stage.num_params for stage in self):,} parameters; largest share {share:.1%}, on {device}; {speed}"

    def __str__(self) -> str:
        lines = [*whole_rows(self._cells()), *fold_lines([self._legend(), self._summary(), *self.remarks])]
        return "\n".join([*lines, ""])  # a line of its own for what is printed behind it

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._cells(), left=True) + html_remarks([self._legend(), self._summary(), *self.remarks])


def _flops(flops: float) -> str:
    return in_units(flops, 1000, ("", "k", "M", "G", "T", "P"))


def tabulate(
    cut: CutLoss,
    owner: Sequence[int],
    places: Sequence[tuple[object, Device]],
    functions: Sequence[Callable[..., Activation]],
    offloading: Collection[int] = (),
) -> Stages:
    """The table of a cut loss; ``offloading`` are the stages of which residuals wait in host memory."""
    stages = []
    labels = _labels([code.modules for code in cut.stages])
    for code, (place, home), function in zip(cut.stages, places, functions, strict=True):
        mine = [leaf for leaf, stage in enumerate(owner) if stage == code.index]
        avals = [aval_of(cut.loss.params[leaf]) for leaf in mine]
        sends = [
            f"{describe(aval)} to {', '.join(map(str, peers))}"
            for aval, stage, peers in zip(cut.activations, cut.producer, cut.consumers, strict=True)
            if stage == code.index
        ]
        if not cut.loss.is_loss and code.index == len(cut.stages) - 1:
            sends += [f"{describe(aval_of(atom))} as output" for atom in cut.loss.aux]
        stages.append(
            Stage(
                index=code.index,
                device=place,
                home=home,
                modules=labels[code.index],
                params=tuple(cut.loss.param_paths[leaf] for leaf in mine),
                borrowed=tuple(cut.loss.param_paths[leaf] for leaf in code.params if owner[leaf] != code.index),
                num_params=sum(aval.size for aval in avals),
                num_bytes=sum(count_bytes(aval) for aval in avals),
                flops=code.flops,
                backward_flops=code.backward_flops,
                costs=code.costs,
                kept=code.kept,
                keepable=code.keepable,
                sends=tuple(sends),
                function=function,
                trains=cut.loss.is_loss,
                offloads=code.index in offloading,
            )
        )
    return Stages(stages)


def _labels(stages: Sequence[Sequence[str]]) -> list[str]:
    """The first and last module of each stage, at the shallowest level that tells the stages apart, if any does."""
    paths = [[tuple(path.split("/")) for path in modules if path] for modules in stages]
    longest = max((len(path) for found in paths for path in found), default=1)
    of_model = ["/".join(path) for found in paths for path in found if not _is_divided_head(path)]
    shared = posixpath.commonpath(of_model or [""])
    top = len(list(filter(None, shared.split("/"))))
    depths = range(min(top + 1, longest), longest + 1)
    levels = [[_span(found, min(top, longest - 1), depth) for found in paths] for depth in depths]
    return max(levels, key=lambda labels: len(set(labels)))


def _is_divided_head(path: tuple[str, ...]) -> bool:
    return path[0].partition("[")[0] == SCOPE


def _span(paths: Sequence[tuple[str, ...]], top: int, depth: int) -> str:
    inside = [path if _is_divided_head(path) else path[top:depth] for path in paths]  # that head is beside the model, not in it
    shown = list(dict.fromkeys("/".join(path) for path in inside if path))
    if not shown:
        return paths[0][-1] if paths else "-"
    return shown[0] if len(shown) == 1 else f"{shown[0]} .. {shown[-1]}"
