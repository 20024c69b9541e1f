"""Errors about an option set by another system's flag or environment variable: they name that flag or variable."""

from __future__ import annotations

import re

import pytest

from penstock.config.profiles import NAMES, Alias, Profile, load
from penstock.config.settings import settings
from penstock.config.sources import in_given_terms, read
from penstock.core import PenstockError
from penstock.core.errors import invalid

WRONG = ("many", "-7", "1e30", "2.5", "")
"""Invalid values for numbers, choices and switches."""


def renamed(profile: Profile) -> list[tuple[str, str, str]]:
    """Return (setting, flag or "", variable or "") for each flag and variable that the profile renames."""
    result = [(alias.to, name, "") for name, alias in profile.flags.items() if alias.to not in ("", name)]
    return result + [(alias.to, "", name) for name, alias in profile.variables.items() if alias.to]


@pytest.mark.parametrize("system", NAMES)
def test_invalid_value_is_reported_under_its_alias(system: str) -> None:
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
def test_later_error_is_reported_under_given_name(system: str) -> None:
    profile = load(system)
    assert profile
    for setting, flag, variable in renamed(profile):
        given = f"--{flag}" if flag else variable
        error = in_given_terms(invalid(setting, f"is 5; give --{setting.replace('_', '-')} 3"), {setting: given})
        assert str(error) == f"{given}: is 5; give {given} 3" and error.failure.field == given


def test_message_without_option_names_is_unchanged() -> None:
    error = in_given_terms(invalid("port", "this model has a port"), {"model": "MODEL_DIR", "dtype": "--dtype"})
    assert str(error) == "port: this model has a port"


def test_error_lists_choices_and_hides_secrets() -> None:
    with pytest.raises(PenstockError, match="dtype: 'int3' is wrong: it is not one of auto, bfloat16"):
        read({"dtype": "int3"}, None, {})
    assert settings()["dtype"].choices
    with pytest.raises(PenstockError, match=r"hf_token: its value is wrong"):
        read({"hf_token": 3}, None, {})


def test_error_of_secret_alias_hides_value() -> None:
    profile = Profile("a", "A", variables={"A_KEY": Alias("api_key", lambda _: int("x"), secret=True)})
    with pytest.raises(PenstockError) as error:
        read({}, None, {"A_KEY": "hush-42"}, profile)
    assert "hush-42" not in str(error.value) and str(error.value).startswith("A_KEY: ")
