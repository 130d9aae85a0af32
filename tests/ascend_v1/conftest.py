"""Directories that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import write


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Scheme -> a directory of it: of DeepSeek-V3 with a prediction layer, or of Qwen3."""
    home = tmp_path_factory.mktemp("written")
    models = {
        "w8a8": "tiny-deepseek-v3-mtp",
        "w4a8": "tiny-deepseek-v3-mtp",
        "deepseek-w8a8": "tiny-deepseek-v3-mtp",
        "w8a8_static": "tiny-qwen3",
        "w8a16": "tiny-qwen3",
    }
    return {scheme: write(model, home / scheme, scheme) for scheme, model in models.items()}
