import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dibs.errors import SettingsError
from dibs.settings import FIELDS, Settings, load, mask, read_duration_s, read_size_bytes, resolve

SECRET = "s3cr3t"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with an empty pyproject.toml, so that nothing above it is found."""
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    """Writes a pyproject.toml into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def origin_of(name: str, **places: Any) -> tuple[Any, str]:
    """Returns a setting's value and origin."""
    return next((row.value, row.origin) for row in resolve(**places) if row.name == name)


class TestPrecedence:
    """Which place decides."""

    def test_defaults(self, project: Path) -> None:
        """With nothing said anywhere, every setting has its documented default."""
        assert load({}, {}, project) == Settings(
            url="./dibs-data",
            tenant="default",
            max_bytes=64 * 1024**3,
            durability="sync",
            payload_max_bytes=1024**2,
            result_max_bytes=1024**2,
            journal_retention_s=604_800,
            journal_max_bytes=1024**3,
            disk_reserve_bytes=256 * 1024**2,
        )
        assert {row.origin for row in resolve({}, {}, project)} == {"default"}

    def test_flag_environment_file_default(self, project: Path) -> None:
        """A flag beats the environment, which beats pyproject.toml, which beats the default."""
        flags, env = {"tenant": "from-flag"}, {"DIBS_TENANT": "from-env"}
        path = write(project, '[tool.dibs]\ntenant = "from-file"')
        assert origin_of("tenant", flags=flags, env=env, cwd=project) == ("from-flag", "flag")
        assert origin_of("tenant", env=env, cwd=project) == ("from-env", "environment DIBS_TENANT")
        in_file = f"pyproject.toml [tool.dibs] ({path})"
        assert origin_of("tenant", env={}, cwd=project) == ("from-file", in_file)
        path.write_text("")
        assert origin_of("tenant", env={}, cwd=project) == ("default", "default")

    def test_each_setting_by_itself(self, project: Path) -> None:
        """Places are mixed: each setting comes from the first place that names it."""
        write(project, '[tool.dibs]\nurl = "redis://file"\ntenant = "file"\ndurability = "relaxed"')
        rows = resolve({"url": "redis://flag"}, {"DIBS_TENANT": "env", "DIBS_URL": "redis://env"}, project)
        found = {row.name: row.value for row in rows}
        assert (found["url"], found["tenant"], found["durability"]) == ("redis://flag", "env", "relaxed")
        assert load({"url": "redis://flag"}, {"DIBS_TENANT": "env"}, project).durability == "relaxed"

    def test_flag_not_given(self, project: Path) -> None:
        """A flag of None was not given; the next place counts."""
        assert origin_of("tenant", flags={"tenant": None}, env={}, cwd=project) == ("default", "default")

    def test_nearest_pyproject(self, project: Path) -> None:
        """The nearest pyproject.toml upwards is the only one read, with or without a table for dibs."""
        write(project, '[tool.dibs]\ntenant = "outer"')
        below = project / "a" / "b"
        below.mkdir(parents=True)
        assert load({}, {}, below).tenant == "outer"
        write(project / "a", '[tool.dibs]\ntenant = "inner"')
        assert load({}, {}, below).tenant == "inner"
        write(below, "[tool.other]\nx = 1")
        assert load({}, {}, below).tenant == "default"

    def test_process_is_the_default_place(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without arguments the process's own environment and working directory are read."""
        for variable in [variable for variable in os.environ if variable.startswith("DIBS_")]:
            monkeypatch.delenv(variable)
        write(project, '[tool.dibs]\ntenant = "here"')
        monkeypatch.chdir(project)
        monkeypatch.setenv("DIBS_MAX_BYTES", "1GiB")
        assert (load().tenant, load().max_bytes) == ("here", 2**30)

    def test_overruled_value_is_not_read(self, project: Path) -> None:
        """A flag helps against a variable that cannot be read."""
        assert load({"max_bytes": "1MiB"}, {"DIBS_MAX_BYTES": "lots"}, project).max_bytes == 2**20


class TestUnknown:
    """Names that are no settings."""

    @pytest.mark.parametrize(
        ("flags", "env", "table", "message"),
        [
            ({"tennant": "x"}, {}, "", "'tennant' from flag is not a setting: did you mean tenant?"),
            ({}, {"DIBS_MAXBYTES": "1"}, "", "'DIBS_MAXBYTES' from environment .*did you mean DIBS_MAX_BYTES?"),
            ({}, {"DIBS_url": "x"}, "", "'DIBS_url' from environment .*did you mean DIBS_URL?"),
            ({}, {}, "max-bytes = 1", r"'max-bytes' from pyproject.toml \[tool.dibs\] .*did you mean max_bytes?"),
            ({}, {}, "zebra = 1", "'zebra' .*known: url, tenant, max_bytes"),
            ({}, {}, "server = {port = 1}", "'server' from pyproject.toml"),
        ],
    )
    def test_refused(
        self, project: Path, flags: dict[str, object], env: dict[str, str], table: str, message: str
    ) -> None:
        """A name that is no setting is refused in every place, with the likely one or all of them."""
        write(project, f"[tool.dibs]\n{table}")
        with pytest.raises(SettingsError, match=message):
            load(flags, env, project)

    def test_refused_although_overruled(self, project: Path) -> None:
        """A misspelt name is refused even where every setting is given by a flag."""
        flags: dict[str, object] = {field.name: field.default for field in FIELDS}
        with pytest.raises(SettingsError, match="DIBS_TENNANT"):
            load(flags, {"DIBS_TENNANT": "x"}, project)

    def test_other_variables_are_ignored(self, project: Path) -> None:
        """Variables without the prefix are none of dibs's business."""
        assert load({}, {"DIBSON": "x", "URL": "y", "MY_DIBS_URL": "z"}, project) == Settings()


class TestValues:
    """How values are written."""

    @pytest.mark.parametrize(
        ("written", "size"),
        [
            ("16GiB", 16 * 2**30),
            ("16 gib", 16 * 2**30),
            (" 500MB ", 500_000_000),
            ("1.5KiB", 1536),
            ("1TB", 10**12),
            ("2TiB", 2**41),
            ("7", 7),
            ("7B", 7),
            (7, 7),
            ("9223372036854775807", 2**63 - 1),
        ],
    )
    def test_sizes(self, project: Path, written: object, size: int) -> None:
        """A size is a number of bytes, or a number with a binary or decimal unit."""
        assert load({"max_bytes": written}, {}, project).max_bytes == size

    @pytest.mark.parametrize(
        ("written", "seconds"),
        [("7d", 604_800), ("90min", 5400), ("90m", 5400), ("1.5h", 5400), ("30s", 30), ("30", 30), (30, 30)],
    )
    def test_durations(self, project: Path, written: object, seconds: int) -> None:
        """A duration is a number of seconds, or a number with a unit."""
        assert load({"journal_retention_s": written}, {}, project).journal_retention_s == seconds

    @pytest.mark.parametrize(
        ("name", "written"),
        [
            *(("max_bytes", bad) for bad in ["", "lots", "16G", "-1", "0", 0, -5, "1e9", "nan", "0x10", "0.3B", "1.5"]),
            *(("max_bytes", bad) for bad in [True, 1.5, [], 2**63, 10**400, "9" * 5000, "9" * 19 + "TiB", "١٦"]),
            *(("journal_retention_s", bad) for bad in ["7 months", "a week", "0", "-7d", "1GiB", "1500ms"]),
            *(("durability", bad) for bad in ["", "SYNC", "none", 1, ["sync"]]),
            *(("tenant", bad) for bad in ["", "A", "a/b", "-a", "x" * 65, "a\n", 7, ["a"]]),
            *(("url", bad) for bad in ["", "  ", 7, []]),
        ],
    )
    def test_unreadable(self, project: Path, name: str, written: object) -> None:
        """A value that cannot be read is refused, naming the setting and the place."""
        with pytest.raises(SettingsError, match=f"^{name} from flag cannot be "):
            load({name: written}, {}, project)

    @pytest.mark.parametrize(("written", "seconds"), [("250ms", 0.25), ("1.5s", 1.5), ("0", 0.0), ("2 h", 7200.0)])
    def test_durations_with_fractions(self, written: str, seconds: float) -> None:
        """What is not a setting may be a part of a second, or nothing at all."""
        assert read_duration_s(written) == seconds

    @pytest.mark.parametrize("written", ["", "-1s", "1e3", "5 parsecs", "nan"])
    def test_unreadable_durations(self, written: str) -> None:
        """The reader says what to give instead."""
        with pytest.raises(ValueError, match=r"^give seconds, or a duration such as"):
            read_duration_s(written)

    def test_size_reader(self) -> None:
        """Sizes outside the settings are read as those in them."""
        assert read_size_bytes("16MiB") == 16 * 2**20

    def test_origin_is_named(self, project: Path) -> None:
        """The message names the variable or the file to look into, and what to write instead."""
        with pytest.raises(
            SettingsError, match="max_bytes from environment DIBS_MAX_BYTES cannot be 'lots': give a size such"
        ):
            load({}, {"DIBS_MAX_BYTES": "lots"}, project)
        path = write(project, "[tool.dibs]\ndurability = false")
        where = re.escape(
            f"durability from pyproject.toml [tool.dibs] ({path}) cannot be False: choose one of sync, relaxed"
        )
        with pytest.raises(SettingsError, match=where):
            load({}, {}, project)

    def test_reserve_may_be_zero(self, project: Path) -> None:
        """Keeping no disk space free is a choice; storing nothing at all is a mistake."""
        assert load({"disk_reserve_bytes": 0}, {}, project).disk_reserve_bytes == 0

    @given(st.integers(1, 2**63 - 1))
    def test_every_size_reads_back(self, size: int) -> None:
        """Every size in range survives being written as text, to the byte."""
        field = next(field for field in FIELDS if field.name == "max_bytes")
        assert field.read(str(size), origin="test") == size

    @pytest.mark.parametrize("options", [{"max_bytes": "16GiB"}, {"max_bytes": 0}, {"max_bytes": 1.0}, {"tenant": "A"}])
    def test_made_by_hand(self, options: dict[str, Any]) -> None:
        """Settings made without the loader are checked too, and take no text for a number."""
        with pytest.raises(SettingsError, match="from Settings"):
            Settings(**options)

    def test_frozen(self) -> None:
        """Settings do not change once they are read."""
        with pytest.raises(AttributeError):
            Settings().tenant = "other"  # type: ignore[misc]


class TestFile:
    """A pyproject.toml that is not as it should be."""

    @pytest.mark.parametrize("text", ["[tool.dibs", "x = " + "[" * 100_000])
    def test_not_toml(self, project: Path, text: str) -> None:
        """A pyproject.toml that cannot be parsed is named, not passed over."""
        path = write(project, text)
        with pytest.raises(SettingsError, match=re.escape(f"{path} cannot be read")):
            load({}, {}, project)

    def test_not_text(self, project: Path) -> None:
        """A pyproject.toml that is not UTF-8 is named."""
        (project / "pyproject.toml").write_bytes(b'x = "\xff"')
        with pytest.raises(SettingsError, match="cannot be read"):
            load({}, {}, project)

    def test_not_a_table(self, project: Path) -> None:
        """`dibs` under `tool` must be a table."""
        write(project, "[tool]\ndibs = 1")
        with pytest.raises(SettingsError, match="must be a table"):
            load({}, {}, project)

    def test_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no pyproject.toml is found up to the root, the defaults hold."""
        monkeypatch.setattr(Path, "is_file", lambda _: False)
        assert load({}, {}, tmp_path) == Settings()


class TestSecrets:
    """Passwords do not reach a screen or a log."""

    @pytest.mark.parametrize(
        ("url", "masked"),
        [
            ("redis://:s3cr3t@host:6379/0", "redis://:***@host:6379/0"),
            ("postgresql://ann:s3cr3t@host/db", "postgresql://ann:***@host/db"),
            ("postgresql://ann:s3cr3t@h1:5432,h2:5432/db", "postgresql://ann:***@h1:5432,h2:5432/db"),
            ("redis://:s3/cr@s3cr3t?#s3cr3t@host/0", "redis://:***@host/0"),
            ("postgresql://host/db?user=ann&password=s3cr3t&x=1", "postgresql://host/db?user=ann&password=***&x=1"),
            ("https://host/?access_token=s3cr3t", "https://host/?access_token=***"),
            ("https://host/?API_KEY=s3cr3t", "https://host/?API_KEY=***"),
            ("host=h password=s3cr3t", "host=h password=***"),
        ],
    )
    def test_masked(self, url: str, masked: str) -> None:
        """Passwords are masked wherever a URL holds them, and the rest stays readable."""
        assert mask(url) == masked

    @pytest.mark.parametrize(
        "url",
        [
            "./dibs-data",
            "memory:",
            "lmdb:/var/lib/dibs",
            "redis://host:6379/0",
            "postgresql://ann@host/db?sslmode=require",
        ],
    )
    def test_nothing_to_mask(self, url: str) -> None:
        """A URL without a secret is shown as it is."""
        assert mask(url) == url

    @given(st.text(min_size=1).map(lambda text: f"{SECRET}{text}{SECRET}"))
    def test_any_password(self, password: str) -> None:
        """No character in a password, escaped or not, makes a part of it visible."""
        assert SECRET not in mask(f"redis://ann:{password}@host:6379/0")

    def test_everything_that_prints(self, project: Path) -> None:
        """Rows, settings and error messages mask passwords; the value itself does not."""
        env = {"DIBS_URL": f"redis://:{SECRET}@host"}
        row = resolve({}, env, project)[0]
        assert str(row) == "url = redis://:***@host (environment DIBS_URL)"
        settings = load({}, env, project)
        for shown in (repr(row), str(settings), repr(settings), f"{settings}"):
            assert SECRET not in shown
            assert "redis://:***@host" in shown
        assert settings.url == f"redis://:{SECRET}@host"
        with pytest.raises(SettingsError) as caught:
            load({"tenant": env["DIBS_URL"]}, {}, project)
        assert SECRET not in str(caught.value)


class TestTable:
    """The declaration as a table."""

    def test_one_row_per_setting(self, project: Path) -> None:
        """The table has every field of Settings, in order, and `resolve` gives its rows in that order."""
        names = list(Settings.__struct_fields__)
        assert [field.name for field in FIELDS] == names
        assert [row.name for row in resolve({}, {}, project)] == names

    @pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
    def test_rows_are_complete(self, field: Any, project: Path) -> None:
        """Each row has a sentence, a shape and names for flag and variable; its default, written out, reads back."""
        assert re.fullmatch(r"[A-Z`].*\.", field.doc)
        assert field.shape
        assert field.flag == "--" + field.name.replace("_", "-")
        read = {row.name: row for row in resolve({}, {field.variable: str(field.default)}, project)}[field.name]
        assert (read.value, read.origin) == (field.default, f"environment {field.variable}")


def test_links_to_a_service_of_that_name_are_not_settings() -> None:
    """Kubernetes sets such variables in every container beside a service named dibs; a typing error is still told."""
    links = {
        "DIBS_SERVICE_HOST": "10.0.0.1",
        "DIBS_SERVICE_PORT": "80",
        "DIBS_SERVICE_PORT_HTTP": "80",
        "DIBS_PORT": "tcp://10.0.0.1:80",
        "DIBS_PORT_80_TCP": "tcp://10.0.0.1:80",
        "DIBS_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load(env=links, cwd=Path("/")) == Settings()
    with pytest.raises(SettingsError, match="DIBS_PROT"):
        load(env={"DIBS_PROT": "x"}, cwd=Path("/"))
