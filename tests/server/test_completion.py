"""``penstock completion`` in the installed shells, and the advice printed by ``penstock doctor``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import run_in_process
from terminal import Terminal

from penstock.cli.advice import advice
from penstock.cli.main import COMMANDS, main

BASH = """source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_penstock
printf "%s\\n" "${COMPREPLY[@]}" """
GIB = 2**30


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "penstock.bash"
    path.write_text(run_in_process(main, "completion", "bash").stdout)
    return path


def complete(script: Path, *words: str) -> list[str]:
    """Return bash's completions of the last word, for a command line that begins with ``penstock``."""
    command = ["bash", "-c", BASH, "bash", str(script), "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_options_and_values(script: Path) -> None:
    assert complete(script, "") == [*COMMANDS]
    assert complete(script, "do") == ["download", "doctor"]
    assert "--model" in complete(script, "serve", "--mod") and complete(script, "doctor", "--j") == ["--json"]
    assert {"auto", "int8"} <= {*complete(script, "serve", "--kv-cache-dtype", "")}
    assert complete(script, "completion", "--kv") == []
    assert complete(script, "serve", "--model", "/tm") == ["/tmp"]
    assert "memory" in complete(script, "plan", "") and "--model" in complete(script, "plan", "memory", "--mod")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_complete_options(shell: str, tmp_path: Path) -> None:
    completion = run_in_process(main, "completion", shell).stdout
    assert "kv-cache-dtype" in completion and "int8" in completion
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(completion)
    start, load = {
        "zsh": ([shell, "-f"], f'eval "$(cat {path})"'),
        "fish": ([shell, "--no-config"], f"source {path}"),
    }[shell]
    terminal = Terminal(*start, columns=100, lines=20, folder=tmp_path)
    try:
        terminal.type(f"{load}; echo rea''dy\n")
        terminal.wait_for(lambda screen: "\nready" in screen)
        terminal.type("penstock serve --kv-cache-dt\t")
        terminal.wait_for(lambda screen: "penstock serve --kv-cache-dtype" in screen)
        terminal.type(" in\t")
        terminal.wait_for(lambda screen: re.search("--kv-cache-dtype +int8", screen) is not None)
    finally:
        terminal.close()


GOOD: dict[str, str] = {
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "proc/meminfo": "MemTotal: 100 kB\nSwapTotal: 2097152 kB\nSwapFree: 2097152 kB",
    "proc/swaps": "Filename Type\n/swapfile file",
    "proc/sys/vm/swappiness": "10",
}
MACHINE: dict[str, Any] = {"isa": "avx2", "built": ["portable", "avx2"], "machine": ["portable", "avx2"]}
MACHINE |= {"kv_bytes": GIB, "free_bytes": 2 * GIB, "cores": (4, 4)}


def advice_for(root: Path, files: dict[str, str], **machine: Any) -> list[str]:
    for name, text in (GOOD | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return advice(**MACHINE | machine, root=root)


def test_good_settings_give_no_advice(tmp_path: Path) -> None:
    assert advice_for(tmp_path, {}) == []
    assert advice(**MACHINE, root=tmp_path / "none") == []  # a machine without these system files


@pytest.mark.parametrize(
    ("files", "machine", "command"),
    [
        ({"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, {}, "echo madvise | sudo tee"),
        ({"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"}, {}, "echo performance | sudo tee"),
        ({"proc/meminfo": "SwapTotal: 2097152 kB\nSwapFree: 1048576 kB"}, {}, "sudo swapoff -a"),
        ({"proc/sys/vm/swappiness": "60"}, {}, "sudo sysctl vm.swappiness=10"),
        ({}, {"machine": ["portable", "avx2", "avx512"]}, "pip install --force-reinstall --no-deps ."),
        ({}, {"isa": "portable"}, "unset PENSTOCK_ISA"),
        ({}, {"kv_bytes": 3 * GIB}, f"export PENSTOCK_KV_CACHE_MEMORY_BYTES={GIB}"),
        ({}, {"cores": (2, 8)}, "docker update --cpus 8"),
    ],
)
def test_advice_contains_command_to_run(
    tmp_path: Path, files: dict[str, str], machine: dict[str, Any], command: str
) -> None:
    (sentence,) = advice_for(tmp_path, files, **machine)
    assert command in sentence
