"""The dispatch for graph compilers: engines differentiate by themselves, which none can trace.

A module of its own, imported while something is compiled: saying so imports torch's compiler, which
takes more than a second.
"""

from __future__ import annotations

import torch

from slayformer.attention.backends import attend_now

attend = torch.compiler.disable(attend_now)
