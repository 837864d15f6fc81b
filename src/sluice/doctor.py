"""``python -m sluice.doctor``: the command ``sluice doctor`` where its script is not on the path."""

from __future__ import annotations

__all__: list[str] = []

if __name__ == "__main__":
    from sluice.cli.commands.doctor import doctor_command

    doctor_command(prog_name="python -m sluice.doctor")
