"""What the design promises of the code: imports only go down, files stay small, names are found once, and are documented."""

import ast
import collections
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import types

import pytest

import jaxpp

ROOT = pathlib.Path(jaxpp.__file__).parent
PROJECT = ROOT.parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = [name for _, name, _ in pkgutil.walk_packages([str(ROOT)], "jaxpp.")]
ROOMS = "types errors tables schedule stages plan optim runtime options engine tasks observe forward tuner".split()
"""From the ground up: a room imports itself and the rooms before it. What is not named here is the public face, on top."""
STRANGERS = [
    {"schedule", "stages"},
    {"optim", "runtime"},
    {"tasks", "observe"},
    {"tasks", "forward"},
    {"tasks", "tuner"},
    {"forward", "tuner"},
]
"""Rooms of which neither imports the other."""
MOST_ANY_LINES = 200
MOST_NONE_ASSERTIONS = 5


def imports(file: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_only_go_down(file):
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    inside = {name.split(".")[1] for name in imports(file) if name.startswith("jaxpp.")}
    if room in ROOMS:
        assert inside <= set(ROOMS[: ROOMS.index(room) + 1])
        assert not any(room in pair and pair <= {room, *inside} for pair in STRANGERS)
    if file.name != "__init__.py" and file != ROOT / "tuning.py":  # a Tuning makes the pipeline that it has found
        assert "pipeline" not in inside


@pytest.mark.parametrize("file", sorted((ROOT / "schedule").rglob("*.py")), ids=lambda f: f.name)
def test_the_schedule_room_does_not_import_jax(file):
    assert not [name for name in imports(file) if name.split(".")[0] in ("jax", "flax", "optax", "numpy")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_only_public_jax_is_imported(file):
    assert not [name for name in imports(file) if "_src" in name]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists_and_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"


def test_only_transfer_moves_arrays_in_a_step():
    for file in FILES:
        text = file.read_text()
        if file.name not in ("transfer.py", "crossing.py", "here.py") and "device_put(" in text:
            assert file.name == "stage_table.py", f"{file} moves arrays"


def test_the_front_door_has_the_names_of_the_design():
    for name in ("value_and_grad", "gather", "Pipeline", "tune", "schedule"):
        assert name in jaxpp.__all__
    for name in ("init", "step", "evaluate", "verify", "profile", "stages", "schedule", "from_stages"):
        assert hasattr(jaxpp.Pipeline, name)


def test_the_picture_of_the_architecture_has_the_rooms_in_this_order():
    text = (PROJECT / "ARCHITECTURE.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == ROOMS
    drawing = text.split("```")[1]
    assert set(re.findall(r"\w\w+", drawing.split("public face")[1])) == set(ROOMS)


def module_of(file: pathlib.Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_by_way_of_others():
    known = {module_of(file) for file in FILES}
    graph = {module_of(file): known.intersection(imports(file)) - {module_of(file)} for file in FILES}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def assigned(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a file defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return []


def test_no_two_files_define_the_same_public_name():
    found = collections.defaultdict(set)
    for file in FILES:
        for statement in ast.parse(file.read_text()).body if file.name != "__init__.py" else ():
            for name in assigned(statement):
                found[name].add(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in found.items() if not name.startswith("_") and len(files) > 1}
    assert not twice


def test_nobody_but_place_asks_what_kind_of_place_it_is():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert kinds.isdisjoint({"Place", "OneDevice", "Submesh"}) or file == ROOT / "runtime" / "place.py", file


def test_few_values_are_none_until_later():
    asserted = [
        file
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert) and ast.unparse(node.test).endswith("is not None")
    ]
    assert len(asserted) <= MOST_NONE_ASSERTIONS, asserted


def test_few_lines_say_any():
    lines = collections.Counter(
        str(file.relative_to(ROOT)) for file in FILES for line in file.read_text().splitlines() if re.search(r"\bAny\b", line)
    )
    assert sum(lines.values()) <= MOST_ANY_LINES, lines.most_common(10)


def test_sentences_say_the_noun_again():
    word = "like" + "wise"
    for folder in ("jaxpp", "models", "experiments", "tests", "."):
        for file in (PROJECT / folder).glob("*" if folder == "." else "**/*"):
            assert file.suffix not in (".py", ".md") or word not in file.read_text().lower(), file


def private_names_of_pipelines() -> set[str]:
    """What only a ``Pipeline`` itself may use: its methods, and the attributes that its methods assign."""
    found = {name for name in dir(jaxpp.Pipeline) if name.startswith("_") and not name.startswith("__")}
    for kind in jaxpp.Pipeline.__mro__[:-1]:
        for node in ast.walk(ast.parse(inspect.getsource(kind))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_"):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("folder", ["tests", "experiments"])
def test_nobody_touches_what_is_private_in_a_pipeline(folder):
    private = private_names_of_pipelines()
    assert private
    for file in (PROJECT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in private:
                owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                mine = isinstance(node.value, ast.Name) and owner not in ("self", "cls")
                assert not mine and "pipe" not in owner, f"{file}: {ast.unparse(node)}"


def test_what_experiments_write_is_not_committed():
    ignored = (ROOT.parent / ".gitignore").read_text().splitlines()
    assert {"experiments/*/out/", "results/", "*.jsonl"} <= set(ignored)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_workers_begin_with_the_tests_that_share_something_long(count):
    # An experiment ran three times, as two workers took its tests from each other.
    sizes = {"test_a.py": 30, "test_lm.py": 5, "test_tasks_experiment.py": 12, "test_zoo.py": 40, "test_zoo_experiment.py": 9}
    tests = [types.SimpleNamespace(path=pathlib.Path(name)) for name, size in sizes.items() for _ in range(size)]
    ordered = in_parts(tests, count)
    assert sorted(map(id, ordered)) == sorted(map(id, tests))
    names = [test.path.name for test in ordered]
    for name in ("test_lm.py", "test_tasks_experiment.py", "test_zoo_experiment.py"):
        first = names.index(name)
        assert set(names[first : first + sizes[name]]) == {name}
        part = first * count // len(tests)
        ends = len(tests) * (part + 1) // count
        assert first + sizes[name] <= ends, "no worker has a part of it only"
