"""LangChain's own suites for chat models."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests")
pytest.importorskip("llguidance")

from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from forkserve.adapters.langchain import ChatForkServe

from .rules import RuleEngine

ENGINE = RuleEngine()


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatForkServe]:
        return ChatForkServe

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "mock", "engine": ENGINE}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"FORKSERVE_API_KEY": "key"}, {"model": "mock"}, {"api_key": "key"}


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatForkServe]:
        return ChatForkServe

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "mock", "engine": ENGINE}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another"

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatForkServe(model="mock", engine=ENGINE)
        model.invoke("the same prompt")
        if not stream:
            return model.invoke("the same prompt")
        chunks = list(model.stream("the same prompt"))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return whole  # type: ignore[return-value]
