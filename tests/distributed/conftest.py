from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the processes too, which take it over

from pool import Pool


@pytest.fixture(scope="session")
def pools():
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        return made.setdefault(world, Pool(world))

    yield get
    for pool in made.values():
        pool.close()
