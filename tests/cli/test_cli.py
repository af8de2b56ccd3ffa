"""The commands, run as a user runs them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app


def test_codecs_lists_every_codec() -> None:
    result = CliRunner().invoke(app, ["codecs", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["codec"] for row in rows] == nc.list_codecs()
    assert all(row["sqnr_db"] > 2 for row in rows)


def test_demo_shows_a_table_with_every_error_within_its_bound() -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert "int4" in result.stdout


def test_an_unknown_command_ends_with_2() -> None:
    assert CliRunner().invoke(app, ["encoed"]).exit_code == 2
