"""What docs/security.md says is shown by a test is shown by one that exists."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_the_tests_that_it_names_exist() -> None:
    page = (_ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w+\.py)::(\w+)`", page)
    assert len(named) > 20
    for path, name in named:
        source = (_ROOT / "tests" / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"
