"""This file describes every route, and writes the description as OpenAPI.

It does not know how a route is served. `OPERATIONS` is the one table of what is asked and answered;
schemas come from the structs that bodies are decoded by. Rule for editing: a new route gets a row
here and a section in `docs/api.md`; tests hold the three together.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from actors.gateway.access import Access, Level
from actors.gateway.errors import is_anthropic, is_ollama
from messages import anthropic, batches, native, ollama, openai, responses, vectors
from messages.openai import NOT_GIVEN

JSON = "application/json"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
TEXT = "text/plain"


class Operation(NamedTuple):
    method: str
    path: str
    summary: str
    body: Any = None  # the struct that it is decoded by
    reply: Any = None  # the struct of the answer, where it is one
    stream: str = ""  # the media type of its stream
    media: str = JSON  # of the answer
    form: bool = False  # the body is a form with a file
    query: tuple[str, ...] = ()


PAGE = ("limit", "after")

OPERATIONS: tuple[Operation, ...] = (
    # OpenAI
    Operation("POST", "/v1/chat/completions", "A chat", openai.ChatBody, openai.ChatReply, SSE),
    Operation(
        "POST",
        "/v1/completions",
        "A text goes on",
        openai.CompletionBody,
        openai.CompletionReply,
        SSE,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "A turn of a conversation that may be kept here",
        responses.ResponsesBody,
        responses.ResponsesReply,
        SSE,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        "A response that is kept",
        reply=responses.ResponsesReply,
        query=("stream", "starting_after"),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "Forget a response; end it if it is being made",
        reply=responses.DeletedReply,
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "End a response that is made in the background",
        reply=responses.ResponsesReply,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "What a response was asked",
        reply=responses.ItemList,
        query=(*PAGE, "order"),
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Texts as vectors",
        vectors.EmbeddingBody,
        vectors.EmbeddingReply,
    ),
    Operation("POST", "/v1/files", "Upload a file", reply=batches.FileObject, form=True),
    Operation(
        "GET",
        "/v1/files",
        "The files",
        reply=batches.FileList,
        query=(*PAGE, "order", "purpose"),
    ),
    Operation("GET", "/v1/files/{file_id}", "A file", reply=batches.FileObject),
    Operation("DELETE", "/v1/files/{file_id}", "Delete a file", reply=batches.FileDeleted),
    Operation("GET", "/v1/files/{file_id}/content", "What is in a file", media="application/jsonl"),
    Operation(
        "POST",
        "/v1/batches",
        "Run the requests of a file, behind all other traffic",
        batches.BatchBody,
        batches.BatchObject,
    ),
    Operation("GET", "/v1/batches", "The batches", reply=batches.BatchList, query=PAGE),
    Operation("GET", "/v1/batches/{batch_id}", "A batch", reply=batches.BatchObject),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "End a batch", reply=batches.BatchObject),
    Operation("GET", "/v1/models", "The models", reply=openai.ModelList),
    Operation("GET", "/v1/models/{model}", "A model", reply=openai.ModelCard),
    Operation(
        "GET",
        "/v1/streams/{stream}",
        "Come back to a stream, behind the event named by Last-Event-ID",
        media=SSE,
    ),
    # Anthropic
    Operation("POST", "/v1/messages", "A chat", anthropic.MessagesBody, anthropic.Reply, SSE),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "How long a chat is",
        anthropic.CountBody,
        anthropic.CountReply,
    ),
    # Ollama
    Operation("POST", "/api/chat", "A chat", ollama.ChatBody, ollama.Line, NDJSON),
    Operation("POST", "/api/generate", "A text", ollama.GenerateBody, ollama.Line, NDJSON),
    Operation("POST", "/api/embed", "Texts as vectors", ollama.EmbedBody, ollama.EmbedReply),
    Operation(
        "POST",
        "/api/embeddings",
        "A text as a vector",
        ollama.EmbeddingsBody,
        ollama.EmbeddingsReply,
    ),
    Operation("GET", "/api/tags", "The models", reply=ollama.Tags),
    Operation("GET", "/api/ps", "The models in memory", reply=ollama.Tags),
    Operation("POST", "/api/show", "A model", ollama.ShowBody, ollama.Show),
    Operation("GET", "/api/version", "The version", reply=ollama.Version),
    # SGLang
    Operation("POST", "/generate", "A text goes on", native.GenerateBody, native.Generated, SSE),
    *(
        Operation("POST", path, summary, body, reply)
        for path, summary, body, reply in (
            ("/v1/score", "How likely tokens follow", vectors.ScoreBody, vectors.ScoreReply),
            ("/score", "The same", vectors.ScoreBody, vectors.ScoreReply),
            ("/v1/rerank", "Documents by their worth", vectors.RerankBody, list[vectors.Ranked]),
            ("/rerank", "The same in Jina's form", vectors.RerankBody, vectors.RerankReply),
            ("/v2/rerank", "The same in Cohere's", vectors.RerankBody, vectors.RerankReply),
        )
    ),
    *(
        operation
        for prefix in ("", "/v1")
        for operation in (
            Operation(
                "POST",
                f"{prefix}/tokenize",
                "The tokens of a text or a chat",
                native.TokenizeBody,
                native.Tokenized,
            ),
            Operation(
                "POST",
                f"{prefix}/detokenize",
                "The text of tokens",
                native.DetokenizeBody,
                native.Detokenized,
            ),
        )
    ),
    Operation(
        "POST",
        "/v1/chat/completions/render",
        "The prompt that a chat becomes",
        openai.ChatBody,
        native.RenderReply,
    ),
    Operation(
        "POST",
        "/v1/completions/render",
        "The tokens that a prompt becomes",
        openai.CompletionBody,
        native.RenderReply,
    ),
    Operation(
        "POST",
        "/parse_function_call",
        "The calls in a text that a model has written",
        native.ParseCallsBody,
        native.ParsedCalls,
    ),
    Operation(
        "POST",
        "/separate_reasoning",
        "A text that a model has written, apart from its reasoning",
        native.SeparateBody,
        native.Separated,
    ),
    *(
        Operation("GET", path, summary, reply=reply)
        for path, summary, reply in (
            ("/model_info", "What the model is", native.ModelInfo),
            ("/get_model_info", "The same", native.ModelInfo),
            ("/server_info", "What the server is and does", native.ServerInfo),
            ("/get_server_info", "The same", native.ServerInfo),
            ("/v1/loads", "How much there is to do", native.LoadReply),
        )
    ),
    *(
        Operation(
            method, "/flush_cache", "Forget all prefixes", reply=native.Done, query=("timeout",)
        )
        for method in ("GET", "POST")
    ),
    Operation("POST", "/abort_request", "End requests", native.AbortBody, native.Done),
    Operation("POST", "/pause_generation", "Compute nothing more", native.PauseBody, native.Done),
    Operation("POST", "/continue_generation", "Go on after a pause", reply=native.Done),
    # The house
    Operation("GET", "/", "A page for people", media="text/html"),
    Operation("GET", "/health", "Whether all parts are up"),
    Operation("GET", "/ready", "Whether the front end that answers takes calls"),
    Operation("GET", "/metrics", "Metrics for Prometheus", media=TEXT),
    Operation("GET", "/actors", "The tree of actors"),
    Operation("POST", "/actors/{path}/restart", "End a part, so that it starts afresh"),
    Operation("GET", "/openapi.json", "This description"),
)


def mirror(kind: type, within: tuple[type, ...] = ()) -> type:
    """A struct as it is described: fields that stay undecoded are of any type, without default.
    `within` are the structs that it is a part of; one of these again is just an object."""
    if kind in within:
        return dict[str, Any]
    within = (*within, kind)
    if not holds_raw(kind, ()):
        return kind
    fields: list[Any] = []
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        hint = mirrored(hints[field.name], within)
        if hint is msgspec.Raw or field.default is NOT_GIVEN:
            fields.append((field.encode_name, Any, msgspec.UNSET))
        elif field.required:
            fields.append((field.encode_name, hint))
        elif field.default is not msgspec.NODEFAULT:
            fields.append((field.encode_name, hint, field.default))
        else:
            factory = msgspec.field(default_factory=field.default_factory)
            fields.append((field.encode_name, hint, factory))
    made = msgspec.defstruct(
        kind.__name__, fields, kw_only=True, module=kind.__module__, **tag_of(kind)
    )
    made.__doc__ = kind.__dict__.get("__doc__")
    return made


def holds_raw(hint: Any, within: tuple[type, ...]) -> bool:
    if hint is msgspec.Raw:
        return True
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if hint in within:
            return False
        hints = get_type_hints(hint, include_extras=True).values()
        return any(holds_raw(one, (*within, hint)) for one in hints)
    return any(holds_raw(argument, within) for argument in get_args(hint))


def mirrored(hint: Any, within: tuple[type, ...]) -> Any:
    """A type with the structs in it mirrored."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return mirror(hint, within)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[mirrored(arguments[0], within), *hint.__metadata__]
    if origin in (Union, UnionType):
        return Union[tuple(mirrored(argument, within) for argument in arguments)]  # noqa: UP007
    if origin in (list, dict, tuple, set, frozenset):
        return origin[tuple(mirrored(argument, within) for argument in arguments)]
    return hint


