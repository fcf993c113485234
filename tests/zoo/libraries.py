"""Imports what every process of the zoo needs, so that the server they are forked from has it already."""

import memrewrite
from tests.zoo.models import declare_operators

declare_operators()  # before torchvision is imported, which the others do

import diffusers  # noqa: E402
import timm  # noqa: E402
import torchvision  # noqa: E402
import transformers  # noqa: E402

__all__ = ["diffusers", "memrewrite", "timm", "torchvision", "transformers"]
