"""Let mkdocstrings read our docstrings: it knows the section `Examples`, and we write `Example`."""

from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Rename the section of each docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename it in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
