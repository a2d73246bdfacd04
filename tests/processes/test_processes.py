"""Several processes give what one process gives on the same devices, bit by bit, and each does and holds its own part alone.

Two processes and four are started once each, and run a list of cases (``process_cases.py``). The same cases run in this
process, on as many devices.
"""

import jax
import numpy as np
import pytest

from tests.processes.process_cases import Case, as_json, load, run
from tests.processes.processes import launch

TWO = {
    "ties, dropout, clipping and unequal microbatches": Case("tied", applied=True),
    "interleaved, with model state and a loss scale": Case("norms", "interleaved", 8),
    "zb-h1 over stacked layers": Case("stacked", "zb-h1"),
    "zb-v, each process with its own part of the batch": Case(
        "mlp", "zb-v", 8, local=True, looked=True, batch_size=18, applied=True
    ),
    "a mesh inside each process": Case("mlp", "1f1b", 2, 2, (2, 2, 2), each=4),
    "data across processes, each with its own rows": Case("mlp", "zb-h1", 2, 3, (2, 2, 1), (1, 0, 2), batch_size=24, local=True),
    "residuals in host memory": Case("tied", "gpipe", 4, 5, looked=True, remat="offload"),
    "residuals in host memory, data across processes": Case(
        "mlp", "gpipe", 2, 4, (2, 2, 1), (1, 0, 2), batch_size=16, remat="offload"
    ),
}
FOUR = {
    "eight ranks": Case("mlp", "1f1b", 8, 4, local=True, looked=True),
    "data across processes, pipe too": Case("mlp", "1f1b", 2, 2, (2, 2, 2), (1, 0, 2)),
}
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def grid(count: int) -> dict[str, Case]:
    """Every model under every schedule, with a device for each rank."""
    found = {}
    for model in ("gpt", "tied", "norms", "stacked", "mlp"):
        for schedule, per_rank in SCHEDULES.items():
            microbatches = 2 * count if schedule == "interleaved" else 2 * count + 1
            stages, batch_size = 2 * count * per_rank, 2 * microbatches + 3
            found[f"{model} {schedule}"] = Case(model, schedule, stages, microbatches, batch_size=batch_size)
    return found


def meshes(shape: tuple[int, ...], order: tuple[int, ...], each: int) -> dict[str, Case]:
    """Models with tensor parallelism under every schedule."""
    return {
        f"{model} {schedule}": Case(model, schedule, 2 * per_rank, 4, shape, order, batch_size=16, each=each)
        for model in ("gpt", "mlp")
        for schedule, per_rank in SCHEDULES.items()
    }


GRIDS = {
    "two processes": (2, grid(2)),
    "four processes": (4, grid(4)),
    "meshes inside two processes": (2, meshes((2, 2, 2), (0, 1, 2), 4)),
    "data across two processes": (2, meshes((2, 2, 1), (1, 0, 2), 2)),
    "data and pipe across four processes": (4, meshes((2, 2, 2), (1, 0, 2), 2)),
}
SEEN = ("live", "kept", "prog")
"""How the names of what ``look`` returns begin."""


class Together:
    """What several processes found, and one."""

    def __init__(self, count: int, cases: dict[str, Case], folder):
        self.count, self.cases, self.folder = count, cases, folder
        arguments = {"folder": str(folder), "cases": {name: as_json(case) for name, case in cases.items()}}
        devices = max(case.each for case in cases.values())
        for ended in launch("tests.processes.process_cases:main", count, arguments, devices=devices, seconds=60 * len(cases)):
            print(ended.out)

    def parts(self, name: str) -> list[dict[str, np.ndarray]]:
        """What each process found."""
        return [load(self.folder / f"{name}.{number}.npz") for number in range(self.count)]

    def alone(self, name: str) -> dict[str, np.ndarray]:
        """What one process finds."""
        return run(self.cases[name], jax.devices()[: self.count * self.cases[name].each])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Together(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return Together(4, FOUR, tmp_path_factory.mktemp("four"))


def results(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in found.items() if not name.startswith(SEEN)}


def check(together: Together, name: str) -> None:
    """Put together what the processes hold; it is what one process finds, and all of them can read the metrics."""
    parts, alone, found = together.parts(name), together.alone(name), {}
    for part in map(results, parts):
        for leaf, value in part.items():
            known = found.setdefault(leaf, value)
            assert known.tobytes() == value.tobytes(), f"{leaf} differs between processes"
    wanted = results(alone)
    assert sorted(found) == sorted(wanted)
    assert len(wanted) > 50
    for leaf, value in wanted.items():
        assert (found[leaf].dtype, found[leaf].shape, found[leaf].tobytes()) == (value.dtype, value.shape, value.tobytes()), leaf
    metrics = {leaf for leaf in wanted if "'metrics'" in leaf or leaf.startswith("evaluate")}
    assert len(metrics) >= 3 * 3  # loss, norm and step
    held = [set(results(part)) - metrics for part in parts]
    assert all(metrics <= set(part) for part in parts)
    if together.count > 2 or together.cases[name].order == (0, 1, 2):  # else every process has replicas of all ranks
        assert all(len(part) < len(wanted) - len(metrics) for part in held)


@pytest.mark.parametrize("name", TWO)
def test_two_processes_give_the_bits_of_one(two, name):
    check(two, name)


def test_the_second_step_overflows(two):
    name = next(name for name, case in TWO.items() if case.model == "norms")
    for part in two.parts(name):
        assert [bool(part[f"{step} ['metrics']['finite'] []"]) for step in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_give_the_bits_of_one(four, name):
    check(four, name)


@pytest.mark.parametrize(("fixture", "name"), [("two", list(TWO)[3]), ("four", "eight ranks")])
def test_a_process_holds_what_the_account_says_of_its_ranks_and_compiles_their_programs_alone(fixture, name, request):
    together = request.getfixturevalue(fixture)
    alone, parts = together.alone(name), together.parts(name)
    assert sum(int(part["programs"][0]) for part in parts) == alone["programs"][0]
    for part in parts:
        assert 0 < part["programs"][0] < alone["programs"][0]
        assert {device for device in part if device.startswith("live")} == {"live 0", "live 1"}
        for k in range(2):
            above = part[f"live {k}"]
            assert len(above) > 20
            assert above.min() == above.max()
            assert 0 <= above[0] - part[f"kept {k}"][0] <= 16  # and metrics that were read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")
@pytest.mark.parametrize("name", GRIDS)
def test_the_full_grid_gives_the_bits_of_one(tmp_path, name):
    count, cases = GRIDS[name]
    together = Together(count, cases, tmp_path)
    for case in cases:
        check(together, case)
