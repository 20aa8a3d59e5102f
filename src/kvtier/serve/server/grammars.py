"""Grammars of answers: JSON by ``response_format``, calls by ``tool_choice``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvtier.serve.engine import Engine, Grammar, GrammarError, NoGrammarsError
from kvtier.serve.server.errors import ApiError, bad_request
from kvtier.serve.server.fields import ResponseFormat, Tool, ToolChoice
from kvtier.serve.server.tool_calls import CallForm, grammar_of_calls

SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it: chat templates write it alike, and a small model does not lose
itself in white space."""


AUTO = ToolChoice("auto")


def grammar_of_answer(
    wanted: ResponseFormat | None,
    form: CallForm | None = None,
    tools: tuple[Tool, ...] = (),
    choice: ToolChoice = AUTO,
    is_single: bool = False,
) -> str:
    """Return the grammar of an answer; "" where any text will do.

    form: how the model writes calls; None if none are wanted.
    is_single: at most one call. A named function is called once in any case.
    """
    may_call = form is not None and bool(tools)
    must_call = may_call and choice.mode == "required"
    if wanted is None and not must_call:
        return ""
    starts, rules = [], ["%llguidance {}"]
    if may_call:
        assert form is not None
        named = [tool for tool in tools if choice.name in ("", tool.name)]
        schemas = [(each.name, _schema(each.parameters)) for each in named]
        rules.append(grammar_of_calls(form, schemas, is_single or bool(choice.name)))
        starts.append("calls")
    if wanted is not None and not must_call:
        rules.append(f"answer: %json {_schema(wanted.schema)}")
        starts.append("answer")
    return "\n".join([*rules, f"start: {' | '.join(starts)}"])


def compiled(engine: Engine, rules: str, param: str) -> Grammar:
    """Return the compiled grammar. Raises ``ApiError``.

    param: the field of the request that asked for it.
    """
    try:
        return engine.grammar(rules)
    except NoGrammarsError as error:
        raise ApiError(
            400,
            f"{param} needs a grammar, but {error}.",
            param=param,
            code="unsupported_parameter",
        ) from error
    except GrammarError as error:
        raise bad_request(
            f"{param} has a schema that this server can't force answers into: {error}.",
            param,
            "invalid_value",
        ) from error


def _schema(schema: Mapping[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": SPACES}, ensure_ascii=False)
