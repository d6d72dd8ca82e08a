"""This file turns a conversation into the prompt that the model was trained on, by the chat
template that came with the model.

It does not know tokens, files or the time: a date in a template is the request's own (`created_s`),
so that a request that is resumed has the same prompt. Laws: a template's refusal reaches the caller
in its own words; a request can add variables to a template and replace none of ours; no character
of a message is dropped by us.

The role `developer` is handed to a template that knows it, and is `system` to all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from actors.tokenizer.prompt import Refused, check_chars, refuse
from actors.tokenizer.sandbox import WORK, Exhausted, Raised, TemplateSandbox, Work
from actors.tokenizer.tools import knows_tools, with_tools
from messages.tokenizer import Chat
from messages.types import Fault, Problem

# What a template is given by us, and what jinja itself defines: not for a request to set.
RESERVED = frozenset(
    """add_generation_prompt caller chat_template continue_final_message conversation dict kwargs
    loop max_length messages namespace padding raise_exception range return_dict
    return_tensors self strftime_now tokenize tokenizer_kwargs tools truncation varargs""".split()
)


class BadTemplate(Exception):
    """A template cannot be compiled. The text says why."""


class ChatTemplates:
    """A model's templates, compiled. May be used by several threads at once."""

    def __init__(self, sources: Mapping[str, str], named: Mapping[str, str]) -> None:
        """`named`: bos_token, eos_token …, as templates write them. Raises BadTemplate."""
        self.sources = dict(sources)
        self.named = dict(named)
        sandbox = TemplateSandbox()
        self.templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self.templates[name] = sandbox.from_string(source)
            except TemplateSyntaxError as error:
                raise BadTemplate(
                    f"the chat template {name!r} is wrong in line {error.lineno}: {error.message}"
                ) from error
            except RecursionError as error:
                raise BadTemplate(f"the chat template {name!r} is nested too deeply") from error

    def render(self, chat: Chat, *, chars_max: int, context_len: int) -> str:
        """The prompt of a conversation. Raises Refused: the caller's fault, or the template's."""
        if chat.template:
            bare = msgspec.structs.replace(chat, template="")
            own = self.brought(chat.template)
            try:
                return own.render(bare, chars_max=chars_max, context_len=context_len)
            except Refused as refused:
                if refused.problem.fault is not Fault.INTERNAL:
                    raise
                message = "The request's chat template does too much work."
                raise refuse(message, "chat_template") from refused
        if chat.add_generation_prompt and chat.continue_final_message:
            raise refuse(
                "continue_final_message continues the last message, add_generation_prompt starts "
                "a new one: only one of them can be true.",
                "continue_final_message",
            )
        check_chars(len(chat.messages_json), 4 * chars_max, context_len, "messages")
        messages = parse(chat.messages_json, list, "messages")
        tools = parse(chat.tools_json or b"null", list, "tools") if chat.tools_json else None
        name = self.choose(tools)
        if "developer" not in self.sources[name]:
            for message in messages:
                if message.get("role") == "developer":
                    message["role"] = "system"
        if not knows_tools(self.sources[name]):
            messages = with_tools(messages, tools)
        mark = ""
        if chat.continue_final_message:
            mark = mark_last(messages, chat.messages_json)
        variables: dict[str, Any] = {
            **self.named,
            **self.extra(chat.template_kwargs_json),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        if chat.created_s is not None:
            moment = datetime.fromtimestamp(chat.created_s)
            variables["strftime_now"] = lambda format: moment.strftime(str(format))
        try:
            text = run(self.templates[name], variables, chars_max, context_len)
        except Exhausted as error:
            check_chars(len(chat.messages_json), chars_max, context_len, "messages")
            problem = Problem(Fault.INTERNAL, "The chat template of this model does too much work.")
            raise Refused(problem) from error
        return cut_at(text, mark) if mark else text

    def brought(self, source: str) -> ChatTemplates:
        """A template that a request brings, in place of the model's."""
        try:
            return ChatTemplates({"default": source}, self.named)
        except BadTemplate as error:
            message = f"The request's chat template cannot be used: {error}."
            raise refuse(message, "chat_template") from error

    def choose(self, tools: list[Any] | None) -> str:
        """Models have one template, or several by name with one for chats with tools."""
        if tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        if len(self.templates) == 1:
            return next(iter(self.templates))
        raise refuse(
            "This model has no chat template, so it takes no messages: use /v1/completions, or "
            "start the server with --chat-template.",
            "messages",
        )

    def extra(self, template_kwargs_json: bytes) -> dict[str, Any]:
        param = "chat_template_kwargs"
        extra: dict[str, Any] = parse(template_kwargs_json or b"{}", dict, param)
        for name in extra:
            if name in RESERVED or name in self.named or name.startswith("_"):
                raise refuse(f"{name!r} is not for a request to set.", param)
        return extra


def parse(data: bytes, kind: type[Any], param: str) -> Any:
    """JSON of one kind, its messages being objects."""
    try:
        value: Any = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise refuse(f"{param} cannot be read as JSON.", param) from error
    if not isinstance(value, kind):
        raise refuse(f"{param} must be {'an array' if kind is list else 'an object'}.", param)
    if param == "messages" and not (value and all(isinstance(row, dict) for row in value)):
        raise refuse("messages must be one object or more.", param)
    return value


def run(template: Template, variables: Mapping[str, Any], chars_max: int, context_len: int) -> str:
    """Renders under a budget of work. The text so far is dropped as soon as it is too long.
    Raises Refused, Exhausted."""
    token = WORK.set(Work(chars_max))
    try:
        parts: list[str] = []
        char_count = 0
        for part in template.generate(variables):
            char_count += len(part)
            check_chars(char_count, chars_max, context_len, "messages")
            parts.append(part)
        return "".join(parts)
    except Raised as error:
        raise refuse(
            f"The chat template of this model refuses the conversation: {error.message}",
            "messages",
        ) from error
    except (MemoryError, RecursionError) as error:
        raise Exhausted("too much memory, or nested too deeply") from error
    except Refused:
        raise
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        # A missing field, a null where it adds texts: the template was not written for this.
        raise refuse(
            "The chat template of this model cannot render this conversation.", "messages"
        ) from e
    finally:
        WORK.reset(token)


def mark_last(messages: list[dict[str, Any]], messages_json: bytes) -> str:
    """Puts a mark at the end of the last message, to find the place in the rendered prompt."""
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise refuse("The last message has no text to continue.", "continue_final_message")
    mark = "\u2402END\u2403"
    while mark in content or mark.encode() in messages_json:
        mark += "\u2403"
    messages[-1]["content"] = content + mark
    return mark


def cut_at(text: str, mark: str) -> str:
    place = text.rfind(mark)
    if place < 0:
        raise refuse(
            "The chat template of this model does not show the last message, so it cannot be "
            "continued.",
            "continue_final_message",
        )
    return text[:place].replace(mark, "")
