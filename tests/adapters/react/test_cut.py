"""A turn that is cut inside a character."""

from __future__ import annotations

import pytest

from forkserve.adapters.react import ReactAgent, TextDelta

from .agents import events_of, look
from .conftest import Make


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_unfinished_character_is_not_shown(make: Make, how: str) -> None:
    eng = make("On é")
    agent = ReactAgent(eng, [look], max_tokens=len("On ") + 1, speculate=False)
    said = "".join(e.text for e in events_of(agent, how=how) if isinstance(e, TextDelta))
    assert said == "On "
