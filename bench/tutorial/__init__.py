"""The tutorial that this project started from: its model, and its loading methods as named strategies."""
