"""A Spark session that is ready to use: Java found, quiet, this Python on the executors, `format("dibs")` known."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from dibs.errors import MissingDriver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
INCUBATOR = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_HOW = (
    f"Spark needs Java {JAVA_MIN} or newer: install one (on Debian: apt-get install default-jre-headless), "
    "or name it by JAVA_HOME"
)


def session(
    app_name: str = "dibs", *, master: str | None = None, config: dict[str, str] | None = None, java: str = ""
) -> SparkSession:
    """Returns a session, the one that runs if there is one, with ``format("dibs")`` registered.

    Without `master` it is what Spark is configured for, else ``local[*]``. `config` is Spark's, and wins over what is
    set here: little but errors on the terminal, no web page, times in UTC. `java` is given to Spark's Java process.
    """
    from pyspark.sql import SparkSession

    from dibs.spark.source import register

    running = SparkSession.getActiveSession()
    if running is not None:
        register(running)
        return running
    check_java()
    # Executors run the Python that runs here, with what is installed in it.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    given = {"spark.app.name": app_name, **({} if master is None else {"spark.master": master}), **(config or {})}
    builder = SparkSession.builder
    whole = {**_quiet(java), **given}
    for name, value in whole.items():
        builder = builder.config(name, value)
    _start_java(whole)
    interrupted = signal.getsignal(signal.SIGINT)
    spark = builder.getOrCreate()
    # Spark has Ctrl-C cancel its jobs and raise; whoever handles it otherwise goes on doing so.
    if callable(interrupted) and interrupted is not signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def check_java() -> None:
    """Raises, with advice, if Spark would not find a Java that it can use."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise MissingDriver(f"{_HOW}. {f'There is no {java}.' if java else 'There is none on the PATH.'}")
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError as error:
        raise MissingDriver(f"{_HOW}. {java} cannot be run: {error.strerror}.") from error
    version = _VERSION.search(said)
    if version is not None and int(version[1]) < JAVA_MIN:
        raise MissingDriver(f"{_HOW}. {java} is version {version[1]}.")


def _start_java(config: dict[str, str]) -> None:
    """Starts Spark's Java process, if there is none, so that what it says on stderr comes through here: Java warns of a
    part of itself that Spark uses, and cannot be told not to."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if {"SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"} & os.environ.keys() or "spark.remote" in config:
        return
    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(config.items()))
    readable, writable = os.pipe()
    threading.Thread(target=_pass_on, args=(readable,), name="spark-stderr", daemon=True).start()
    try:
        gateway = launch_gateway(conf, {"stderr": writable})  # type: ignore[no-untyped-call]
    finally:
        os.close(writable)
    SparkContext._ensure_initialized(gateway=gateway)


def _pass_on(readable: int) -> None:
    with open(readable, "rb") as lines:
        for line in lines:
            if line != INCUBATOR:
                os.write(2, line)


def _quiet(java: str) -> dict[str, str]:
    log = files("dibs.spark").joinpath("log4j2.properties")
    return {
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log} -XX:+IgnoreUnrecognizedVMOptions {java}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
    }
