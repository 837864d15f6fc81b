"""Archives that checkpoints come in: zip directories and records, and tar files, which are recognised and refused."""
