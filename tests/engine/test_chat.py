"""Chat templates: Hugging Face's dialect of jinja2, in a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkserve.engine.local.chat import ChatTemplate
from forkserve.engine.local.tokenizer import LocalTokenizer
from forkserve.errors import ModelError

from .conftest import tiny_tokenizer

USER = {"role": "user", "content": "hé <b> & 'q'"}


def render(source: str, *messages: object, tools: object = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, "here")
    return template.render(messages or [USER], tools, True)  # type: ignore[arg-type]


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


def test_refusals_are_model_errors() -> None:
    with pytest.raises(ModelError, match="refused 1 messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="does not compile"):
        render("{% for %}")
    with pytest.raises(ModelError, match="refused"):
        render("{{ 'a' + messages[0].content }}", {"role": "user", "content": None})


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
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        LocalTokenizer.from_folder(tmp_path).render([USER])
