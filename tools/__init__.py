"""Checks of the repository itself: phrases to avoid, and the picture of the layers. Not part of the package."""
