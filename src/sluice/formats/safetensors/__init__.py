"""The safetensors format. ``reader.Safetensors`` is its entry point and has the specification."""
