"""``dibs token``: makes what servers and their callers need to know each other. Nothing here talks to a server."""

from __future__ import annotations

import base64
import json
import secrets
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dibs.checks import check_command, check_label, check_tenant
from dibs.cli.context import DURATION, Group, Session, pass_session
from dibs.cli.errors import Exit
from dibs.cli.output import Cell, Column, echo_json, echo_table, note, plural
from dibs.errors import InvalidInput, MissingDriver
from dibs.server.auth import Scope
from dibs.server.verifiers.tokens import StaticToken, add_token, hash_of, load_tokens, new_token, remove_token
from dibs.shapes import time_text

if TYPE_CHECKING:
    from joserfc.jwk import Key

F = TypeVar("F", bound=Callable[..., Any])

SECRET_RANDOM_BYTES = 48
EXPIRES_MAX_S = 10 * 366 * 86_400.0
SCOPES = [scope.value for scope in Scope]
FILE = click.Path(dir_okay=False, path_type=Path)
ALGORITHMS = {"RS256": ("RSA", 3072), "ES256": ("EC", "P-256"), "EdDSA": ("OKP", "Ed25519")}


@click.group(
    cls=Group,
    examples="""
    dibs token new --file tokens.toml --tenant acme --subject web --scope enqueue
    dibs token list --file tokens.toml
    dibs token secret > secret
    """,
)
def token() -> None:
    """Make, list and revoke the tokens of a server.

    Two kinds: those of a file that the server reads (new, list, revoke), and JWTs, which are signed with a secret or a
    private key (secret, key, jwks, jwt) or come from an identity provider.
    """


def _grant_options(command: F) -> F:
    """What a token allows; the tenant is the shared option."""
    for option in (
        click.option(
            "--command", "-c", "commands", multiple=True, metavar="COMMAND",
            help="Only this command; may be repeated. Default: all.",
        ),
        click.option(
            "--scope", "-s", "scopes", multiple=True, required=True, type=click.Choice(SCOPES),
            help="What it is for; may be repeated.",
        ),
        click.option("--subject", required=True, metavar="NAME", help="Who bears it: a program or a person."),
    ):  # fmt: skip
        command = option(command)
    return command


_HELPS = {"--url": None, "--tenant": "The tenant whose tasks its bearer may use."}
_file_option = click.option("--file", "-f", type=FILE, required=True, help="The server's file of tokens.")


# -------------------------------------------------------------------------------------------- tokens of a file


@token.command(
    "new",
    examples="""
    dibs token new -f tokens.toml --tenant acme --subject web --scope enqueue
    dibs token new -f tokens.toml --subject w -s claim -c mail --expires 90d
    dibs token new -f tokens.toml --subject ann --scope admin > token
    """,
    helps=_HELPS,
)
@_file_option
@_grant_options
@click.option("--name", metavar="NAME", help="What to revoke it by. Default: the subject.")
@click.option("--expires", "expires_s", type=DURATION, help="How long it holds. Default: until it is revoked.")
@pass_session
def new(
    session: Session,
    /,
    file: Path,
    subject: str,
    scopes: tuple[str, ...],
    commands: tuple[str, ...],
    name: str | None,
    expires_s: float | None,
) -> int:
    """Make a token, and add its hash to a server's file.

    The token is printed, once, and kept nowhere. The file is made if there is none; a server that runs sees the change
    within a second or so.
    """
    _check_grant(session.tenant, subject, commands)
    name = name or subject
    check_label("token", name)
    made = new_token()
    entry = StaticToken(
        name=name,
        sha256=hash_of(made),
        tenant=session.tenant,
        scopes=sorted(map(Scope, set(scopes)), key=[*Scope].index),
        commands=list(dict.fromkeys(commands)) or None,
        subject=subject if subject != name else None,
        expires=None if expires_s is None else _in(expires_s),
    )
    add_token(file, entry)
    if session.json:
        echo_json({"token": made, **_shape(entry)})
    else:
        note(f"The token {name!r} of the tenant {session.tenant!r}; {file} has its hash. It is shown this once:")
        click.echo(made)
    return Exit.OK


