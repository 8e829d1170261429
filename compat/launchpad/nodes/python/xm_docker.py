"""`DockerConfig`, so that modules that describe one can be imported."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DockerConfig:
    """What Vertex AI and Docker were told; `--launcher=kubernetes` takes an image instead."""

    code_directory: str | None = None
    docker_requirements: str | None = None
    hw_requirements: Any = None
    python_path: str | None = None
