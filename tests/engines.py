"""What tests need that not every machine has."""

import importlib.util
import os

import pytest

needs_reverb = pytest.mark.skipif(
    importlib.util.find_spec("reverb") is None and os.environ.get("REVERB") != "required",
    reason="dm-reverb is not installed (make test-reverb); there is none for Python 3.12 and newer",
)
