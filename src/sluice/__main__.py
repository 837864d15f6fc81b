"""Entry point of the command ``sluice`` and of ``python -m sluice``."""

from __future__ import annotations

from sluice._interrupts import end_on_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    end_on_interrupt()
    # Here, not above: these imports take a tenth of a second, in which an interrupt must not show a traceback.
    from sluice.cli import main as command

    command(prog_name="sluice")


if __name__ == "__main__":
    main()
