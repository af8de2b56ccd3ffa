"""Which codec a name gets: order, search, defaults, and every rule that cannot be."""

from __future__ import annotations

import pytest

import narrowcast as nc
from narrowcast.codecs.rules import compile_rules
from narrowcast.errors import SpecError


def test_the_first_rule_that_is_found_in_a_name_decides() -> None:
    rules = compile_rules({"mlp": "int4:block=128", r"mlp\.up": "int2", "head$": None}, "int8")
    assert rules.codec_for("layers.0.mlp.up") == nc.codec("int4:block=128")
    assert rules.codec_for("lm_head") is None
    assert rules.codec_for("header") == nc.codec("int8")
    assert rules.codec_for("") == nc.codec("int8")


def test_a_rule_is_looked_for_in_all_names_before_the_next_rule_is() -> None:
    rules = compile_rules({"b": "int4", "a": "int2"}, "int8")
    assert rules.codec_for("a", "b") == nc.codec("int4")


def test_false_means_none_because_toml_has_no_null() -> None:
    assert compile_rules({"x": False}, "int8").codec_for("x") is None


def test_a_default_of_none_leaves_what_no_rule_matches() -> None:
    rules = compile_rules({"x": "int4"}, None)
    assert rules.codec_for("x") == nc.codec("int4")
    assert rules.codec_for("y") is None


def test_a_codec_may_be_a_codec_or_a_mapping() -> None:
    rules = compile_rules({"a": nc.codec("nf4"), "b": {"name": "int4", "block": 32}}, nc.codec("int3"))
    assert [codec.spec for name in "abc" if (codec := rules.codec_for(name))] == ["nf4", "int4:block=32", "int3"]


def test_rules_that_decided_nothing_are_listed_in_order() -> None:
    rules = compile_rules({"misspelt": "int4", "mlp": "int8", "mlp.up": "int2", "head": None}, "int8")
    assert rules.unused == ["misspelt", "mlp", "mlp.up", "head"]
    rules.codec_for("mlp.up")
    rules.codec_for("head")
    assert rules.unused == ["misspelt", "mlp.up"]


def test_rules_are_plain_values_again() -> None:
    rules = compile_rules({"a": {"name": "int4", "block": 32}, "b": None, "c": False}, "int8")
    assert rules.config() == {"a": "int4:block=32", "b": None, "c": None}
    assert compile_rules(rules.config(), "int8").config() == rules.config()


def test_no_rules_are_no_rules() -> None:
    assert compile_rules(None, "int8").codec_for("x") == compile_rules({}, "int8").codec_for("x") == nc.codec("int8")


@pytest.mark.parametrize(
    ("rules", "default", "words"),
    [
        ({"(": "int4"}, "int8", [r"rules: '(' is not a regular expression", r"'\\('"]),
        ({"ok": "int4", "x": "int44"}, "int8", ["rules['x']: codec 'int44' does not exist", "write None"]),
        ({"x": True}, "int8", ["rules['x']: codec=True"]),
        ({"x": 4}, "int8", ["rules['x']: codec=4"]),
        ({3: "int4"}, "int8", ["rules: the key 3 is a int", "regular expressions as strings"]),
        (["int4"], "int8", ["rules=['int4']: expected a mapping", "got list"]),
        ("mlp=int4", "int8", ["rules='mlp=int4': expected a mapping", "got str"]),
        ({}, "int44", ["codec 'int44' does not exist"]),
    ],
    ids=str,
)
def test_rules_that_cannot_be_are_refused_when_they_are_made(rules: object, default: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        compile_rules(rules, default)  # type: ignore[arg-type]
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
