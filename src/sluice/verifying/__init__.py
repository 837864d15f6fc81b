"""What a verification looks at, in which order it is read, and what was found."""
