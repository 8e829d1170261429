"""A PostgreSQL server for all tests that want one."""

import uuid
from collections.abc import Iterator

import pytest

from tests.launchpad_lite.search.databases import postgres


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def url(server: str) -> str:
    """A database that is empty."""
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.replace("/postgres?", f"/{name}?")
