from __future__ import annotations

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pools():
    made: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        return made.setdefault(world, Pool(world))

    yield get
    for pool in made.values():
        pool.close()
