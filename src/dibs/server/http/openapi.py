"""The OpenAPI document, made of the table of routes: what is documented is what is routed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from dibs.server.auth import NEEDS, Scope
from dibs.server.http.docs_page import POLICY, page
from dibs.server.http.web import JSON, Answer, Request, Route, json_answer
from dibs.server.http.wire import BATCHES

Json = dict[str, Any]

_ORDER = ("Tasks", "Administration", "server", "codeQ")
_REF = "#/components/schemas/{name}"
_PARAMETERS: Mapping[str, Json] = {
    "id": {"description": "The task's id.", "schema": {"type": "string", "format": "uuid"}},
    "command": {
        "description": "The queue's command; where a queue is configured, `*` is the whole tenant.",
        "schema": {"type": "string", "pattern": r"^(\*|[A-Za-z0-9_][A-Za-z0-9._-]{0,127})$"},
    },
}

_WHY: Mapping[int, str] = {
    400: "The request cannot be read: malformed JSON, or nested too deeply.",
    401: "The token is missing, expired, or not one that this server accepts.",
    403: "The token does not allow this, or the lease is somebody else's.",
    404: "There is no such task for this caller, or no result yet.",
    408: "The body took too long to arrive.",
    409: "The task is not in the state that this needs.",
    413: "The body, or a payload or result in it, is too large.",
    415: "The body has another type than the route takes.",
    422: "A field is wrong; `field` names it.",
    429: "A limit of the tenant is reached: wait as long as Retry-After says.",
    500: "The server failed; its log, under the request id, says how.",
    503: "The store is away, or the server is stopping: repeat the call later.",
    507: "There is no room for new tasks.",
}


class Error(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Why a call was refused: for people, for programs, and the request that the log knows it by."""

    error: str
    code: str
    request_id: str
    field: str | None = None
    cause: str | None = None
    status: str | None = None
    task_id: str | None = None
    retry_after_seconds: float | None = None


def doc_routes(routes: Iterable[Route]) -> list[Route]:
    """The document, and the page that shows it. Both are open to everybody: they tell nothing of anybody's tasks."""
    routes = [*routes]

    # Made when somebody first asks.
    @cache
    def known() -> Json:
        return document(routes)

    @cache
    def shown() -> bytes:
        return page(known()).encode()

    headers = [(b"content-security-policy", POLICY.encode()), (b"referrer-policy", b"no-referrer")]

    async def give_document(_: Request) -> Answer:
        return json_answer(known())

    async def give_page(_: Request) -> Answer:
        return Answer(200, shown(), "text/html; charset=utf-8", headers)

    return [
        Route(method="GET", path="/", handle=give_page, summary="The same page as /docs", gives={200: None}),
        Route(
            method="GET", path="/openapi.json", handle=give_document, summary="The OpenAPI document", gives={200: Any}
        ),
        Route(method="GET", path="/docs", handle=give_page, summary="This document as a page", gives={200: None}),
    ]


def document(routes: Iterable[Route]) -> Json:
    """Returns the document about the routes that speak JSON."""
    spoken = [route for route in routes if route.content_type == JSON]
    kinds = [kind for route in spoken for kind in (route.takes, *route.gives.values()) if _is_named(kind)]
    paths: dict[str, Json] = {}
    for route in spoken:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dibs",
            "version": version("dibs"),
            "description": "A durable task queue: enqueue, claim under a lease, settle once.",
        },
        # What is there for others comes last.
        "tags": [{"name": tag} for tag in sorted({route.tag for route in spoken} - {""}, key=_rank)],
        "paths": paths,
        "components": {
            "schemas": _components(kinds),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _rank(tag: str) -> tuple[int, str]:
    return (_ORDER.index(tag) if tag in _ORDER else len(_ORDER) - 2, tag)


def _operation(route: Route) -> Json:
    operation: Json = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {**_answers(route), **_refusals(route)},
    }
    if route.tag:
        operation["tags"] = [route.tag]
    if route.handle.__doc__:
        operation["description"] = " ".join(route.handle.__doc__.split())
    if route.verb is not None:
        operation["security"] = [{"bearer": []}]
        operation["x-scopes"] = sorted(NEEDS[route.verb] | {Scope.OPERATOR})
    if route.takes is not None:
        content: Json = {"schema": _schema(route.takes)}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": not route.body_optional, "content": {JSON: content}}
    return operation


def _operation_id(route: Route) -> str:
    words = re.sub(r"[^A-Za-z0-9]+", " ", route.path.removeprefix("/v1")).split()
    return "_".join([route.method.lower(), *words])


def _path_parameters(route: Route) -> list[Json]:
    names = re.findall(r"\{(\w+)\}", route.path)
    return [{"name": name, "in": "path", "required": True, **_PARAMETERS[name]} for name in names]


def _query_parameters(route: Route) -> list[Json]:
    if route.query is None:
        return []
    _, schemas = msgspec.json.schema_components([route.query])
    of = schemas[route.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in of["required"], "schema": _inlined(schema, schemas)}
        for name, schema in of["properties"].items()
    ]


def _inlined(schema: Json, schemas: Mapping[str, Json]) -> Json:
    """A parameter that is left out has no value: there is no null, and no default worth telling but a real one."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    [chosen] = options
    if "$ref" in chosen:
        chosen = schemas[chosen["$ref"].rpartition("/")[2]]
    chosen = {name: value for name, value in chosen.items() if name != "title"}
    default = schema.get("default")
    return {**chosen, "default": default} if default is not None else chosen


def _answers(route: Route) -> Json:
    answers: Json = {} if route.gives else {"200": {"description": "OK"}}
    for status, kind in route.gives.items():
        answer: Json = {"description": HTTPStatus(status).phrase}
        if kind is not None:
            answer["content"] = {JSON: {"schema": _schema(kind)}}
        answers[str(status)] = answer
    return answers


def _refusals(route: Route) -> Json:
    statuses = {*route.fails, 500}
    if route.verb is not None:
        statuses |= {401, 403, 422, 429, 503}
    if route.takes is not None:
        statuses |= {400, 408, 413, 415, 422}
    if route.query is not None:
        statuses |= {400, 422}
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _WHY[status], "content": content} for status in sorted(statuses)}


def _is_named(kind: Any) -> bool:
    return kind is not None and kind is not Any


def _schema(kind: Any) -> Json:
    if kind is Any:
        return {}
    [schema], _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _components(kinds: list[Any]) -> Json:
    """The schemas of these kinds and of all that is in them."""
    items = [item for _, item in BATCHES.values()]
    _, schemas = msgspec.json.schema_components([Error, *items, *kinds], ref_template=_REF)
    for kind in kinds:
        for batch, (field, item) in BATCHES.items():
            if isinstance(kind, type) and issubclass(kind, batch):
                schemas[kind.__name__]["properties"][field]["items"] = {"$ref": _REF.format(name=item.__name__)}
    return schemas
