from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from pegboard.errors import CheckpointError, InvalidRequest
from pegboard.text import Tokenizer, render_chat

#: Templates in the manner of the common model families.
TEMPLATES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "inst": """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "headers": """{%- set ns = namespace(system='', last=none) %}
{%- if date is not defined %}{% set date = "26 Jul 2024" %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    {%- set ns.last = loop.length ~ '/' ~ loop.revindex ~ loop.last %}
{{ "<|start|>" ~ message.role ~ "<|end|>" }}
{% generation %}
{{ message.content | trim }}
{% endgeneration %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
{{ ns.system }}{{ ns.last }}{{ date }}
{%- macro show(tool) %}{{ tool | tojson }}|{{ tool | tojson(indent=2) }}{% endmacro %}
{%- if tools %}
{% for tool in tools if tool.name != 'no' recursive %}{{ show(tool) }}{% else %}none{% endfor %}
{% for key, value in tools[0].items() %}{{ key }}{{ value }}{% endfor %}
{%- endif %}
{%- for i in range(3) %}{{ i }}{{ loop.nextitem is defined }}{% endfor %}""",
}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b>&amp; 'you' é"}],
    "turns": [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
}
TOOLS = [{"name": "weather <&>", "text": "é"}, {"name": "no"}]


def render(template: str, messages: Any, **options: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)


@pytest.fixture(scope="module")
def reference(make_tokenizer: Callable[..., Tokenizer]) -> PreTrainedTokenizerFast:
    twin = Backend.from_str(make_tokenizer("byte_level").backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=twin, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"date": "today"}], ids=str
)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_agrees_with_transformers(
    reference: PreTrainedTokenizerFast, name: str, chat: str, options: dict[str, Any]
) -> None:
    template, messages = TEMPLATES[name], CHATS[chat]
    if name == "inst" and chat == "system":
        with pytest.raises(InvalidRequest, match="refuses these messages: Conversation roles must alternate"):
            render(template, messages)
        return
    wanted = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    assert render(template, messages, **options) == wanted


def test_tokens_that_a_model_lacks_are_undefined() -> None:
    template = "{{ bos_token is defined }}{{ eos_token }}"
    assert render_chat(template, CHATS["one"], bos_token=None, eos_token="</s>") == "False</s>"


def test_time_is_told() -> None:
    assert render("{{ strftime_now('%Y') }}", CHATS["one"]).isdigit()


def test_parts_and_tool_calls_reach_the_template() -> None:
    template = "{% for m in messages %}{{ m.content[0].text if m.content else m.tool_calls[0].name }};{% endfor %}"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    assert render(template, messages) == "hi;f;"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "right"),
    [
        ("{{ '<' + messages[0]['content'] + '>' }}", "<a\nb>"),
        ("{% for p in messages[0].content %}{{ p['type'] }}:{{ p.text }};{% endfor %}", "text:a;text:b;"),
        ("{{ messages[0].content if messages[0].content is string else 'list' }}", "list"),
    ],
)
def test_parts_are_one_text_for_a_template_that_knows_none(template: str, right: str) -> None:
    assert render(template, [{"role": "user", "content": PARTS}]) == right
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].content + messages[0].tool_calls[0].name }}", calls) == "f"


def test_a_part_that_is_no_text_is_named() -> None:
    image = [{"role": "user", "content": [*PARTS, {"type": "image", "url": "x"}]}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has a part of type 'image'.*takes texts"):
        render("{{ messages[0].content }}", image)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "with one message at least"),
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] has no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has content of type NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content of type int"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\] has content of type list"),
    ],
)
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render(TEMPLATES["chatml"], messages)


@pytest.mark.parametrize("template", ["{{ messages[7].content }}", "{{ 1 + 'a' }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_fails_says_so(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the chat template failed on these messages: .*Error"):
        render(template, CHATS["one"])


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", "{% nonsense %}", "{{ 'a' | nonsense }}"])
def test_a_template_that_is_not_jinja(template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template is not valid, line 1"):
        render(template, CHATS["one"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "go round more than"),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "more than 16000000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_hang(template: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        render(template, CHATS["one"])


def test_the_budget_of_loops_is_per_render() -> None:
    template = "{% for i in range(90000) %}{% for j in range(7) %}{% endfor %}{% endfor %}{{ messages[0].role }}"
    assert [render(template, CHATS["one"]) for _ in range(2)] == ["user", "user"]
