"""The made-up run, once as rows and once as a frame."""

from __future__ import annotations

import pandas as pd
import pytest

from fedmjp.records.rows import load_rows
from tests.records.sample_rows import make_rows, write_run


@pytest.fixture(scope="session")
def frame(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return load_rows(write_run(tmp_path_factory.mktemp("run"), make_rows()) / "rows.jsonl")
