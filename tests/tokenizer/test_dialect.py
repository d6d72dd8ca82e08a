"""What chat templates tell of a model's formats."""

from __future__ import annotations

import pytest

from actors.tokenizer.dialect import defaults_of, dialect_of
from messages.tokenizer import Defaults, Dialect

QWEN3 = """{%- if tools %}<tool_call>{"name": ..}</tool_call>{%- endif %}
{%- set content = content.split('</think>')[-1] %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
QWEN3_THINKING = """<tool_call> {%- set content = content.split('</think>')[-1] %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
R1 = """<｜tool▁call▁begin｜> {% set content = content.split('</think>')[-1] %}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ messages[0].content }}", Dialect()),
        (QWEN3, Dialect("hermes", "think")),
        (QWEN3_THINKING, Dialect("hermes", "deepseek-r1")),
        (R1, Dialect("deepseek", "deepseek-r1")),
        ("<|start|>assistant<|channel|>analysis", Dialect("gpt-oss", "gpt-oss")),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", Dialect("mistral", "")),
        ("<tool_call><function=name><parameter=x>", Dialect()),
        ("Environment: ipython", Dialect("llama3", "")),
    ],
)
def test_formats_are_told_from_templates(template: str, dialect: Dialect) -> None:
    assert dialect_of({"default": template}) == dialect


def test_a_template_for_tools_goes_before_the_plain_one() -> None:
    assert dialect_of({"default": "x", "tool_use": "<tool_call>"}).tool_parser == "hermes"
    assert dialect_of({}) == Dialect()


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2},
            Defaults(0.6, 20, 0.95),
        ),
        ({"temperature": True, "top_k": 1.5, "top_p": 7, "min_p": None}, Defaults()),
        ({"repetition_penalty": 1.05}, Defaults(repetition_penalty=1.05)),
        ([], Defaults()),
    ],
)
def test_recommended_sampling_is_read_where_it_makes_sense(
    config: object, defaults: Defaults
) -> None:
    assert defaults_of(config) == defaults
