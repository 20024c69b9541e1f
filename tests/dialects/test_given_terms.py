"""Errors about a value that came from another system's flag or variable name that flag or variable."""

from __future__ import annotations

import re

import pytest

from penstock.config.profiles import NAMES, Alias, Profile, load
from penstock.config.settings import settings
from penstock.config.sources import in_given_terms, read
from penstock.core import PenstockError
from penstock.core.errors import invalid

WRONG = ("many", "-7", "1e30", "2.5", "")
"""Values that no number, choice or switch has."""


def renamed(profile: Profile) -> list[tuple[str, str, str]]:
    """(setting, flag or empty, variable or empty) of names that stand for one setting under another name."""
    result = [(alias.to, name, "") for name, alias in profile.flags.items() if alias.to not in ("", name)]
    return result + [(alias.to, "", name) for name, alias in profile.variables.items() if alias.to]


@pytest.mark.parametrize("system", NAMES)
def test_wrong_value_is_reported_under_its_own_name(system: str) -> None:
    profile = load(system)
    assert profile
    for setting, flag, variable in renamed(profile):
        for value in WRONG:
            try:
                read({}, None, {variable: value} if variable else {}, profile, {flag: value} if flag else {})
            except PenstockError as error:
                assert str(error).startswith(f"--{flag}: " if flag else f"{variable}: "), (setting, str(error))
                assert not re.search(rf"\b{setting}\b", str(error)) or "_" not in setting, str(error)
                assert "Expected `" not in str(error) and "enum" not in str(error), str(error)


@pytest.mark.parametrize("system", NAMES)
def test_later_error_is_reported_under_the_given_name(system: str) -> None:
    profile = load(system)
    assert profile
    for setting, flag, variable in renamed(profile):
        given = f"--{flag}" if flag else variable
        error = in_given_terms(invalid(setting, f"is 5; give --{setting.replace('_', '-')} 3"), {setting: given})
        assert str(error) == f"{given}: is 5; give {given} 3" and error.failure.field == given


def test_words_that_are_no_option_are_left() -> None:
    error = in_given_terms(invalid("port", "this model has a port"), {"model": "MODEL_DIR", "dtype": "--dtype"})
    assert str(error) == "port: this model has a port"


def test_choices_are_listed() -> None:
    with pytest.raises(PenstockError, match="dtype: 'int3' is wrong: it is not one of auto, bfloat16"):
        read({"dtype": "int3"}, None, {})
    assert settings()["dtype"].choices
    with pytest.raises(PenstockError, match=r"hf_token: its value is wrong"):
        read({"hf_token": 3}, None, {})


def test_alias_with_a_secret_does_not_quote_it() -> None:
    profile = Profile("a", "A", variables={"A_KEY": Alias("api_key", lambda _: int("x"), secret=True)})
    with pytest.raises(PenstockError) as error:
        read({}, None, {"A_KEY": "hush-42"}, profile)
    assert "hush-42" not in str(error.value) and str(error.value).startswith("A_KEY: ")
