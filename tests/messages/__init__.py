"""Whole messages of errors in text files: what is typed stands in the tests, and what is said to it in the file of its table.

``JAXPP_WRITE_MESSAGES=1 python -m pytest tests/forward/test_apply.py`` writes the messages of a table anew; look at the difference.
"""

import os
import pathlib
import re

import pytest

from jaxpp.errors import JaxppError

FOLDER = pathlib.Path(__file__).parent
CASE = re.compile(r"^== ([^\n]*) \((\w+)\)\n(.*?)\n\n(?=== |\Z)", re.MULTILINE | re.DOTALL)


def check(table, cases, name, call):
    """Call what is refused, and compare all that is said with the file, which has these cases and no other; the error."""
    with pytest.raises(JaxppError) as error:
        call()
    file = FOLDER / f"{table}.txt"
    said = re.sub(rf"{FOLDER.parents[1]}/(\S+?):\d+", r"\1", str(error.value))  # files without the numbers of lines
    said = re.sub(r"0x[0-9a-f]{2,}", "0x...", said)
    found = type(error.value).__name__, said
    known = {case: (kind, message) for case, kind, message in CASE.findall(file.read_text() if file.exists() else "")}
    if os.environ.get("JAXPP_WRITE_MESSAGES"):
        known[name] = found
        known = {case: known[case] for case in map(str, cases) if case in known}
        file.write_text("".join(f"== {case} ({kind})\n{message}\n\n" for case, (kind, message) in known.items()))
    else:
        assert known.keys() == set(map(str, cases))
    assert found == known[name], f"\n{said}\n{file.name} has\n{known[name][1]}"
    return error.value
