"""Chat templates: Hugging Face's dialect of jinja2, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forkserve.engine.local.chat import ChatTemplate
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.errors import ModelError

from .conftest import tiny_tokenizer

USER = {"role": "user", "content": "hé <b> & 'q'"}


def render(source: str, *messages: object, tools: object = None, documents: object = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, "here")
    return template.render(messages or [USER], tools, documents, True)  # type: ignore[arg-type]


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nend"
    assert render(source) == "<s>\nuser\nend"


def test_helpers() -> None:
    assert render("{{ messages[0] | tojson }}") == ('{"role": "user", "content": "hé <b> & \'q\'"}')
    assert render("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{{ add_generation_prompt }}") == "True"
    assert render("{{ documents[0].title }}", documents=[{"title": "t"}]) == "t"
    assert render("a{% generation %}{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    compact = "{{ {'b': 1, 'a': 'é'} | tojson(separators=(',', ':'), sort_keys=true) }}"
    assert render(compact) == '{"a":"é","b":1}'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


@pytest.mark.parametrize("options", ["", "(false)", "(true, 2)", "(ensure_ascii=true)"])
def test_arguments_of_tojson_by_place_or_name(options: str) -> None:
    """What is content is told from what the template writes, and stays as it is."""
    source = "{{ messages[0].content | tojson" + options + " }}"
    template = ChatTemplate(source, {}, "here", ["<x>"])
    text = template.render([{"role": "user", "content": "é<x>"}], None, None, True)
    at = text.index("<x>")
    assert json.loads(text) == "é<x>"
    assert any(begin <= at and end >= at + 3 for begin, end in text.plain)


def test_refusals_are_model_errors() -> None:
    with pytest.raises(ModelError, match="refused 1 messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match=r"refused 1 messages: ZeroDivisionError: .*division"):
        render("{{ 1 // 0 }}")
    with pytest.raises(ModelError, match=r"refused 1 messages: MemoryError$"):
        render("{{ 'a' | center(2 ** 62) }}")
    with pytest.raises(ModelError, match="does not compile"):
        render("{% for %}")
    with pytest.raises(ModelError, match="refused"):
        render("{{ 'a' + messages[0].content }}", {"role": "user", "content": None})


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}


@pytest.mark.parametrize("lacking", [{}, {"content": None}])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ m.role + ':' + m['content'] }}", "assistant:"),  # it fails without
        ("{{ m.role }}:{{ m.content }}", "assistant:"),  # it would write None
        ("{{ 'None; ' }}{% if not m.content %}calls{% endif %}", "None; calls"),
        ("{% if m['content'] is string %}says{% else %}calls{% endif %}", "calls"),  # it can tell
        ("{{ m.content is string and m.content | first | upper }}", "False"),  # "" would fail
    ],
)
def test_an_assistant_that_only_calls_tools_has_no_content(
    lacking: dict[str, None], source: str, wanted: str
) -> None:
    message = {"role": "assistant", "tool_calls": [CALL], **lacking}
    given = dict(message)
    loop = "{% for m in messages %}" + source + "{% endfor %}"
    assert render(loop, message) == wanted
    assert message == given


def test_content_that_lacks_is_filled_for_control_tokens_as_well() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}{% endfor %}"
    template = ChatTemplate(source, {}, "here", ["<|im_start|>"])
    bare = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "<|im_start|>"},
    ]
    full = [{**bare[0], "content": ""}, bare[1]]
    text, same = (template.render(m, None, None, True) for m in (bare, full))
    assert (text, text.plain) == (same, same.plain)
    assert len(text.plain) == 1


def test_a_template_that_refuses_in_any_case_says_why() -> None:
    source = "{{ messages[0].content + '' }}{{ raise_exception('no calls') }}"
    with pytest.raises(ModelError, match="no calls"):
        render(source, {"role": "assistant", "tool_calls": [CALL]})


def test_templates_run_in_a_sandbox() -> None:
    with pytest.raises(ModelError, match="refused"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="refused"):
        render("{{ messages.append(1) }}", USER, tools=None)


def test_template_from_a_folder(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    assert LocalTokenizer.from_folder(tmp_path).render([USER]).startswith("[user] hé")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert LocalTokenizer.from_folder(tmp_path).render([USER]) == "<|im_end|>!"
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("with {{ tools | length }} tools")
    tokenizer = LocalTokenizer.from_folder(tmp_path)
    assert tokenizer.render([USER], tools=[{}]) == "with 1 tools"
    assert tokenizer.render([USER]) == "<|im_end|>!"
    (extra / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"cannot read .*tool_use"):
        LocalTokenizer.from_folder(tmp_path)
    (extra / "tool_use.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    listed = [{"name": n, "template": n} for n in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": listed}))
    (tmp_path / "chat_template.jinja").unlink()
    assert LocalTokenizer.from_folder(tmp_path).render([USER]) == "default"
    assert LocalTokenizer.from_folder(tmp_path).render([USER], tools=[{}]) == "tool_use"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        LocalTokenizer.from_folder(tmp_path).render([USER])
    beside = tmp_path / "chat_template.json"  # of models that see images as well
    beside.write_text(json.dumps({"chat_template": "beside"}))
    assert LocalTokenizer.from_folder(tmp_path).render([USER]) == "beside"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert LocalTokenizer.from_folder(tmp_path).render([USER]).startswith("[user]")
    (tmp_path / "tokenizer_config.json").unlink()
    for broken in ("[", "[]"):
        beside.write_text(broken)
        with pytest.raises(ModelError, match=r"chat_template\.json"):
            LocalTokenizer.from_folder(tmp_path)
