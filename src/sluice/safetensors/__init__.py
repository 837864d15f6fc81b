"""The names of ``safetensors`` and ``safetensors.torch`` for the readers and writers of sluice.

Replace the import and keep the code::

    from sluice.safetensors import load_file, load_model, safe_open, save_file, save_model

Signatures, order of names, values and exceptions are those of safetensors 0.8. Different are:

- ``load_file`` and ``get_tensors`` read around the page cache into memory of their own instead of mapping the file, and
  take URLs and every other source of ``sluice.load_state_dict`` that is one safetensors file;
- ``save_file`` and ``save_model`` replace a file when the new one is complete, and copy no strided tensor as a whole;
- slices may have steps, and read only the bytes that they need;
- errors about a file are a ``SluiceError`` with file and offset, and a ``SafetensorError``. A missing file is a
  ``FileNotFoundError`` with the text of sluice;
- only the frameworks ``"pt"`` and ``"np"`` exist, and ``backend`` has no effect.

Nothing of safetensors is patched.
"""

from sluice.safetensors._files import load, load_file, load_model, save, save_file, save_model
from sluice.safetensors._open import SafetensorError, safe_open

__all__ = ["SafetensorError", "load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]
