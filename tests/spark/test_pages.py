"""The programs of the Spark pages and the example run, in the one session of these tests."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs import spark_tables
from tests.docs.pages import ROOT, Block, spark_programs

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("block", spark_programs("spark"), ids=str)
def test_a_block_is_a_program_that_runs(
    block: Block, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied into a file and run, every Python block ends well. Spark's processes run elsewhere: paths are whole."""
    monkeypatch.chdir(tmp_path)
    code = re.sub(r'"(lmdb:)?(jobs[\w-]*)"', rf'"\1{tmp_path}/\2"', block.code)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")


def test_the_pipeline_example_runs(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What fails is grouped by its error; what was mended is done after the replay, the rest is not."""
    monkeypatch.setattr(sys, "argv", ["spark_pipeline.py", "60"])
    runpy.run_path(os.fspath(ROOT / "examples" / "spark_pipeline.py"), run_name="__main__")
    told = capfd.readouterr().out
    assert "|      KeyError|" in told
    assert "|COMPLETED|   54|" in told
    assert "|   FAILED|    6|" in told


def test_the_tables_are_those_of_the_code() -> None:
    """Every option and column has its row. If not: python -m tests.docs.spark_tables."""
    assert spark_tables.PAGE.read_text() == spark_tables.page()
    assert len(spark_tables.parts()) == 10
