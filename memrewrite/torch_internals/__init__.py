"""Every private seam of PyTorch that memrewrite cannot do without, one file each, with its reason and versions."""

import torch

from memrewrite.torch_internals.versions import warn_if_untested

warn_if_untested(torch.__version__)