def tag_of(kind: type) -> dict[str, Any]:
    config = kind.__struct_config__  # type: ignore[attr-defined]
    return {} if config.tag is None else {"tag": config.tag, "tag_field": config.tag_field}


def document(title: str, version: str, operations: Iterable[Operation] = OPERATIONS) -> bytes:
    """The description as JSON."""
    rows = list(operations)
    kinds = {kind for row in rows for kind in (row.body, row.reply) if kind is not None}
    types = {kind: mirror(kind) for kind in kinds | {error_of(row.path) for row in rows}}
    order = sorted(types, key=lambda kind: (kind.__module__, kind.__qualname__))
    schemas, components = msgspec.json.schema_components(
        [types[kind] for kind in order], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(order, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = describe(row, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "admin": {"type": "http", "scheme": "bearer"},
                },
            },
        }
    )


def describe(row: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in row.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in row.query
    ]
    content: dict[str, Any] = {row.media: {}}
    if row.reply is not None:
        content[row.media]["schema"] = schema_of[row.reply]
    if row.stream:
        # OpenAPI 3.1 has no words for events: a schema is taken for that of each by some tools.
        content[row.stream] = {}
    error = {
        "description": "What is wrong, or missing",
        "content": {JSON: {"schema": schema_of[error_of(row.path)]}},
    }
    found: dict[str, Any] = {
        "summary": row.summary,
        "operationId": operation_id(row),
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": error,
            "503": error,
            **({"529": error} if is_anthropic(row.path) else {}),
        },
        "security": security(row.path),
    }
    if row.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema_of[row.body]}},
        }
    if row.form:
        fields = {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string", "enum": ["batch"]},
        }
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        found["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": schema}},
        }
    return found


def error_of(path: str) -> type:
    """An error as the path's dialect has it."""
    if is_anthropic(path):
        return anthropic.AnthropicErrorReply
    return ollama.OllamaErrorReply if is_ollama(path) else openai.ErrorReply


def operation_id(row: Operation) -> str:
    words = [word.strip("{}") for word in row.path.replace(".", "_").split("/") if word]
    return "_".join([row.method.lower(), *words]) or row.method.lower()


def security(path: str) -> list[dict[str, list[str]]]:
    """The empty one says that a server without keys asks for none."""
    level = Access().level(path)
    if level is Level.OPEN:
        return []
    return [{"admin": []}] if level is Level.ADMIN else [{"key": []}, {}]
