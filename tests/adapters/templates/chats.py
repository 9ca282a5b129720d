"""Chat templates that do what families of real ones do, and a tokenizer with seams."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from forkserve import ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.prompt_text import occurrences

pytest.importorskip("jinja2")
from forkserve.engine.local.chat import ChatTemplate

# Only messages: the family of SmolLM2.
PLAIN = """\
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Tools in the system message, thinking dropped from the turns before the last, results joined in
# one user turn: the family of Qwen 3.
QWEN = r"""\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set said = (m.content.split('</think>') | last).lstrip('\n') %}
{{- '<|im_start|>assistant\n' + said }}
{%- for c in m.tool_calls or [] %}
{{- '\n' if said or not loop.first }}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Arguments before the name, results as JSON: the family of Hermes.
HERMES = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>tool
<tool_response>
{"name": "{{ m.name }}", "content": {{ m.content | tojson }}}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One call a turn, text beside it dropped, results as JSON strings: the family of Llama 3.
LLAMA = """\
{%- for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}

{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- else %}{{ m.content | trim }}
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""

# The id after the arguments and after the result, tools before the last user message, no
# generation prompt: the family of Mistral.
MISTRAL = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = m.content %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'system' %}
{%- if tools and m.content == ns.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments
 | tojson }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>
{%- elif m.role == 'assistant' %}{{ m.content }}<|im_end|>
{%- else %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{#- -#}
[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

FAMILIES = {"plain": PLAIN, "qwen": QWEN, "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}

_RESULT = "{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = PLAIN.replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}",
    1,
).replace("{%- if loop.first and m.role != 'system' %}", "{%- if false %}")
ODD = {
    "no system": NO_SYSTEM,
    "system unheard": NO_SYSTEM.replace(
        "{{ raise_exception('no system') }}{% endif %}", "{% continue %}{% endif %}"
    ),
    "trims": PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "counts": PLAIN.replace("{{ m.content }}", "{{ m.content | length }} {{ m.content }}"),
    "repeats": PLAIN.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}"),
    "cuts": PLAIN.replace("{{ m.content }}", "{{ m.content[:5] }}"),
    "shouts": PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}"),
    "judges": PLAIN.replace(
        "{{ m.content }}", "{{ 'long' if m.content | length > 20 }}{{ m.content }}"
    ),
    "hoists": "{{ messages[-1].content }}" + PLAIN,
    "refuses": PLAIN.replace(
        "{{ m.content }}",
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}",
    ),
}

WORDS = [
    "\n{",
    '{"',
    '":',
    '": "',
    '"}',
    "}\n",
    "\n\n",
    " the",
    " a",
    "ing",
    "Error",
    ": ",
    "result",
]
WORDS += ["tool", "call", "name", "argu", "ments", "content", "er", "on", "in", "\n\u00e9", "00"]
MARKERS = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<|eos|>"]


@cache
def compiled(source: str) -> ChatTemplate:
    """Compiling takes longer than rendering, and a compiled template doesn't change."""
    return ChatTemplate(source, {}, "here", MARKERS)


class SeamTokenizer:
    """Bytes, four markers, and words that span the seams of templates (longest first)."""

    def __init__(self, source: str) -> None:
        self._template = compiled(source)
        words = sorted(WORDS, key=len, reverse=True)
        self._ids = {word: 260 + number for number, word in enumerate(words)}
        self._table = {i: word.encode() for word, i in self._ids.items()}
        self._words = re.compile("|".join(map(re.escape, words)))
        self._markers = re.compile("|".join(map(re.escape, MARKERS)))
        self.encoded = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.encoded += len(text)
        ids: list[int] = []
        at = 0
        for (begin, end), own in occurrences(text, self._markers) if special else ():
            if own:
                ids += [*self._worded(text[at:begin]), 256 + MARKERS.index(text[begin:end])]
                at = end
        return ids + self._worded(text[at:])

    def _worded(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for word in self._words.finditer(text):
            ids += [*text[at : word.start()].encode(), self._ids[word[0]]]
            at = word.end()
        return ids + list(text[at:].encode())

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        out = bytearray()
        for i in ids:
            if i < 256:
                out.append(i)
            elif i < 260:
                out += b"" if skip_special else MARKERS[i - 256].encode()
            else:
                out += self._table.get(i, b"")
        return bytes(out)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._template.render(messages, tools, None, add_generation_prompt)


def backend(family: str = "qwen", **options: Any) -> MockBackend:
    """A mock that speaks a template of `FAMILIES` or `ODD`."""
    replies = options.pop("replies", ())
    on_batch = options.pop("on_batch", None)
    settings = {"page_size": 4, "capacity_pages": 8192, "prefix_index": False} | options
    made = MockBackend(ForkServeConfig(**settings), on_batch=on_batch)
    made.tokenizer = SeamTokenizer({**FAMILIES, **ODD}[family])
    made.script(*replies)
    return made
