"""How clients find a server, and as whom they come: a kubeconfig."""

import json
from pathlib import Path
from typing import Any


def write_config(
    folder: Path,
    server: str,
    *,
    cluster: dict[str, Any] | None = None,
    user: dict[str, Any] | None = None,
    **context: str,
) -> Path:
    """Writes the configuration of a user whose current context has these settings."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": server, **(cluster or {})}}],
        "users": [{"name": "me", "user": {"token": "a-token", **(user or {})}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "here", "user": "me", **context}},
            {"name": "two", "context": {"cluster": "here", "user": "me", "namespace": "other"}},
        ],
        "current-context": "one",
    }
    path = folder / "config"
    path.write_text(json.dumps(config))
    return path
