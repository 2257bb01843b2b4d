"""Models of the transformers library on Fulmen's operators::

    from fulmen.integrations.transformers import patch

    patch(model)

docs/models.md says which models, and what changes.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError("fulmen.integrations.transformers needs transformers: pip install 'fulmen[transformers]'")

from fulmen.integrations.transformers.patching import Patch, patch
from fulmen.integrations.transformers.registering import register

__all__ = ["Patch", "patch", "register"]
