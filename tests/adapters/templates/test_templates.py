"""The known suffix: what it is for each family of templates, and when nothing is known."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from forkserve import ForkServeConfig
from forkserve.adapters.templates import LATER, ChatRenderer, Dialect, Encoder, common
from forkserve.engine.mock import ByteTokenizer

from .chats import FAMILIES, MARKERS, ODD, WORDS, SeamTokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
USER = {"role": "user", "content": "Where is it?"}
THINK = "<think>\nlong and winding thoughts\n</think>\n\n"


def calling(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call{n:05d}",
                "type": "function",
                "function": {"name": "look", "arguments": arguments},
            }
            for n, arguments in enumerate(calls, 1)
        ],
    }


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "look", "content": text}


def renderer(family: str) -> ChatRenderer:
    return ChatRenderer(SeamTokenizer({**FAMILIES, **ODD}[family]), TOOLS)


def test_dialects_are_found_out() -> None:
    assert {f: renderer(f).dialect for f in FAMILIES} == {
        "plain": Dialect(tools=False, calls=False, results=True),
        "qwen": Dialect(True, True, True),
        "hermes": Dialect(True, True, True),
        "llama": Dialect(True, True, True, parallel=False),
        "mistral": Dialect(True, True, True),
    }
    assert renderer("refuses").dialect == Dialect(False, False, False)
    assert ChatRenderer(ByteTokenizer()).dialect == Dialect(True, True, True)


@pytest.mark.parametrize("family", ["no system", "system unheard"])
def test_a_template_without_system_messages_has_them_in_the_users_text(family: str) -> None:
    chat = renderer(family)
    assert not chat.dialect.system
    kind, brief = ({"role": "system", "content": text} for text in ("Be kind.", "Be brief."))
    said = "<|im_start|>user\nBe kind.\n\nBe brief.\n\nWhere is it?<|im_end|>\n"
    assert chat.text([kind, brief, USER], generation=False) == said
    parts = {"role": "user", "content": [{"type": "text", "text": "Where?"}]}
    assert "Be kind." in chat.text([kind, parts])
    turn = {"role": "assistant", "content": "There."}
    alone = chat.text([kind, turn], generation=False)
    assert alone.startswith("<|im_start|>user\nBe kind.<|im_end|>\n<|im_start|>assistant")
    assert (
        chat.text([USER, turn])
        == renderer("plain").text([USER, turn]).partition("kind.<|im_end|>\n")[2]
    )
    messages = [kind, USER]
    chat.tokens(messages)
    assert messages == [kind, USER]


def test_lone_halves_of_surrogate_pairs_are_replaced() -> None:
    chat = renderer("qwen")
    text = chat.text([{"role": "user", "content": "a\ud800b \ud83d\ude00"}])
    assert "a\ufffdb \U0001f600" in text
    chat.tokens([{"role": "user", "content": "a\ud800b"}])


def test_tools_are_given_to_templates_that_list_them() -> None:
    for family in FAMILIES:
        shown = "look" in renderer(family).text([USER])
        assert shown == (family != "plain")


# What the model wrote, by family; `lost` says whether the template writes it otherwise.
WROTE = {
    "qwen": (
        '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>',
        False,
    ),
    "qwen thinks": (
        THINK + '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>',
        True,
    ),
    "hermes": (
        '\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>',
        True,
    ),
    "llama": ('{"name": "look", "parameters": {"at": "x"}}<|im_end|>', False),
    "llama spaces": ('{"name":"look", "parameters": {"at":"x"}}<|im_end|>', True),
    "mistral": ('[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]<|im_end|>', True),
}
CLOSE = {
    "qwen": "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "hermes": '"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n',
    "llama": '"<|im_end|><|im_start|>assistant\n\n',
    "mistral": '", "call_id": "call00001"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("case", WROTE)
@pytest.mark.parametrize(
    "output", ["x", "", " padded ", '{"a": "b"}', "line\nline", "é", "00", "\n{"]
)
def test_the_known_suffix_is_a_prefix_of_the_next_prompt(case: str, output: str) -> None:
    family = case.split(maxsplit=1)[0]
    chat, (wrote, lost) = renderer(family), WROTE[case]
    turn = calling({"at": "x"}, content=THINK if "thinks" in case else "")
    decoded = chat.tokens([USER]) + chat.tokenizer.encode(wrote)
    known = chat.known(decoded, lambda text: [USER, turn, result(text)])
    prompt = chat.tokens([USER, turn, result(output)])
    assert prompt == chat.tokenizer.encode(chat.text([USER, turn, result(output)]))
    assert not known.drift
    assert known.close == CLOSE[family]
    assert prompt[: known.at] == decoded[: known.at]
    assert tuple(prompt[known.at : known.at + len(known.tokens)]) == known.tokens
    assert (known.at < len(decoded) - 1) == lost
    rest = chat.tokenizer.decode_bytes(prompt[known.at + len(known.tokens) :]).decode()
    # All but what might melt with the result's first characters is known.
    assert len(rest) <= len(json.dumps(output)) + len(known.close) + 4


def test_thinking_that_the_template_drops_moves_the_branch_back() -> None:
    chat = renderer("qwen")
    prompt = chat.tokens([USER])
    decoded = prompt + chat.tokenizer.encode(WROTE["qwen thinks"][0])
    turn = calling({"at": "x"}, content=THINK)
    known = chat.known(decoded, lambda text: [USER, turn, result(text)])
    assert known.at == len(prompt) + 1  # <think> and <tool_call> begin alike
    text = chat.tokenizer.decode_bytes(known.tokens).decode()
    assert '"name": "look"' in text
    assert text.endswith("<tool_response>")  # the line break may melt with the result


def test_all_results_to_come_are_open() -> None:
    chat = renderer("qwen")
    turn = calling({"at": "x"}, {"at": "y"})
    decoded = chat.tokens([USER])
    known = chat.known(decoded, lambda t: [USER, turn, result(t), result(LATER.format(1), 2)])
    assert known.close == "\n</tool_response>\n<tool_response>\n"
    second = chat.known(decoded, lambda t: [USER, turn, result("one"), result(t, 2)])
    assert second.tokens[: len(known.tokens)] == known.tokens
    assert second.close == CLOSE["qwen"]


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
def test_guesses_are_escaped_as_the_template_escapes(family: str) -> None:
    chat, turn = renderer(family), calling({"at": "x"})
    guess = '{"rows": "a\nb"'
    known = chat.known(chat.tokens([USER]), lambda t: [USER, turn, result(t)], prefix=guess)
    assert json.dumps(guess)[1:-1] in chat.tokenizer.decode_bytes(known.tokens).decode()


@pytest.mark.parametrize("family", ["counts", "repeats", "cuts", "shouts", "judges", "hoists"])
def test_a_template_that_looks_into_results_leaves_nothing_known(family: str) -> None:
    chat = renderer(family)
    decoded = chat.tokens([USER])
    said = {"role": "assistant", "content": "x"}
    known = chat.known(decoded, lambda text: [USER, said, result(text)])
    assert known.tokens == ()
    assert known.at == len(decoded)
    assert "result" in known.drift
    assert chat.drifts == 1


def test_a_template_that_refuses_leaves_nothing_known() -> None:
    chat = renderer("llama")
    turn = calling({"at": "x"}, {"at": "y"})
    known = chat.known([1], lambda text: [USER, turn, result(text)])
    assert "one call" in known.drift
    assert chat.drifts == 1


def test_a_template_that_trims_is_no_trouble() -> None:
    chat = renderer("trims")
    said = {"role": "assistant", "content": "x"}
    decoded = chat.tokens([USER])
    known = chat.known(decoded, lambda text: [USER, said, result(text)])
    for output in ("  x", "\n\n", "a  "):
        prompt = chat.tokens([USER, said, result(output)])
        assert tuple(prompt[known.at :][: len(known.tokens)]) == known.tokens


@pytest.mark.parametrize("case", WROTE)
def test_hidden_text_is_never_in_the_suffix(case: str) -> None:
    secret = 'hunter2-é-"quoted"'
    chat, (wrote, lost) = renderer(case.split(maxsplit=1)[0]), WROTE[case]
    content = THINK if "thinks" in case else ""
    turn = calling({"at": secret}, content=content)
    escaped = json.dumps(secret, ensure_ascii=False)
    decoded = chat.tokens([USER]) + chat.tokenizer.encode(wrote.replace('"x"', escaped))

    def mask(text: str, word: str) -> list[dict[str, Any]]:
        return [USER, calling({word: 0}, content=content), result(text)]

    def build(text: str) -> list[dict[str, Any]]:
        return [USER, turn, result(text)]

    known = chat.known(decoded, build, masks=[mask])
    open_ = chat.known(decoded, build)
    shown = chat.tokenizer.decode_bytes(known.tokens).decode("utf-8", "replace")
    assert "hunter2" not in shown
    assert known.tokens == open_.tokens[: len(known.tokens)]
    assert known.withheld == len(open_.tokens) - len(known.tokens)
    if not lost:
        assert known.withheld == 0, "arguments that were decoded are committed text already"
    if case == "qwen thinks":
        assert shown == 'tool_call>\n{"name": "look", "arguments": {"'


def test_hidden_text_in_one_of_several_calls() -> None:
    chat = renderer("qwen")
    turn = calling({"at": "open"}, {"at": "hunter2"})
    known = chat.known(
        chat.tokens([USER]),
        lambda t: [USER, turn, result(t), result(LATER.format(1), 2)],
        masks=[
            lambda t, w: [
                USER,
                calling({"at": "open"}, {w: 0}),
                result(t),
                result(LATER.format(1), 2),
            ]
        ],
    )
    shown = chat.tokenizer.decode_bytes(known.tokens).decode()
    assert "open" in shown
    assert "hunter2" not in shown


# --- the encoder -------------------------------------------------------------------------------

piece = st.sampled_from([*MARKERS, *WORDS, "x", " ", "\n", "é", "<|im_", "start|>", "{"])


@given(st.lists(st.lists(piece, max_size=12), min_size=1, max_size=6), st.randoms())
def test_encoding_goes_on_where_texts_part(texts: list[list[str]], draw: random.Random) -> None:
    tokenizer = SeamTokenizer(FAMILIES["plain"])
    encoder = Encoder(tokenizer)
    known: list[str] = []
    for parts in texts:
        known = known[: draw.randrange(len(known) + 1)] + parts
        text = "".join(known)
        assert encoder.encode(text) == tokenizer.encode(text)


def test_encoding_costs_the_new_text_alone() -> None:
    tokenizer = SeamTokenizer(FAMILIES["plain"])
    encoder, text = Encoder(tokenizer), ""
    for number in range(200):
        text += f"<|im_start|>user\nturn {number} the result<|im_end|>\n"
        encoder.encode(text)
    assert encoder.encoded < 4 * len(text)


@pytest.mark.model
def test_encoding_with_a_real_tokenizer() -> None:
    from forkserve.engine import LocalBackend

    backend = LocalBackend(ForkServeConfig(capacity_pages=16))
    draw = random.Random(5)
    words = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "user", "\n", "\n\n", " ", "  ", "1234"]
    words += ["é", "\U0001f600", "{", '"name": "x"', "<tool_call>", "the", " the", "'s", "<|im_"]
    encoder, text = Encoder(backend.tokenizer), ""
    for _ in range(400):
        text = text[: draw.randrange(len(text) + 1)]
        text += "".join(draw.choice(words) for _ in range(draw.randrange(12)))
        assert encoder.encode(text) == backend.tokenizer.encode(text)
    backend.close()


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_common(a: str, b: str) -> None:
    want = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert common(a, b) == want