@token.command(
    "list",
    examples="""
    dibs token list --file tokens.toml
    dibs token list --file tokens.toml --json
    """,
)
@_file_option
@pass_session
def list_(session: Session, /, file: Path) -> int:
    """Show the tokens of a server's file, of all tenants.

    Tokens themselves cannot be shown: nobody has them but their bearers.
    """
    entries = load_tokens(file)
    if session.json:
        echo_json({"tokens": [_shape(entry) for entry in entries]})
        return Exit.OK
    columns = [Column("NAME", least=8), Column("TENANT", least=8), Column("SUBJECT", least=8), Column("SCOPES"),
               Column("COMMANDS", least=8), Column("EXPIRES")]  # fmt: skip
    echo_table(columns, [_row(entry) for entry in entries], empty=f"{file} has no tokens.")
    return Exit.OK


@token.command(
    "revoke",
    examples="""
    dibs token revoke importer --file tokens.toml
    dibs token revoke ann bob --file tokens.toml
    """,
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_file_option
@pass_session
def revoke(session: Session, /, names: tuple[str, ...], file: Path) -> int:
    """Take tokens out of a server's file.

    A server that runs refuses them within about a minute: so long it remembers whom it has recognised.
    """
    names = tuple(dict.fromkeys(names))
    known = {entry.name for entry in load_tokens(file)}
    if missing := [name for name in names if name not in known]:
        raise InvalidInput(f"{file} has no token {missing[0]!r}: `dibs token list` shows what there is")
    for name in names:
        remove_token(file, name)
    if session.json:
        echo_json({"revoked": names})
    else:
        click.echo(f"{plural(len(names), 'token')} revoked.")
    return Exit.OK


def _shape(entry: StaticToken) -> dict[str, Any]:
    return {
        "name": entry.name,
        "tenant": entry.tenant,
        "subject": entry.subject or entry.name,
        "scopes": entry.scopes,
        "commands": entry.commands,
        "expires_at": None if entry.expires is None else _time_text(entry.expires),
    }


def _row(entry: StaticToken) -> list[Cell]:
    expires: Cell = "never" if entry.expires is None else _time_text(entry.expires)
    if entry.expires is not None and entry.expires <= datetime.now(UTC):
        expires = ("expired", "red")
    commands = "all" if entry.commands is None else ", ".join(entry.commands)
    return [entry.name, entry.tenant, entry.subject or entry.name, ", ".join(entry.scopes), commands, expires]


# ------------------------------------------------------------------------------------------------------- JWTs


@token.command(
    "secret",
    examples="""
    (umask 077 && dibs token secret > secret)
    dibs token secret | vault kv put secret/dibs value=-
    """,
)
@pass_session
def secret(session: Session, /) -> int:
    """Print a new secret for JWTs by HS256.

    The file with it goes to the server and to whoever signs tokens; both can sign, so that there should be few.
    """
    made = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_RANDOM_BYTES)).decode()
    if session.json:
        echo_json({"secret": made})
    else:
        click.echo(made)
    return Exit.OK


@token.command(
    "key",
    examples="""
    (umask 077 && dibs token key > private.json)
    (umask 077 && dibs token key --algorithm RS256 > private.json)
    """,
)
@click.option(
    "--algorithm", type=click.Choice([*ALGORITHMS]), default="EdDSA", show_default=True, help="What it will sign by."
)
def key(algorithm: str) -> int:
    """Print a new private key for JWTs, as a JWK.

    It stays with whoever signs tokens. The server gets the public half, which `dibs token jwks` prints.
    """
    jwk = _joserfc()
    kind, size = ALGORITHMS[algorithm]
    made = jwk.generate_key(kind, size, parameters={"alg": algorithm, "use": "sig"}, auto_kid=True)
    click.echo(json.dumps(made.as_dict(private=True)))
    return Exit.OK


@token.command(
    "jwks",
    examples="""
    dibs token jwks private.json > jwks.json
    dibs token jwks old.pem new.json > jwks.json
    """,
)
@click.argument("files", metavar="KEY_FILE...", nargs=-1, required=True, type=FILE)
def jwks(files: tuple[Path, ...]) -> int:
    """Print the public halves of keys, as a JWKS for the server.

    Keys are JWK or PEM files, private or public; several during a change from one to the next.
    """
    keys = [_read_key(file) for file in files]
    echo_json({"keys": [one.as_dict(private=False, use="sig", alg=_algorithm(one)) for one in keys]})
    return Exit.OK


