"""Coverage-guided fuzzing of everything that parses bytes from a file: ``make fuzz``."""
