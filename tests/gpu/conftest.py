from __future__ import annotations

import pytest

from worklog import environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if environment.hardware("cuda").gpus:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