@token.command(
    "jwt",
    examples="""
    dibs token jwt --secret-file secret -i me -a dibs --subject web -s enqueue
    dibs token jwt --key-file key.pem -i me -a dibs --subject w -s claim -c mail
    """,
    helps=_HELPS,
)
@click.option("--secret-file", type=FILE, help="Sign by HS256 with the secret in this file.")
@click.option("--key-file", type=FILE, help="Sign by RS256, ES256 or EdDSA with the private key in this file.")
@click.option("--issuer", "-i", required=True, metavar="TEXT", help="Its iss: what the server trusts.")
@click.option("--audience", "-a", required=True, metavar="TEXT", help="Its aud: which server it is for.")
@_grant_options
@click.option("--expires", "expires_s", type=DURATION, default="1h", show_default=True, help="How long it holds.")
@pass_session
def jwt(
    session: Session,
    /,
    secret_file: Path | None,
    key_file: Path | None,
    issuer: str,
    audience: str,
    subject: str,
    scopes: tuple[str, ...],
    commands: tuple[str, ...],
    expires_s: float,
) -> int:
    """Sign a JWT and print it.

    The tenant is that of --tenant. A JWT cannot be revoked by itself: let it expire soon.
    """
    if (secret_file is None) == (key_file is None):
        raise click.UsageError("Give --secret-file or --key-file, one of the two.")
    _check_grant(session.tenant, subject, commands)
    now = int(time.time())
    expires = _in(expires_s)
    claims: dict[str, Any] = {"iss": issuer, "aud": audience, "sub": subject, "tid": session.tenant}
    claims |= {"scope": " ".join(dict.fromkeys(scopes)), "iat": now, "exp": int(expires.timestamp())}
    if commands:
        claims["commands"] = list(dict.fromkeys(commands))
    made = _signed(claims, _read_secret(secret_file) if secret_file else _private(key_file))
    if session.json:
        echo_json({"token": made, "expires_at": _time_text(expires), "claims": claims})
    else:
        click.echo(made)
    return Exit.OK


def _signed(claims: dict[str, Any], key: Key) -> str:
    from joserfc.jws import JWSRegistry, serialize_compact

    algorithm = _algorithm(key)
    header = {"alg": algorithm, "typ": "JWT"} | ({"kid": key.kid} if algorithm != "HS256" else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the name EdDSA, which is what issuers and verifiers use
        return serialize_compact(header, json.dumps(claims), key, registry=JWSRegistry(algorithms=[algorithm]))


def _read_secret(file: Path) -> Key:
    _joserfc()
    from joserfc.jwk import OctKey

    from dibs.server.verifiers.jwks import SecretSource
    from dibs.server.verifiers.keys import read_secret

    text = read_secret(file)
    SecretSource(text)  # as the server will: refused here if it is refused there
    return OctKey.import_key(text)


def _private(file: Path | None) -> Key:
    assert file is not None
    found = _read_key(file)
    if not found.is_private:
        raise InvalidInput(f"{file} has a public key: tokens are signed with the private one")
    return found


def _read_key(file: Path) -> Key:
    """Returns the key in a JWK or PEM file, with an id."""
    _joserfc()
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey, OKPKey, RSAKey

    from dibs.server.verifiers.jwks import algorithm_of, read_public_key

    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from error
    text = data.lstrip()
    for kind in (RSAKey, ECKey, OKPKey):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about short keys, which the next lines refuse
                found = kind.import_key(json.loads(text) if text.startswith(b"{") else text)
            found.ensure_kid()
            read_public_key(found.as_dict(private=False))
        except (JoseError, ValueError, TypeError, KeyError):
            continue
        if algorithm_of(found) is not None:
            return found
    raise InvalidInput(
        f"{file} has no key that can be used: a JWK or a PEM without a password, RSA of 2048 bits or more, EC P-256 or "
        "Ed25519"
    )


def _algorithm(key: Key) -> str:
    from dibs.server.verifiers.jwks import algorithm_of

    return algorithm_of(key) or "HS256"


def _joserfc() -> Any:
    try:
        from joserfc import jwk
    except ImportError as error:
        raise MissingDriver("JWTs need joserfc: pip install 'dibs[server]'") from error
    return jwk


# ---------------------------------------------------------------------------------------------------- both


def _check_grant(tenant: str, subject: str, commands: tuple[str, ...]) -> None:
    check_tenant(tenant)
    check_label("subject", subject)
    for command in commands:
        check_command(command)


def _in(expires_s: float) -> datetime:
    if not 1 <= expires_s <= EXPIRES_MAX_S:
        raise click.UsageError("--expires is from 1s to ten years.")
    return (datetime.now(UTC) + timedelta(seconds=expires_s)).replace(microsecond=0)


def _time_text(at: datetime) -> str:
    return str(time_text(round(at.timestamp() * 1000)))
