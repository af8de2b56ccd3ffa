"""The commands, run as a user runs them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app
from narrowcast.cli.demo import SHOWN


def test_codecs_lists_every_codec() -> None:
    result = CliRunner().invoke(app, ["codecs", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["codec"] for row in rows] == nc.list_codecs()
    assert all(row["sqnr_db"] > 2 for row in rows)


def test_demo_prints_a_row_for_every_codec_it_shows() -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    shown = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("│")}
    assert shown == set(SHOWN)


def test_an_unknown_command_ends_with_2() -> None:
    assert CliRunner().invoke(app, ["encoed"]).exit_code == 2
