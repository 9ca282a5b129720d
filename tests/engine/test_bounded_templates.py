"""Chat templates that would hold a thread for ever, or take all memory."""

from __future__ import annotations

import pytest

from forkserve.engine.local import bounded
from forkserve.engine.local.chat import ChatTemplate
from forkserve.errors import ModelError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<x>"}]


def render(source: str) -> str:
    template = ChatTemplate(source, {}, "here", ["<x>"])
    return str(template.render(MESSAGES, None, None, True))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) if j > i %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
        "{% for i in [1] recursive %}{{ loop(range(200)) if loop.depth < 3 }}{% endfor %}",
    ],
)
def test_steps_are_counted(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_STEPS", 20_000)
    for _ in range(2):
        with pytest.raises(ModelError, match="refused 2 messages: it takes more than 20,000 steps"):
            render(source)
    assert render("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}") == (
        "1False2True"
    )


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ 9 ** 9999999999 }}", "4,096 bits"),
        ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
         "{% endfor %}", "4,096 bits"),
        ("{{ 'a' * 10 ** 12 }}", "67,108,864 items"),
        ("{{ (10 ** 12 * ['a']) | length }}", "67,108,864 items"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
         "{% endfor %}", "67,108,864 items"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", "67,108,864 items"),
    ],
)  # fmt: skip
def test_sizes_are_bounded(source: str, what: str) -> None:
    with pytest.raises(
        ModelError, match=f"refused 2 messages: it makes a value of more than {what}"
    ):
        render(source)


def test_methods_that_pad() -> None:
    with pytest.raises(ModelError, match="more than 67,108,864 characters"):
        render("{{ 'a'.center(10 ** 10) }}")
    assert render("{{ 'a'.center(3) }}|{{ 'a,b'.split(',', 1) }}") == " a |['a', 'b']"
    with pytest.raises(ModelError, match="'lipsum' is undefined"):
        render("{{ lipsum(10 ** 9) }}")


def test_what_stays_as_it_was() -> None:
    assert render("{{ 2 ** 10 * 3 + 1 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' ~ 1 ~ none }}") == (
        "3073 abab [1, 2] a1None"
    )
    assert render("{{ 2 ** -1 }} {{ 1.5 * 2 }} {{ -3 * 'a' }}|{{ true + 1 }}") == "0.5 3.0 |2"
    loop = "{{ loop.length }}{{ loop.revindex }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}"
    assert render("{% for i in [7, 8] %}" + loop + "{% endfor %}") == "228a21b"
    loop = "{{ i }}{{ loop([i + 1, i + 2]) if loop.depth < 2 }}{{ loop.length }}"
    assert render("{% for i in [1] recursive %}" + loop + "{% endfor %}") == "122321"
    assert render("{% for i in nothing %}{{ i }}{% else %}none{% endfor %}") == "none"
    assert render("{% for i in range(3) if i != 1 %}{{ i }}{% endfor %}") == "02"
    down = "{{ loop.length }}{{ loop.depth }}{{ loop(i.a) if i.a }}{{ loop.last }} "
    assert render("{% for i in [{'a': [{}, {}]}] recursive %}" + down + "{% endfor %}") == (
        "1122False 22True True "
    )
    with pytest.raises(ModelError, match="missing 1 required positional argument"):
        render("{% for i in [1] recursive %}{{ loop() }}{% endfor %}")
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}") == "a1"
    with pytest.raises(ModelError, match="'NoneType' object is not iterable"):
        render("{% for i in none %}{% endfor %}")


@pytest.mark.parametrize("name", ["function", "context", "args", "kwargs", "obj", "operator"])
def test_arguments_have_any_name(name: str) -> None:
    """Templates that write tools like to call one ``function``."""
    macro = f"{{% macro m({name}) %}}[{{{{ {name} }}}}]{{% endmacro %}}"
    assert render(f"{macro}{{{{ m({name}=messages[1].content) }}}}") == "[<x>]"
    assert render(f"{{% set n = namespace({name}=1) %}}{{{{ n.{name} }}}}") == "1"
    found = ChatTemplate(f"{macro}{{{{ m({name}=messages[1].content) }}}}", {}, "here", ["<x>"])
    assert found.render(MESSAGES, None, None, True).plain == ((1, 4),)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ ('{0.__class__}').format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__dict__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ range(10 ** 9) | list }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_machine_is_out_of_reach(source: str) -> None:
    try:
        text = render(source)
    except ModelError:
        return
    assert text in ("", "{}"), text  # what can't be seen is nothing
