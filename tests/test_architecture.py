"""What the design promises of the code: imports only go down, a picture that shows them, and texts that ``.ci/lint`` checks."""

import ast
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import jaxpp
from tests.conftest import SHAPED

ROOT = pathlib.Path(jaxpp.__file__).parent
PROJECT = ROOT.parent
FILES = sorted(ROOT.rglob("*.py"))
ROOMS = [
    *"types errors tables targets efficiency schedule stages lowering optim".split(),
    *"runtime options engine shardings tasks observe forward tuner".split(),
]
"""From the ground up: a room imports itself and the rooms before it. What is not named here is the public face, on top."""
STRANGERS = [
    {"targets", "schedule"},
    {"efficiency", "schedule"},
    {"schedule", "stages"},
    {"optim", "runtime"},
    {"tasks", "observe"},
    {"tasks", "forward"},
    {"forward", "tuner"},
]
"""Rooms of which neither imports the other."""


def imports(file: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_imports_only_go_down():
    wrong = []
    for file in FILES:
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        inside = {name.split(".")[1] for name in imports(file) if name.startswith("jaxpp.")}
        if room in ROOMS:
            wrong += [f"{file} imports {name}, above it" for name in inside - set(ROOMS[: ROOMS.index(room) + 1])]
            wrong += [f"{file} imports across {pair}" for pair in STRANGERS if room in pair and pair <= {room, *inside}]
        if (
            "pipeline" in inside and file.name != "__init__.py" and file.name not in ("tuning.py", "planning.py")
        ):  # which make what they found
            wrong.append(f"{file} imports the public face")
    assert not wrong, "\n".join(wrong)


def test_the_schedule_room_does_not_import_jax():
    imported = [(file, name.split(".")[0]) for file in (ROOT / "schedule").rglob("*.py") for name in imports(file)]
    assert not [(file, name) for file, name in imported if name in ("jax", "flax", "optax", "numpy")]


def test_only_public_jax_is_imported():
    public = [file for file in FILES if file != ROOT / "runtime" / "not_public.py"]
    assert not [(file, name) for file in public for name in imports(file) if "_src" in name or name.split(".")[0] == "jaxlib"]
    assert not [file for file in public if re.search(r"import_module\(\W*jaxlib|\bjax\._src", file.read_text())]


def test_modules_whose_shapes_are_checked_are_there():
    assert set(SHAPED) <= set(sys.modules), "conftest.py names a module that was moved"


def test_every_public_name_can_be_imported():
    wrong = [
        f"{name}.{public}"
        for name in (name for _, name, _ in pkgutil.walk_packages([str(ROOT)], "jaxpp."))
        for module in [importlib.import_module(name)]
        for public in getattr(module, "__all__", ())
        if not hasattr(module, public)
    ]
    assert not wrong


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


def private_names_of_pipelines() -> set[str]:
    """What only a ``Pipeline`` itself may use: its methods, and the attributes that its methods assign."""
    found = {name for name in dir(jaxpp.Pipeline) if name.startswith("_") and not name.startswith("__")}
    for kind in jaxpp.Pipeline.__mro__[:-1]:
        for node in ast.walk(ast.parse(inspect.getsource(kind))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.startswith("_"):
                found.add(node.attr)
    return found


def test_nobody_touches_what_is_private_in_a_pipeline():
    private = private_names_of_pipelines()
    assert private
    wrong = []
    for file in (file for folder in ("tests", "experiments") for file in (PROJECT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in private:
                owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                mine = isinstance(node.value, ast.Name) and owner not in ("self", "cls")
                if mine or "pipe" in owner:
                    wrong.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_what_the_linter_of_texts_checks_is_kept():
    done = subprocess.run([sys.executable, ".ci/lint"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


IMPORTS = """
import sys
import jaxpp
assert dir(jaxpp) == sorted([*jaxpp.__all__, "__version__"])
jaxpp.schedule.simulate(jaxpp.schedule.make("zb-h1", num_ranks=4, num_microbatches=8))
assert not {"jax", "numpy", "scipy"} & set(sys.modules)
assert {getattr(jaxpp, name).__name__.split(".")[-1] for name in jaxpp.__all__} == set(jaxpp.__all__)
assert not {"flax", "scipy.sparse", "matplotlib", "orbax"} & set(sys.modules)
assert dir(jaxpp) == sorted([*jaxpp.__all__, "__version__"]), "as before they were used"
assert not hasattr(jaxpp, "grad"), "nothing that is called like one of JAX's functions is a module"
try:
    jaxpp.grad
except AttributeError as error:
    assert str(error) == "module 'jaxpp' has no attribute 'grad'; there is value_and_grad"
"""


def test_a_name_is_imported_when_it_is_used_and_what_few_need_when_they_need_it():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, cwd=PROJECT)


def test_the_tests_in_the_list_of_tiers_exist():
    lines = (ROOT.parent / "tests" / "tiers.txt").read_text().splitlines()
    assert {line.partition(" ")[0] for line in lines} == {"long", "slow"}
    tests = [line.partition(" ")[2].partition("[")[0].split("::") for line in lines]
    assert not [path for path, _ in tests if not (ROOT.parent / path).exists()]
    assert not [(path, name) for path, name in tests if f"def {name}(" not in (ROOT.parent / path).read_text()]
