"""Model state passed from microbatch to microbatch.

The stage that makes a leaf's new value keeps it. A stage further on that reads the old one is sent it once a microbatch; one that
nobody changes, once a step. (No stage before it reads it: no cut lies there.)
"""

from jaxpp.errors import CutError
from jaxpp.plan.builder import Builder, Name
from jaxpp.plan.step import Step, state_name
from jaxpp.schedule.action import Action
from jaxpp.stages.program import Program, Role

__all__ = ["Passing"]


class Passing:
    """Knows where each model state leaf is, as every microbatch finds it, while the lines of a step are written."""

    def __init__(self, builder: Builder, step: Step):
        self._builder, self._step = builder, step
        self._made = {(leaf, 0): state_name(stage, leaf) for leaf, stage in enumerate(step.state_owner)}
        self._there = set(self._made.values())
        self._sent: dict[tuple[Name, int], Name] = {}

    def supply(self, action: Action, program: Program) -> None:
        """Send an action the model state that it reads and its stage does not have."""
        stage, _, i = action
        for ref in program.inputs:
            if ref.role == Role.STATE:
                self._bring(ref.index, i, stage, str(action))

    def note(self, action: Action, program: Program) -> None:
        """Note the model state that a forward has made."""
        stage, _, i = action
        made = {(ref.index, i + 1): state_name(stage, ref.index, i + 1) for ref in program.outputs if ref.role == Role.STATE}
        self._made |= made
        self._there |= set(made.values())

    def go_home(self) -> None:
        """Bring the leaves to their owners, as the last microbatch left them."""
        for leaf, stage in enumerate(self._step.state_owner):
            self._bring(leaf, len(self._step.sizes), stage, "the step")

    def _bring(self, leaf: int, microbatch: int, stage: int, reader: str) -> None:
        """Make a leaf, as a microbatch finds it, known to a stage; it is sent there if need be."""
        source, target = self._find(leaf, microbatch), state_name(stage, leaf, microbatch)
        if target not in self._there:
            self._there.add(target)
            near = self._sent.setdefault(
                (source, stage), target
            )  # what a stage was sent before serves as long as nobody changes it
            path = self._step.cuts[0].loss.state_paths[leaf]
            label = f"send {path} to stage {stage} for {reader}"
            self._builder.send(label, source if near == target else near, target)

    def _find(self, leaf: int, microbatch: int) -> Name:
        """Where a leaf is that no microbatch has changed since."""
        while (leaf, microbatch) not in self._made:
            microbatch -= 1
            loss = self._step.cuts[self._step.variants[microbatch]].loss
            if leaf not in loss.unchanged:
                raise CutError(
                    f"model_state {loss.state_paths[leaf]}",
                    "a stage reads what a later stage makes of the microbatch before, and does not wait for it",
                    f"microbatch {microbatch + 1} of {len(self._step.sizes)} reads it before {microbatch} has made it",
                    "update the state where it is read, or pass fewer stages",
                )
        return self._made[leaf, microbatch]
